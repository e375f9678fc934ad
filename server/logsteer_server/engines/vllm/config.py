"""vLLM's environment, arguments and description for a model of the configuration."""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from logsteer_server.contract.engine import HOOKS, EngineInfo, EngineRoom, EngineSpec
from logsteer_server.contract.jobs import Feature
from logsteer_server.engines.lifetime import ScratchDirectory
from logsteer_server.engines.machine import (
    describe_machine,
    name_devices,
    separate_compiled_code,
    show_devices,
)
from logsteer_server.engines.needs import parse_bytes
from logsteer_server.engines.vllm.arguments import (
    check_arguments,
    check_devices,
    check_runner,
    is_cpu_build,
)
from logsteer_server.engines.weights import (
    digest_weights,
    find_eos,
    find_kind,
    limit_context,
    locate_model,
)
from logsteer_server.numerics.rows import PUBLIC_COLUMNS

WORKER = "logsteer_server.engines.vllm.worker.LogsteerWorker"
"""The worker's class, by the name from which every executor imports it."""
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
V2 = "VLLM_USE_V2_MODEL_RUNNER"
"""Whether vLLM uses its V2 runner; if it is not set, vLLM decides by the model's needs."""
CPU_BLOCK_SIZE = 32
"""Tokens per cache block on CPU; vLLM's own default of 128 shares no short context."""

SAMPLED = 1
"""Positions of vLLM's context reserved for the sampled token."""


def set_environment(spec: EngineSpec) -> None:
    """Set vLLM's environment variables. Call it before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if spec.runner != "auto" or is_cpu_build() or spec.pipeline_parallel > 1:
        os.environ[V2] = str(int(spec.runner == "v2"))
    if spec.runner == "v2" and is_cpu_build():
        interpret_kernels()
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    # Otherwise, on AMX, 4-bit weights in bfloat16 models are multiplied with 8-bit activations.
    os.environ["VLLM_CPU_INT4_W4A8"] = "0"
    os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] = "high" if spec.tf32 else "highest"
    # FlashAttention supports half precision only; in float32 vLLM runs Triton's attention.
    os.environ["TRITON_F32_DEFAULT"] = "tf32" if spec.tf32 else "ieee"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is compiled at start, by nvcc
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_PLUGINS", ",".join(_list_plugins()))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    separate_compiled_code()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's, about vLLM's own code
    if spec.tensor_parallel * spec.pipeline_parallel > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _bind_cores(spec.num_ranks))
    if not isinstance(spec.devices, str):
        show_devices(spec.devices)


class InterpretedDriver:
    """A stand-in for Triton's CPU backend; its kernels are interpreted."""

    @staticmethod
    def is_active() -> bool:
        """Return True: the backend's device exists."""
        return True


def interpret_kernels() -> None:
    """Make Triton interpret kernels in this process. Call it before vLLM is imported.

    vLLM's V2 runner prepares steps with Triton kernels, and vLLM's build for CPUs refuses a Triton
    without a CPU backend. The interpreter needs none, so a stand-in is registered.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=InterpretedDriver, compiler=None)


def _list_plugins() -> list[str]:
    """Return the installed plugins of vLLM except TransformerLens' own.

    That plugin serves TransformerLens' own vLLM bridge, and imports 600 modules.
    """
    found = entry_points()
    return [
        plugin.name
        for group in found.groups
        if group.startswith("vllm.")
        for plugin in found.select(group=group)
        if not plugin.module.startswith("transformer_lens.")
    ]


def set_breakable_graphs(spec: EngineSpec, path: Path | str) -> None:
    """Set whether attention splits captured graphs, as vLLM's configuration would set it later.

    vLLM's attention reads the variable when it is imported, which happens here before the
    configuration exists. If the two differ, captured graphs leave attention out.
    """
    from vllm.config.vllm import default_breakable_cudagraph_architectures

    file = Path(path) / "config.json"
    architectures = json.loads(file.read_text()).get("architectures") if file.is_file() else None
    is_default = not default_breakable_cudagraph_architectures().isdisjoint(architectures or ())
    # For batch invariance vLLM sets it where it has tuned tiles; here it is set everywhere.
    if is_default or (is_batch_invariant() and spec.compile):
        os.environ.setdefault(BREAKABLE, "1")


def is_batch_invariant() -> bool:
    """Return whether vLLM's batch-invariant mode is on."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0"


MAX_SOCKET_PATH = 107
SOCKET_NAME = 37
"""Characters of a socket's name in vLLM: a slash and a UUID."""


def prepare(spec: EngineSpec) -> tuple[ScratchDirectory, Path]:
    """Prepare this process to import vLLM; return its scratch directory and the model's path.

    Errors: ValueError as `check_devices` and `check_runner`, and those of `locate_model`.
    """
    check_devices(spec.devices, spec.tensor_parallel * spec.pipeline_parallel)
    check_runner(spec)
    set_environment(spec)
    scratch = ScratchDirectory()
    set_scratch(scratch.path)
    path = locate_model(spec.path)
    set_breakable_graphs(spec, path)
    return scratch, path


def set_scratch(directory: Path) -> None:
    """Make vLLM create its processes' sockets in a directory, so that none is left behind.

    If the directory's name is too long for a socket, they stay in vLLM's own directory.
    """
    if len(os.fsencode(directory)) + SOCKET_NAME <= MAX_SOCKET_PATH:
        os.environ["VLLM_RPC_BASE_PATH"] = str(directory)


def _bind_cores(ranks: int) -> str:
    """Assign cores to ranks in vLLM's syntax: `0,1|2,3` shares four cores between two ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        return "auto"  # on the CPU vLLM reports the error; a GPU does not use it
    share = len(cores) // ranks
    return "|".join(",".join(map(str, cores[r * share : (r + 1) * share])) for r in range(ranks))


OPTIONS = "logsteer"
"""The key of vLLM's `additional_config` under which the engine's settings reach its workers."""
LEAST_SHARE = 0.01
"""Share of a GPU's memory that must be free at the start if the cache's size is set in bytes."""


def engine_args(spec: EngineSpec, path: Path | str, on_cpu: bool, limit: int) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`.

    Errors: ValueError as `check_arguments`, and for adapters in a dtype that vLLM does not support.
    """
    check_arguments(spec.engine_args)
    if spec.adapter_slots and spec.dtype == "float32" and not on_cpu:
        raise ValueError(
            "adapter_slots: on GPUs vLLM applies adapters in half precision alone; set dtype: "
            "bfloat16 or float16, or serve the model with engine transformer_lens"
        )
    args: dict[str, Any] = {
        "model": str(path),
        "dtype": spec.dtype,
        "tensor_parallel_size": spec.tensor_parallel,
        "pipeline_parallel_size": spec.pipeline_parallel,
        "quantization": spec.quantization,
        # A scored sequence may fill the context; vLLM always reserves room for a sampled token.
        "max_model_len": limit + SAMPLED,
        "max_logprobs": -1,  # the schemas limit the alternatives of a request
        "enforce_eager": not spec.compile,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_cls": WORKER,
        "language_model_only": True,  # vision and audio towers are neither loaded nor profiled
        # vLLM's hash of the configuration includes it, and with it the cache of compiled models.
        "additional_config": {
            OPTIONS: {
                "rows": {"logits": spec.chunk_bytes, "columns": spec.column_bytes},
                "steering": asdict(steering_size(spec)),
            }
        },
    }
    if spec.adapter_slots:
        args["enable_lora"] = True
        # As many slots in host memory as on the device, so that no adapter is loaded twice. On CPUs
        # one more slot stays empty: vLLM's operations take the index -1 of a token without adapter
        # for the last slot (vllm-project/vllm#48421).
        slots = spec.adapter_slots + on_cpu
        args["max_loras"] = args["max_cpu_loras"] = slots
        args["max_lora_rank"] = spec.adapter_rank
    ranks = spec.tensor_parallel * spec.pipeline_parallel
    args["distributed_executor_backend"] = "uni" if ranks == 1 else "mp"
    if on_cpu:
        args["block_size"] = CPU_BLOCK_SIZE
        args["kv_cache_memory_bytes"] = parse_bytes(str(spec.memory or "1GiB"))
    elif isinstance(spec.memory, float):
        args["gpu_memory_utilization"] = spec.memory
    elif spec.memory is not None:
        args["kv_cache_memory_bytes"] = parse_bytes(spec.memory)
        # Otherwise vLLM does not start unless nearly all of the GPU's memory is free.
        args["gpu_memory_utilization"] = LEAST_SHARE
    return args | spec.engine_args


@dataclass(frozen=True, slots=True)
class SteeringSize:
    """Sizes of a model's steering tables.

    `slots`: plans at once. `depth`: operations of a plan at a layer. `probes`: probes of a plan at
    all layers. `capture_bytes`: room for captured activations. `hooks`: the activations of a layer
    that can be steered.
    """

    slots: int
    depth: int
    probes: int
    capture_bytes: int
    hooks: tuple[str, ...] = ("resid_post",)

    def count_rows(self, layers: int, width: int) -> int:
        """Return the number of float32 activations that fit, at least one per layer."""
        return max(layers, self.capture_bytes // (4 * width))


def steering_size(spec: EngineSpec) -> SteeringSize:
    """Return the sizes of the steering tables; with 0 slots there are no tables."""
    return SteeringSize(
        spec.steering_slots,
        spec.steering_depth,
        spec.steering_probes,
        spec.capture_bytes,
        tuple(hook for hook in HOOKS if hook in spec.hooks),
    )


COLUMNS_SHARE, MOST_COLUMNS = 8, 6 * 2**28
"""Memory for policy columns on a GPU: 1 / COLUMNS_SHARE of the model's memory after its weights, at
most MOST_COLUMNS bytes, which by default suffice for the rows of one product with the head."""


def widen_columns(minimum: int, left: int) -> int:
    """Return the memory for policy columns in bytes, at least `minimum`.

    `left`: the model's memory after its weights. An H100 with 64 GiB left has 1.5 GiB.
    """
    return max(minimum, min(left // COLUMNS_SHARE, MOST_COLUMNS))


TUNED_BEYOND = 32_768
"""Context length from which vLLM scales Llama 4's queries by position, whatever its config says."""


def context_length(path: Path | str, limit: int | None, trusts: bool = False) -> int:
    """Return the model's context length; `trusts`: whether its configuration may run own code.

    Errors: ValueError as `fit_context_length`.
    """
    from vllm.transformers_utils.config import get_config

    config = get_config(str(path), trust_remote_code=trusts)
    return fit_context_length(path, config.get_text_config(), limit)


def fit_context_length(path: Path | str, text_config: Any, limit: int | None) -> int:
    """Return the context length of a model with this configuration in vLLM.

    Errors: ValueError if it is unknown, or if vLLM would compute another model at that length.
    """
    length = limit_context(path, text_config, limit, SAMPLED)
    if getattr(text_config, "model_type", None) == "llama4_text":
        is_tuned = bool(text_config.attn_temperature_tuning)
        start = text_config.floor_scale
        if length >= start and is_tuned != (length + SAMPLED > TUNED_BEYOND):
            raise ValueError(
                f"max_model_len: vLLM scales Llama 4's queries by their position only where the "
                f"context has {TUNED_BEYOND} tokens or more, and this model's config says "
                f"attn_temperature_tuning: {is_tuned}; set "
                + (f"{TUNED_BEYOND} or more, or " if is_tuned else "")
                + f"less than {start}"
            )
    return length


def describe(
    spec: EngineSpec,
    path: Path | str,
    config: Any,
    limit: int,
    unsteerable: str | None,
    faults: Mapping[str, str],
    logits_dtype: str,
) -> EngineInfo:
    """Describe the engine.

    `config` is vLLM's. `unsteerable`: why the model has no hooks, or None. `faults`: why some of
    its configured hooks do not work, as `find_faults`. `logits_dtype`: the head's, as the workers
    report it.
    """
    import vllm
    import vllm.envs

    model = config.model_config
    return EngineInfo(
        engine="vllm",
        engine_version=str(vllm.__version__),
        model_path=spec.path,
        tokenizer_path=str(model.tokenizer),
        weights_digest=digest_weights(path),
        dtype=str(model.dtype).removeprefix("torch."),
        logits_dtype=logits_dtype,
        quantization=model.quantization,
        dequantised_from=find_kind(spec.path),
        tensor_parallel=spec.tensor_parallel,
        pipeline_parallel=spec.pipeline_parallel,
        batch_invariant=bool(vllm.envs.VLLM_BATCH_INVARIANT),
        context_length=limit,
        vocab_size=int(model.get_vocab_size()),
        columns=PUBLIC_COLUMNS,
        eos_ids=find_eos(path, model.tokenizer, int(model.get_vocab_size())),
        num_layers=int(model.hf_text_config.num_hidden_layers),
        hidden_size=int(model.get_hidden_size()),
        hooks=() if unsteerable else tuple(h for h in steering_size(spec).hooks if h not in faults),
        missing_hooks=_find_missing_hooks(spec, faults),
        capture_rows=steering_size(spec).count_rows(
            int(model.hf_text_config.num_hidden_layers),
            int(model.get_hidden_size()),
        ),
        lacks=_find_missing(spec, config, unsteerable),
        tf32=spec.tf32 and config.device_config.device_type == "cuda",
        computed_on=(
            *describe_machine(config.device_config.device_type),
            *(["model runner V2"] if config.use_v2_model_runner else []),
        ),
        device=name_devices(config.device_config.device_type),
        max_probes=spec.steering_probes,
        room=find_room(
            config.scheduler_config.max_num_batched_tokens,
            config.scheduler_config.max_num_seqs,
            config.cache_config.kv_cache_size_tokens or 0,  # unknown on other nodes
        ),
    )


STEPS_AHEAD = 8
"""Steps' worth of prompts to queue in the engine, so that it never waits for the next ones."""


def find_room(step_tokens: int, sequences: int, cache_tokens: int) -> EngineRoom:
    """Return the room of an engine, given the sizes of its steps and of its cache.

    Queued prompts take at most half of the cache, and generation leaves an eighth of the sequences,
    so that texts to score need not wait until a generation ends.
    """
    ahead = min(STEPS_AHEAD * step_tokens, cache_tokens // 2)
    return EngineRoom(ahead, cache_tokens, sequences - sequences // 8)


def _find_missing_hooks(spec: EngineSpec, faults: Mapping[str, str]) -> dict[str, str]:
    """Return, for each missing hook, why it is missing and what to do."""
    missing = {
        hook: f"set hooks: [{', '.join([*spec.hooks, hook])}] for the model {spec.id} in the "
        "configuration"
        for hook in HOOKS
        if hook not in spec.hooks
    }
    return missing | {
        hook: f"in vLLM this model has none, since {reason}" for hook, reason in faults.items()
    }


def _find_missing(spec: EngineSpec, config: Any, unsteerable: str | None) -> dict[Feature, str]:
    """Return the features that this model does not support, with what to do instead."""
    other = "serve the model with engine transformer_lens"
    lacks: dict[Feature, str] = {
        "override": f"the engine vllm has no parameter overrides; {other}",
        "gradient": f"the engine vllm has no gradients; {other}",
    }
    if unsteerable:
        lacks["steering"] = unsteerable
    if not config.scheduler_config.enable_chunked_prefill or config.model_config.is_hybrid:
        lacks["step_tokens"] = "vLLM alone says where texts of this model are split"
    if not spec.adapter_slots:
        lacks["adapter"] = "this model takes no adapters; configure it with adapter_slots above 0"
    return lacks


def clear_new_blocks() -> None:
    """Make vLLM zero each newly allocated cache block, on every rank, before it is read.

    Attention multiplies masked values by 0, and 0 times NaN is NaN. So non-finite values that a
    text leaves in a block would affect the next text with that block. A text may be cancelled or
    preempted before its values are checked, so blocks are zeroed when they are allocated, not when
    they are freed. vLLM itself does so for some models.

    It applies to caches set up later in this process. Hits in the prefix cache have full blocks and
    are not zeroed. State space layers do not use these blocks; vLLM starts their states at zero.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)
