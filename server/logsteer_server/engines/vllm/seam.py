"""Every internal of vLLM that this engine relies on, and what it relies on, as data.

Six modules touch vLLM: `config` (environment, arguments, description), `core` (the engine's
process), `runner`, `worker`, `operation` and `cpu_kernels` (the workers' processes); `requests` and
`generation` read what `core` gives them. The others are free of it. Another model runner of vLLM's,
such as V2, takes another `runner`, and rows of its own here.

`tests/server/test_vllm_seam.py` holds each row against the vLLM that is installed, so that an
upgrade fails with the name of what moved; and it finds touches that have no row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

InternalKind = Literal["call", "override", "attribute", "source", "name", "environment"]


@dataclass(frozen=True, slots=True)
class Internal:
    """Something of vLLM's.

    What `relies_on` says depends on `kind`:

    * call: the arguments that we give, as in a signature: those in front of `*` by position. All
      other parameters have defaults.
    * override: all parameters of a method that a function of ours takes the place of.
    * attribute: the name of an attribute of a class.
    * source: code in the body of a function or class; white space is ignored.
    * name: nothing more than that it exists.
    * environment: likewise, for a variable that vLLM reads.
    """

    name: str
    kind: InternalKind
    relies_on: str
    reason: str
    used_in: tuple[str, ...]


def _attributes(owner: str, names: str, reason: str, *used_in: str) -> Iterator[Internal]:
    """Make a row for each attribute of a class."""
    for name in names.split():
        yield Internal(owner, "attribute", name, reason, used_in)


def _row(kind: InternalKind, name: str, relies_on: str, reason: str, *used_in: str) -> Internal:
    return Internal(name, kind, relies_on, reason, used_in)


CORE = "vllm.v1.engine.core.EngineCore"
FRONT = "vllm.v1.engine.llm_engine.LLMEngine"
MANAGER = "vllm.v1.core.kv_cache_manager.KVCacheManager"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
BATCH = "vllm.v1.worker.gpu_input_batch.InputBatch"
HASHES = "vllm.v1.core.kv_cache_utils"
LINEAR = "vllm.model_executor.kernels.linear"
INT8 = f"{LINEAR}.scaled_mm.cpu.CPUInt8ScaledMMLinearKernel"
WNA16 = f"{LINEAR}.mixed_precision.cpu.CPUWNA16LinearKernel"

_START = (
    *(
        _row("environment", name, "", "set before vLLM is imported", "config")
        for name in (
            "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_NO_USAGE_STATS",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_LOGGING_LEVEL",
            "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_INT4_W4A8",
        )
    ),
    _row("name", "vllm.envs.VLLM_BATCH_INVARIANT", "", "what the engine says of itself", "config"),
    _row("name", "vllm.__version__", "", "what the engine says of itself", "config"),
    _row("call", "vllm.engine.arg_utils.EngineArgs",
         "*, model, dtype, tensor_parallel_size, pipeline_parallel_size, quantization, "
         "max_model_len, enforce_eager, enable_prefix_caching, async_scheduling, "
         "disable_log_stats, use_tqdm_on_load, worker_cls, additional_config, hf_overrides, "
         "enable_lora, max_loras, max_cpu_loras, max_lora_rank, distributed_executor_backend, "
         "block_size, kv_cache_memory_bytes, gpu_memory_utilization",
         "what a model of the configuration is set up with", "config", "core"),
    _row("call", "vllm.engine.arg_utils.EngineArgs.create_engine_config", "self",
         "vLLM's own checks and defaults", "core"),
    _row("source", "vllm.config.VllmConfig.compute_hash", "if self.additional_config:",
         "compiled models with and without steering are not taken for one another", "config"),
    _row("source", "vllm.v1.worker.worker_base.WorkerWrapperBase.init_worker",
         "resolve_obj_by_qualname(parallel_config.worker_cls)",
         "every executor finds our worker by its name", "config"),
    _row("call", "vllm.transformers_utils.config.get_config", "model, *, trust_remote_code",
         "the context length before vLLM checks it", "config"),
    *_attributes("vllm.config.ModelConfig",
                 "dtype head_dtype tokenizer quantization hf_text_config get_vocab_size "
                 "get_hidden_size try_get_generation_config",
                 "what the engine says of its model", "config"),
    *_attributes("vllm.config.VllmConfig", "model_config device_config",
                 "what the engine says of its model", "config"),
    *_attributes("vllm.config.DeviceConfig", "device_type", "whether TF32 is possible", "config"),
    _row("attribute", "vllm.platforms.interface.Platform", "is_cpu",
         "which of vLLM's two builds it is", "core", "worker"),
    _row("name", "vllm.platforms.current_platform", "", "which build it is", "core", "worker"),
)  # fmt: skip

_STEPS = (
    _row("call", FRONT, "vllm_config, executor_class, *, log_stats", "one process for all", "core"),
    _row("call", "vllm.v1.executor.Executor.get_class", "vllm_config", "one or more ranks", "core"),
    *_attributes(FRONT, "engine_core output_processor", "the engine's parts", "core"),
    _row("source", "vllm.v1.engine.core_client.EngineCoreClient.make_client",
         "return InprocClient(vllm_config, executor_class, log_stats)",
         "without multiprocessing the core is in this process", "core"),
    _row("attribute", "vllm.v1.engine.core_client.InprocClient", "engine_core",
         "the core behind the client", "core"),
    *_attributes(CORE, "scheduler model_executor request_block_hasher step_fn",
                 "the core's parts", "core"),
    _row("source", "vllm.v1.engine.core.EngineCoreProc._process_engine_step",
         "outputs, model_executed = self.step_fn()", "how vLLM steps its core, as we do", "core"),
    _row("source", "vllm.v1.engine.core.EngineCoreProc._process_engine_step",
         "for output in outputs.items() if outputs else ()", "a step may have no outputs", "core"),
    _row("source", "vllm.v1.engine.core.EngineCoreProc._process_engine_step",
         "self.post_step(model_executed)", "what vLLM does after each step", "core"),
    _row("call", f"{CORE}.post_step", "self, *, model_executed", "after each step", "core"),
    _row("call", f"{CORE}.add_request", "self, request", "without vLLM's front end", "core"),
    _row("call", f"{CORE}.abort_requests", "self, request_ids", "cancelled jobs", "core"),
    _row("call", f"{CORE}.add_lora", "self, lora_request", "adapters", "core"),
    _row("call", f"{CORE}.remove_lora", "self, lora_id", "adapters", "core"),
    _row("call", f"{CORE}.shutdown", "self", "the end", "core"),
    _row("call", "vllm.v1.executor.Executor.collective_rpc", "self, method, *, args",
         "methods of our worker are called by name on every rank", "core"),
    _row("call", "vllm.v1.request.Request",
         "request_id, prompt_token_ids, sampling_params, pooling_params, *, cache_salt, "
         "lora_request, block_hasher", "prompts that nothing is generated for", "core"),
    _row("source", "vllm.v1.request.Request.get_skip_reading_prefix_cache",
         "return self.sampling_params.skip_reading_prefix_cache",
         "scored requests use the prefix cache unless they say no", "core"),
    _row("source", f"{HASHES}.generate_block_hash_extra_keys",
         '[("cache_salt", request.cache_salt)]', "plans share no cached prefix", "core"),
    _row("source", f"{HASHES}._gen_lora_extra_hash_keys",
         "lora_request.lora_name, lora_request.lora_path",
         "adapters share no cached prefix: their names and paths follow their content", "core"),
    _row("attribute", SCHEDULER, "kv_cache_manager", "prefix hits are limited there", "core"),
    _row("source", SCHEDULER, "self.kv_cache_manager.get_computed_blocks(request)",
         "the scheduler asks the manager's attribute, which is replaced", "core"),
    _row("override", f"{MANAGER}.get_computed_blocks", "self, request", "replaced", "core"),
    _row("attribute", MANAGER, "coordinator", "prefix hits are limited there", "core"),
    _row("source", f"{MANAGER}.get_computed_blocks",
         "self.coordinator.find_longest_cache_hit(request.block_hashes, max_cache_hit_length)",
         "the manager asks the coordinator's attribute, which is replaced", "core"),
    _row("override",
         "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.find_longest_cache_hit",
         "self, block_hashes, max_cache_hit_length", "replaced", "core"),
    _row("attribute", "vllm.v1.request.Request", "sampling_params", "says the first row", "core"),
)  # fmt: skip

_OUTPUTS = (
    _row("attribute", "vllm.v1.engine.EngineCoreOutputs", "outputs", "a step's outputs", "core"),
    _row("attribute", "vllm.v1.engine.EngineCoreOutput", "request_id", "whose it is", "engine"),
    *_attributes("vllm.v1.engine.EngineCoreOutput",
                 "finished finish_reason prompt_token_id_logprobs",
                 "the end of a prompt, and the way back for rows", "requests"),
    _row("attribute", "vllm.v1.engine.EngineCoreOutput", "prefill_stats",
         "tokens of the prefix cache", "requests", "generation"),
    _row("attribute", "vllm.v1.metrics.stats.PrefillStats", "num_cached_tokens",
         "tokens of the prefix cache", "requests", "generation"),
    _row("attribute", "vllm.v1.engine.EngineCoreOutput", "new_logprobs",
         "arrays, taken before vLLM makes objects of them", "generation"),
    *_attributes("vllm.v1.outputs.LogprobsLists", "logprob_token_ids logprobs",
                 "the sampled token, then alternatives", "generation"),
    _row("source", f"{SCHEDULER}.update_from_output",
         "model_runner_output.prompt_token_id_logprobs_dict", "the way back for rows", "runner"),
    _row("source", f"{SCHEDULER}.update_from_output",
         "prompt_token_id_logprobs=prompt_token_id_logprobs", "the way back for rows", "requests"),
)  # fmt: skip

_GENERATION = (
    _row("call", "vllm.SamplingParams",
         "*, max_tokens, temperature, top_p, top_k, min_p, seed, stop, "
         "include_stop_str_in_output, ignore_eos, logprobs, output_kind, extra_args, detokenize, "
         "skip_reading_prefix_cache", "how a request is sampled, and what workers know", "core"),
    *_attributes("vllm.SamplingParams", "extra_args skip_reading_prefix_cache",
                 "set on a copy for each request", "core", ),
    *_attributes("vllm.sampling_params.RequestOutputKind", "DELTA FINAL_ONLY",
                 "pieces of a stream, or a whole", "core"),
    _row("call", f"{FRONT}.add_request", "self, request_id, prompt, params, *, lora_request",
         "vLLM's checks, detokenizer and stop strings", "core"),
    _row("source", f"{FRONT}.add_request", "return req_id",
         "the id that the core knows; outputs bear the one that was given", "core"),
    _row("call", f"{FRONT}.abort_request", "self, request_ids, *, internal", "by the core's id",
         "core"),
    _row("call", "vllm.v1.engine.output_processor.OutputProcessor.process_outputs",
         "self, engine_core_outputs, *, engine_core_timestamp", "text and stop strings", "core"),
    *_attributes("vllm.v1.engine.output_processor.OutputProcessorOutput",
                 "request_outputs reqs_to_abort", "text, and ends by a stop string", "core"),
    _row("call", "vllm.v1.engine.core_client.InprocClient.abort_requests", "self, request_ids",
         "ends by a stop string", "core"),
    *_attributes("vllm.outputs.RequestOutput", "request_id outputs finished", "text", "generation"),
    *_attributes("vllm.outputs.CompletionOutput", "token_ids text finish_reason", "text",
                 "generation"),
    _row("call", "vllm.lora.request.LoRARequest", "lora_name, lora_int_id, lora_path",
         "what a request with an adapter carries", "core"),
)  # fmt: skip

_RUNNER = (
    _row("override", f"{RUNNER}._prepare_inputs", "self, scheduler_output, num_scheduled_tokens",
         "after it a step's tokens are known", "runner"),
    _row("source", f"{RUNNER}.execute_model",
         "self._prepare_inputs(scheduler_output, num_scheduled_tokens_np)",
         "once a step, in front of the forward pass", "runner"),
    _row("override", f"{RUNNER}._get_prompt_logprobs_dict",
         "self, hidden_states, num_scheduled_tokens", "rows are read there", "runner"),
    _row("source", f"{RUNNER}._bookkeeping_sync",
         "self._get_prompt_logprobs_dict(hidden_states[:num_scheduled_tokens], "
         "scheduler_output.num_scheduled_tokens", "with the hidden states of all tokens", "runner"),
    _row("source", f"{RUNNER}._update_states", "req_state.num_computed_tokens=num_computed_tokens",
         "requests advance before the next step, and not before rows are read", "runner"),
    _row("override", f"{RUNNER}.sample_tokens", "self, grammar_output", "rows go back", "runner"),
    _row("attribute", "vllm.v1.outputs.ModelRunnerOutput", "prompt_token_id_logprobs_dict",
         "the way back for rows", "runner"),
    _row("source", f"{RUNNER}._bookkeeping_sync", "gen.set_offset(gen.get_offset() - 4)",
         "generators of unfinished prompts are wound back, which one on the CPU cannot be",
         "runner"),
    _row("override", f"{RUNNER}.load_lora_model", "self, model, vllm_config, device",
         "no LoRA layer around embeddings and head", "runner"),
    _row("source", f"{RUNNER}.load_model",
         "self.load_lora_model(self.model, self.vllm_config, self.device)", "so there", "runner"),
    _row("source", "vllm.v1.worker.cpu_model_runner.CPUModelRunner.load_model",
         "self.load_lora_model(self.model, self.vllm_config, self.device)", "so there", "runner"),
    _row("source", "vllm.lora.utils.get_supported_lora_modules",
         'getattr(module, "embedding_modules", None)', "emptied on every module", "runner"),
    *_attributes(RUNNER, "model model_config device requests input_batch query_start_loc "
                 "discard_request_mask compilation_config max_num_tokens",
                 "the model, and the requests of a step", "runner"),
    *_attributes("vllm.config.ModelConfig", "dtype hf_text_config get_vocab_size get_hidden_size",
                 "the model's shape", "runner"),
    _row("attribute", "vllm.v1.utils.CpuGpuBuffer", "np", "buffers on the host", "runner"),
    *_attributes(BATCH, "num_reqs req_ids req_id_to_index num_computed_tokens_cpu generators",
                 "where each request's tokens lie in a step, and which they are", "runner"),
    *_attributes("vllm.v1.worker.gpu_input_batch.CachedRequestState",
                 "num_computed_tokens num_prompt_tokens sampling_params",
                 "how far a request is, what it wants", "runner"),
    *_attributes("vllm.v1.core.sched.output.SchedulerOutput",
                 "finished_req_ids scheduled_new_reqs", "requests that begin and end", "runner"),
    *_attributes("vllm.v1.core.sched.output.NewRequestData",
                 "req_id num_computed_tokens sampling_params", "a request that begins", "runner"),
    _row("attribute", "vllm.SamplingParams", "extra_args", "what a request wants", "runner"),
    _row("source", "vllm.model_executor.models.llama.LlamaForCausalLM.compute_logits",
         "logits = self.logits_processor(self.lm_head, hidden_states)",
         "logits of any hidden states", "runner"),
    _row("call", "vllm.distributed.get_tensor_model_parallel_rank", "",
         "ranks with equal results", "runner", "worker"),
)  # fmt: skip

_WORKER = (
    *(
        row
        for worker in ("cpu_worker.CPUWorker", "gpu_worker.Worker")
        for row in (
            _row("override", f"vllm.v1.worker.{worker}.init_device", "self",
                 "our runner is put in front of vLLM's", "worker"),
            _row("override", f"vllm.v1.worker.{worker}.load_model", "self, load_dummy_weights",
                 "the operation is put behind the layers before they are compiled", "worker"),
            *_attributes(f"vllm.v1.worker.{worker}", "model_runner vllm_config",
                         "the runner, the engine's settings", "worker"),
        )
    ),
    _row("attribute", "vllm.config.VllmConfig", "additional_config", "our settings", "worker"),
    _row("source", f"{RUNNER}._dummy_run",
         "self.intermediate_tensors = (self.model.make_empty_intermediate_tensors("
         "batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device",
         "a later stage's buffers, which eager models on the CPU are not given", "worker"),
    *_attributes(RUNNER, "intermediate_tensors max_num_tokens model model_config device",
                 "a later stage's buffers", "worker"),
    _row("attribute", "vllm.model_executor.models.llama.LlamaForCausalLM",
         "make_empty_intermediate_tensors", "a later stage's buffers", "worker"),
    _row("attribute", "vllm.config.ModelConfig", "dtype", "a later stage's buffers", "worker"),
    _row("call", "vllm.distributed.get_pp_group", "", "pipeline stages", "worker"),
    _row("attribute", "vllm.distributed.parallel_state.GroupCoordinator", "is_first_rank",
         "pipeline stages", "worker"),
    _row("source", "vllm.model_executor.models.llama.LlamaDecoderLayer.forward",
         "return hidden_states, residual", "the residual stream is their sum", "operation"),
    _row("name", "vllm.model_executor.models.utils.PPMissingLayer", "", "layers of other stages",
         "operation"),
    _row("call", "vllm.utils.torch_utils.direct_register_custom_op",
         "op_name, op_func, mutates_args, fake_impl, target_lib", "operations of our own",
         "operation", "cpu_kernels"),
    _row("call", "vllm.forward_context.get_forward_context", "", "the tables", "operation"),
    _row("attribute", "vllm.forward_context.ForwardContext", "no_compile_layers", "the tables",
         "operation"),
    _row("attribute", "vllm.config.CompilationConfig", "static_forward_context", "the tables",
         "runner"),
    _row("source", "vllm.forward_context.create_forward_context",
         "no_compile_layers=vllm_config.compilation_config.static_forward_context",
         "every forward pass finds the tables", "operation"),
)  # fmt: skip

_CPU_KERNELS = (
    _row("name", f"{LINEAR}._POSSIBLE_INT8_KERNELS", "", "ours is put there", "cpu_kernels"),
    _row("name", f"{LINEAR}._POSSIBLE_KERNELS", "", "ours is put there", "cpu_kernels"),
    _row("attribute", "vllm.platforms.PlatformEnum", "CPU", "where kernels stand", "cpu_kernels"),
    _row("source", f"{LINEAR}.init_int8_linear_kernel",
         'choose_scaled_mm_linear_kernel(config, _POSSIBLE_INT8_KERNELS, quantization="int8_w8a8")',
         "INT8 layers take the first kernel there that can", "cpu_kernels"),
    _row("source", f"{LINEAR}.choose_mp_linear_kernel",
         "platform_kernels = _POSSIBLE_KERNELS.get(current_platform._enum, [])",
         "layers of 4 bits take the first kernel there that can", "cpu_kernels"),
    _row("override", f"{INT8}.process_weights_after_loading", "self, layer",
         "INT8 layers are tried as they are loaded", "cpu_kernels"),
    _row("call", f"{INT8}.process_weights_for_onednn", "self, layer", "oneDNN's kernel",
         "cpu_kernels"),
    _row("call", f"{INT8}._apply_weights_onednn", "self, layer, x", "oneDNN's kernel",
         "cpu_kernels"),
    _row("call", f"{INT8}._get_layer_params", "self, layer", "a layer's tensors", "cpu_kernels"),
    *_attributes(INT8, "config layer_param_names linear_method dnnl_handler",
                 "an INT8 layer's kernel", "cpu_kernels"),
    _row("source", f"{INT8}.apply_weights", "return self.linear_method(layer, x, bias)",
         "how a layer is computed is an attribute of its kernel", "cpu_kernels"),
    _row("source", f"{INT8}.process_weights_for_onednn",
         "azp_adj = weight.sum(dim=0, keepdim=True, dtype=torch.float32)\n"
         "azp_adj = azp_adj * weight_scale.squeeze()", "what zero points take away", "cpu_kernels"),
    _row("source", f"{INT8}.process_weights_for_onednn",
         "is_fused_module = len(layer.logical_widths) > 1", "a layer to try has it, too",
         "cpu_kernels"),
    _row("source", "vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model",
         "with set_default_torch_dtype(model_config.dtype):",
         "layers are tried in the dtype of the model", "cpu_kernels"),
    *_attributes(f"{LINEAR}.Int8ScaledMMLinearLayerConfig",
                 "is_static_input_scheme input_symmetric", "how activations are quantised",
                 "cpu_kernels"),
    _row("call", "vllm._custom_ops.onednn_scaled_int8_quant", "input, scale, azp, symmetric",
         "activations in 8 bits", "cpu_kernels"),
    _row("call", f"{WNA16}.can_implement", "c", "float32 is refused there", "cpu_kernels"),
    _row("attribute", f"{LINEAR}.MPLinearLayerConfig", "act_type",
         "float32 is refused there", "cpu_kernels"),
)  # fmt: skip

INTERNALS: tuple[Internal, ...] = (
    *_START, *_STEPS, *_OUTPUTS, *_GENERATION, *_RUNNER, *_WORKER, *_CPU_KERNELS
)  # fmt: skip
"""All rows."""
