"""Every vLLM function that this engine replaces, calls privately, or whose behaviour it relies on.

Each has a digest of its source and the reason. `tests/server/test_vllm_internals.py` compares the
digests with the installed vLLM and names the changed functions. After an upgrade, compare each
changed function with its reason, update the engine, and write the new digests with

    python -m logsteer_server.engines.vllm.internals --write

Without `--write` it prints them. The comments group the functions by what they concern.
"""

import hashlib
import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

CORE = "vllm.v1.engine.core.EngineCore"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager.KVCacheManager"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
BLOCKS = "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager"
HASHES = "vllm.v1.core.kv_cache_utils"
RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
WORKER = "vllm.v1.worker.gpu_worker.Worker"
CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
BATCH = "vllm.v1.worker.gpu_input_batch.InputBatch"
MAMBA = "vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm"
SAMPLER = "vllm.v1.sample.sampler.Sampler"
ROTARY = "vllm.model_executor.layers.rotary_embedding"
LINEAR = "vllm.model_executor.kernels.linear"
INT8 = f"{LINEAR}.scaled_mm.cpu.CPUInt8ScaledMMLinearKernel"


class Internal(NamedTuple):
    """The digest of a function's source, and how this engine uses the function."""

    digest: str
    reason: str


INTERNALS: dict[str, Internal] = {
    # start
    "vllm.model_executor.models.registry._run_in_subprocess": Internal(
        "80408fcf7d49", "replaced: a model's class is inspected in this process"
    ),
    "vllm.model_executor.models.registry._LazyRegisteredModel.inspect_model_cls": Internal(
        "8c2373446484", "calls the function above by its module's name"
    ),
    "vllm.config.VllmConfig.compute_hash": Internal(
        "6098e7d90854", "`additional_config` keeps compiled models with other steering tables apart"
    ),
    "vllm.compilation.decorators._try_load_aot_compiled_fn": Internal(
        "717e080d07d7",
        "calls `finalize_loading`, which a model compiled by Inductor alone does not have",
    ),
    "vllm.config.vllm.VllmConfig._maybe_enable_breakable_cudagraph": Internal(
        "7a80823b25e6",
        "`config.set_breakable_graphs` sets the same before layers are imported",
    ),
    "vllm.v1.worker.worker_base.WorkerWrapperBase.init_worker": Internal(
        "271ba5bd9a3c", "every executor finds our worker by its name"
    ),
    f"{MAMBA}._mamba_chunk_scan_combined_fwd_cpu": Internal(
        "765f4cdf5431",
        "gives no states for the prefix cache, which is off for hybrid models on CPUs",
    ),
    "triton.knobs.language_knobs": Internal(
        "85af73803011", "TRITON_F32_DEFAULT sets the precision of float32 products"
    ),
    "triton.language.core.dot": Internal(
        "d35d31d08844", "kernels that name no precision take that one"
    ),
    "vllm.v1.attention.ops.triton_unified_attention.kernel_unified_attention": Internal(
        "1d20ee6c8d49", "attention in float32 names no precision"
    ),
    f"{ROTARY}.phi3_long_rope_scaled_rope.Phi3LongRoPEScaledRotaryEmbedding.__init__": Internal(
        "2fd1435b9232", "which context length flips LongRoPE's factors"
    ),
    "vllm.model_executor.models.llama4.Llama4ForCausalLM.__init__": Internal(
        "9e3af6d05bb5", "from which context length vLLM scales Llama 4's queries"
    ),
    # steps
    f"{CORE}.__init__": Internal("701c2d37f74c", "the core runs in this process"),
    f"{CORE}.preprocess_add_request": Internal(
        "60b862d940ac", "a request is made, and its grammar begun, as this does"
    ),
    "vllm.v1.structured_output.StructuredOutputManager.grammar_init": Internal(
        "4f7f6a24accc", "makes the backend that a form names, as vLLM's front end has it do"
    ),
    "vllm.v1.structured_output.backend_guidance.GuidanceBackend.compile_grammar": Internal(
        "3f17f9834e62", "compiles what planning has compiled, with larger limits"
    ),
    f"{CORE}.step_with_batch_queue": Internal(
        "f9e54683f276", "replaced by `steps.StepQueue`, which begins and ends steps apart"
    ),
    f"{CORE}.post_step": Internal("aa67347996b5", "left out: it is for drafted tokens alone"),
    "vllm.config.VllmConfig.max_concurrent_batches": Internal(
        "fd5570554d04", "how many steps are under way at once"
    ),
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": Internal(
        "ba530e0bb9da",
        "schedules a step before the tokens of the one before it are known; at most one more for a "
        "request that has ended",
    ),
    "vllm.v1.executor.uniproc_executor.UniProcExecutor.collective_rpc": Internal(
        "2ca9a2bf4d6f", "without blocking, returns before the device has computed"
    ),
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor.collective_rpc": Internal(
        "fa145c55ce15", "calls between steps wait for the steps that were begun before"
    ),
    f"{CORE}.add_request": Internal("be0d1d656991", "called without vLLM's front end"),
    f"{CORE}.abort_requests": Internal("1b6ec7a96ebd", "called without vLLM's front end"),
    f"{CORE}.add_lora": Internal(
        "c911c0883784", "replaced: all that vLLM does for an adapter is done by its workers"
    ),
    f"{CORE}.remove_lora": Internal("f273cd4033d0", "empties the slot of an adapter"),
    "vllm.v1.engine.core.EngineCoreProc._process_engine_step": Internal(
        "368483ef1e8a", "what vLLM does around a step, as we do"
    ),
    f"{SCHEDULER}.schedule": Internal(
        "81a3aa7c0bff", "preempts and asks for prefix hits by the attributes that we replace"
    ),
    f"{SCHEDULER}.update_from_output": Internal(
        "3a54ee90e15a",
        "takes outputs of requests aborted meanwhile; the way back for rows and NaN counts",
    ),
    f"{SCHEDULER}._update_after_schedule": Internal(
        "a3fa8c562c14", "counts what a step reads as it is scheduled"
    ),
    f"{SCHEDULER}._preempt_request": Internal(
        "4c2de2294d84", "replaced to count; puts the request first in `waiting`"
    ),
    f"{SCHEDULER}._reserve_prefill_lookahead": Internal(
        "a90cacaf88eb", "replaced: asked last how many tokens of a request a step reads"
    ),
    "vllm.v1.request.Request.__init__": Internal(
        "639c859ff99c", "made here for prompts that nothing is generated for"
    ),
    "vllm.v1.request.Request.get_skip_reading_prefix_cache": Internal(
        "0f0fbc47104a", "scored requests read the prefix cache unless they say no"
    ),
    f"{SCHEDULER}.get_grammar_bitmask": Internal(
        "93af912d48e9", "called between schedule and sampling: what forced replies may go on with"
    ),
    "vllm.v1.core.sched.utils.check_stop": Internal(
        "da923c75ab21",
        "ends requests at our `stop_token_ids` and `max_tokens`, as `DrawnTokens` does",
    ),
    # prefix cache and blocks
    f"{HASHES}.get_request_block_hasher": Internal(
        "1e319b5b2180", "no prefix shorter than a hash's block is found"
    ),
    f"{HASHES}.generate_block_hash_extra_keys": Internal(
        "329b0368c58a", "wrapped: what keeps cached prefixes apart"
    ),
    f"{HASHES}._gen_lora_extra_hash_keys": Internal(
        "44888779828b", "adapters share no prefix: name and path follow their content"
    ),
    f"{MANAGER}.get_computed_blocks": Internal(
        "a418ea4c8675", "replaced: hits end before the first wanted row"
    ),
    f"{COORDINATOR}.UnitaryKVCacheCoordinator.find_longest_cache_hit": Internal(
        "927033b15f1c", "replaced: hits are limited"
    ),
    f"{COORDINATOR}.HybridKVCacheCoordinator.find_longest_cache_hit": Internal(
        "7726210f10e0", "replaced: hits are limited"
    ),
    f"{BLOCKS}.allocate_new_blocks": Internal(
        "59a15107be9e", "notes which blocks are taken, to be cleared"
    ),
    "vllm.v1.core.block_pool.BlockPool.get_usage": Internal(
        "3b1fa21c13fc", "the first block is never a request's"
    ),
    "vllm.v1.kv_cache_interface.KVCacheConfig.needs_kv_cache_zeroing": Internal(
        "1ae69b24abbf", "replaced: every new block is cleared"
    ),
    f"{WORKER}.initialize_from_config": Internal(
        "b30c402485f1", "makes GPUs ready to clear blocks"
    ),
    f"{CPU_RUNNER}._zero_block_ids": Internal(
        "3be806eb8680", "replaced: clears blocks of every kind of attention"
    ),
    # V2 runner
    f"{RUNNER_V2}.execute_model": Internal(
        "1406589fd2cf", "wrapped: calls the methods below, each once a step, in this order"
    ),
    f"{RUNNER_V2}.finish_requests": Internal(
        "10a9e16dd5e0", "wrapped: requests end there; removes preempted ones, too"
    ),
    f"{RUNNER_V2}.add_requests": Internal(
        "5a73e8836fef", "wrapped: requests begin there, preempted ones once more"
    ),
    f"{RUNNER_V2}.update_requests": Internal(
        "b5b676c6ea73", "clears blocks by the attribute that we set on CPUs"
    ),
    f"{RUNNER_V2}.prepare_inputs": Internal(
        "451eea49ef29", "wrapped: after it a step's tokens are known"
    ),
    f"{RUNNER_V2}.sample": Internal(
        "71c87752f202", "wrapped: our sampler is told whose rows it gets"
    ),
    f"{RUNNER_V2}.sample_tokens": Internal(
        "3630f6fb4cdd", "reads rows by the attribute that we set; copies them with the tokens"
    ),
    f"{RUNNER_V2}.postprocess_sampled": Internal(
        "029686177cdc", "asks our sampler for a table of penalties, of which there is none"
    ),
    f"{RUNNER_V2}.capture_model": Internal(
        "781538c6aea8", "wrapped: steering takes no notice of requests of the warm-up before it"
    ),
    f"{RUNNER_V2}.load_model": Internal(
        "0ec07dacf27a", "makes the sampler that we replace, and LoRA layers by the method below"
    ),
    f"{RUNNER_V2}.profile_run": Internal(
        "68768be57592", "wrapped: rows are read in it, so that their memory stays free"
    ),
    f"{RUNNER_V2}._dummy_sampler_run": Internal(
        "d2b0d889fef0", "draws rows of no request, by which memory is measured"
    ),
    f"{RUNNER_V2}._init_kv_zero_meta": Internal(
        "991f3dda8493", "wrapped: clears blocks of every kind of attention on CPUs"
    ),
    "vllm.v1.worker.gpu.warmup._warmup_kernels": Internal(
        "72a4f2c3c961", "runs requests that have none of our arguments"
    ),
    "vllm.v1.worker.gpu.sample.sampler.Sampler.__call__": Internal(
        "533b7acf990f", "replaced by the draw that all engines share"
    ),
    "vllm.v1.worker.gpu.input_batch.get_num_sampled_and_rejected": Internal(
        "8782d5374a54", "drops the tokens of unfinished prompts"
    ),
    "vllm.v1.worker.gpu.sample.prompt_logprob.PromptLogprobsWorker"
    ".compute_prompt_token_id_logprobs": Internal(
        "67856d874514", "replaced: scored rows are read there"
    ),
    "vllm.v1.worker.gpu.async_utils.AsyncOutput": Internal(
        "e865f32fd95d", "the way back for rows, counts of NaN and what is read with a token"
    ),
    "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager.dispatch": Internal(
        "cba5513cda0b", "finds no graph where a probe says that none is captured"
    ),
    "vllm.triton_utils.importing": Internal(
        "c084b8996a39", "takes our stand-in for Triton's backend on CPUs"
    ),
    # V1 runner
    f"{RUNNER}.execute_model": Internal(
        "83d9dbec8b7d", "calls the methods below, each once a step, in this order"
    ),
    f"{RUNNER}._update_states": Internal(
        "7fcf397fab3e", "wrapped: requests begin and end there, in steps without tokens, too"
    ),
    f"{RUNNER}._prepare_inputs": Internal(
        "2eaaff0115ed", "wrapped: after it a step's tokens are known"
    ),
    f"{RUNNER}._model_forward": Internal("9eae43c70f2b", "wrapped: a probe of the residual stream"),
    f"{RUNNER}.sample_tokens": Internal(
        "57f6d9fdedbe", "wrapped: rows and NaN counts go back, our draw takes the grammars' masks"
    ),
    f"{RUNNER}._sample": Internal(
        "ad3ec7a228d5", "wrapped: our sampler is told whose rows it gets"
    ),
    f"{RUNNER}._bookkeeping_sync": Internal(
        "ab47ea08b444",
        "reads prompt log-probabilities before requests advance; drops unfinished prompts' tokens",
    ),
    f"{RUNNER}._get_prompt_logprobs_dict": Internal(
        "b1cd855fe9df", "wrapped: scored rows are read there"
    ),
    f"{RUNNER}.profile_run": Internal(
        "30c56d00e47a", "wrapped: rows are read in it, so that their memory stays free"
    ),
    f"{RUNNER}._dummy_sampler_run": Internal(
        "4bce37fbe514", "draws rows of no request, by which memory is measured"
    ),
    f"{RUNNER}._dummy_run": Internal(
        "7a3e6e918c2c",
        "makes a later pipeline stage's buffers, which eager models on CPUs are not given",
    ),
    f"{RUNNER}.load_model": Internal("e7a6ee4e6cf8", "loads LoRA layers by the method below"),
    f"{CPU_RUNNER}.load_model": Internal("8cde22d6a33f", "loads LoRA layers by the method below"),
    "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin.load_lora_model": Internal(
        "5aa3629fe6ba", "wrapped: no LoRA layer around embeddings and head"
    ),
    f"{BATCH}.add_request": Internal(
        "d1d5a3ee7945", "`num_tokens_no_spec` is right after preemption, too"
    ),
    f"{SAMPLER}.forward": Internal("3910a89dbb52", "replaced by the draw that all engines share"),
    f"{SAMPLER}.greedy_sample": Internal("6fda1da15d92", "a faster argmax"),
    "vllm.v1.outputs.LogprobsTensors.tolists": Internal(
        "ccdbfad59d06", "the way back for what is read with a token"
    ),
    f"{WORKER}.determine_available_memory": Internal(
        "dad4ce2aba81", "the key-value cache gets what the profile leaves"
    ),
    f"{WORKER}.init_device": Internal(
        "8c684a7cd35d", "wrapped: our runner's class is put before vLLM's"
    ),
    f"{CPU_WORKER}.init_device": Internal(
        "52e48fc161a4", "wrapped: our runner's class is put before vLLM's"
    ),
    f"{WORKER}.load_model": Internal(
        "9a2d85dd2196", "wrapped: the operation is put behind the layers before they are compiled"
    ),
    f"{CPU_WORKER}.load_model": Internal(
        "9a2d85dd2196", "wrapped: the operation is put behind the layers before they are compiled"
    ),
    "vllm.compilation.decorators._support_torch_compile": Internal(
        "1fe4f204e5d2", "a probe runs the model uncompiled by `skip_compiled`"
    ),
    "vllm.compilation.cuda_graph.CUDAGraphWrapper.__call__": Internal(
        "360fd5f02354", "a probe runs the model outside captured graphs"
    ),
    "vllm.forward_context.create_forward_context": Internal(
        "c41f56d49d09", "every forward pass finds the steering tables"
    ),
    "vllm.utils.torch_utils.direct_register_custom_op": Internal(
        "53a8a9af8dbf", "registers our operations"
    ),
    # adapters
    "vllm.lora.utils.get_supported_lora_modules": Internal(
        "84421f10521a", "reads `embedding_modules`, which we empty"
    ),
    "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager.add_adapter": Internal(
        "4e7673dd45ce", "what is loaded is never read again, from whatever path"
    ),
    "vllm.lora.utils.parse_fine_tuned_lora_name": Internal(
        "2544e2ea510d", "names a module as vLLM does"
    ),
    "vllm.lora.model_manager.LoRAModelManager.activate_adapter": Internal(
        "364ca197204e", "applies what `_get_lora_layer_weights` finds, and nothing else"
    ),
    "vllm.lora.model_manager.LoRAModelManager._get_lora_layer_weights": Internal(
        "542937815422", "called privately: what is applied to a module"
    ),
    "vllm.lora.model_manager.LoRAModelManager._create_merged_loras_inplace": Internal(
        "fb752a75bbc6", "`packed_modules` names what a packed module is made of"
    ),
    # models
    "vllm.model_executor.models.bloom.BloomMLP.__init__": Internal(
        "df57c9de97e6", "corrected: its GELU"
    ),
    f"{ROTARY}.base.RotaryEmbedding.forward_cpu": Internal(
        "9e6cd415c0ea", "corrected: takes no notice of how far apart a query's heads are"
    ),
    "vllm.model_executor.models.deepseek_v2.DeepseekV2DecoderLayer.forward": Internal(
        "377c0c694d81", "scales the stream in float16"
    ),
    "vllm.model_executor.models.llama.LlamaForCausalLM.compute_logits": Internal(
        "7f210acea824", "gives logits of any hidden states"
    ),
    "vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model": Internal(
        "39c27f400e70", "INT8 layers are tried in the model's dtype"
    ),
    "vllm.model_executor.layers.logits_processor.LogitsProcessor._apply_head": Internal(
        "4213b94abbc0", "computes the head by an attribute that we set, without a copy"
    ),
    f"{LINEAR}.init_int8_linear_kernel": Internal(
        "b9d73a100cbe", "takes the first kernel of the list that we replace"
    ),
    f"{LINEAR}.choose_mp_linear_kernel": Internal(
        "396a9f2e9b49", "takes the first kernel of the list that we replace"
    ),
    f"{INT8}.process_weights_after_loading": Internal(
        "b5314bc90b87", "replaced: INT8 layers are tried as they are loaded"
    ),
    f"{INT8}.process_weights_for_onednn": Internal(
        "d5e681171a4a", "called privately; puts the weights' sums aside"
    ),
    f"{INT8}._apply_weights_onednn": Internal("27dcb76fb8ee", "called privately"),
    f"{INT8}._get_layer_params": Internal("7f5558a95453", "called privately"),
    f"{INT8}.apply_weights": Internal(
        "9c535ec1a4c0", "computes a layer by an attribute that we set"
    ),
    f"{LINEAR}.mixed_precision.cpu.CPUWNA16LinearKernel.can_implement": Internal(
        "66ab17081aa8", "wrapped: float32 is refused"
    ),
}
"""By dotted name; the digest of a class covers its whole body."""


def resolve(name: str) -> Any:
    """Import the object of a dotted name. Errors: ImportError, AttributeError."""
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)) or split == 1:
                raise
            continue
        for part in parts[split:]:
            found = inspect.getattr_static(found, part)
        return found
    raise ImportError(name)


def digest(name: str) -> str:
    """Return the digest of a function's or class's source, without its indentation."""
    found = resolve(name)
    for wrapper in ("__func__", "fget", "fn"):  # static methods, properties, Triton's kernels
        found = getattr(found, wrapper, found)
    source = inspect.cleandoc("\n" + inspect.getsource(found))
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def find_changed() -> dict[str, str]:
    """Return, by name, the new digest of each changed internal, or why it has none."""
    changed = {}
    for name, listed in INTERNALS.items():
        try:
            found = digest(name)
        except (ImportError, AttributeError, OSError, TypeError) as error:
            found = f"gone: {error}"
        if found != listed.digest:
            changed[name] = found
    return changed


def main() -> None:
    """Print the changed internals of the installed vLLM; with `--write` store their digests."""
    here = Path(__file__)
    text = here.read_text()
    for name, found in find_changed().items():
        listed = INTERNALS[name]
        sys.stdout.write(f"{name}: {listed.digest} -> {found}\n    {listed.reason}\n")
        if not found.startswith("gone"):
            text = text.replace(f'"{listed.digest}"', f'"{found}"')
    if "--write" in sys.argv[1:]:
        here.write_text(text)


if __name__ == "__main__":
    main()
