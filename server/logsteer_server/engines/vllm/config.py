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
"""The class that runs the model, by which every executor finds it."""
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
V2 = "VLLM_USE_V2_MODEL_RUNNER"
"""Whether vLLM runs its V2 runner; where it is not set, vLLM decides by what the model needs."""
CPU_BLOCK_SIZE = 32
"""Tokens per cache block on CPU; vLLM's own default of 128 shares no short context."""

SAMPLED = 1
"""Positions of vLLM's context beside those that are read: that of the sampled token."""


def set_environment(spec: EngineSpec) -> None:
    """Set vLLM's environment variables, which must happen before it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if spec.runner != "auto" or is_cpu_build() or spec.pipeline_parallel > 1:
        os.environ[V2] = str(int(spec.runner == "v2"))
    if spec.runner == "v2" and is_cpu_build():
        interpret_kernels()
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    # Weights of 4 bits with bfloat16 would else be multiplied by activations of 8 bits on AMX.
    os.environ["VLLM_CPU_INT4_W4A8"] = "0"
    os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] = "high" if spec.tf32 else "highest"
    # Half precision is all that FlashAttention takes; in float32 vLLM's attention is Triton's.
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
    """A stand-in for a Triton backend, whose kernels are interpreted."""

    @staticmethod
    def is_active() -> bool:
        """Return that the backend's device exists."""
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

    vLLM's attention reads that as it is imported, which here is before its configuration exists,
    and is left out of graphs that are captured otherwise.
    """
    from vllm.config.vllm import default_breakable_cudagraph_architectures

    file = Path(path) / "config.json"
    architectures = json.loads(file.read_text()).get("architectures") if file.is_file() else None
    is_default = not default_breakable_cudagraph_architectures().isdisjoint(architectures or ())
    # For batch invariance vLLM asks for it where it has tuned tiles: everywhere is a superset.
    if is_default or (is_batch_invariant() and spec.compile):
        os.environ.setdefault(BREAKABLE, "1")


def is_batch_invariant() -> bool:
    """Return whether vLLM's batch-invariant mode is on."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0"


MAX_SOCKET_PATH = 107
SOCKET_NAME = 37
"""Characters of a socket's name in vLLM, a UUID, and of the slash in front of it."""


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
        return "auto"  # vLLM says what is wrong where it runs on the CPU; a GPU does not care
    share = len(cores) // ranks
    return "|".join(",".join(map(str, cores[r * share : (r + 1) * share])) for r in range(ranks))


LEAST_SHARE = 0.01
"""Of a GPU that has to be free at the start where the cache's size is given in bytes."""


def engine_args(spec: EngineSpec, path: Path | str, on_cpu: bool, limit: int) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`.

    Errors: ValueError as `check_arguments`, and for adapters that vLLM's kernel cannot compute.
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
        # A scored sequence may fill the context, and vLLM always leaves room for a sampled token.
        "max_model_len": limit + SAMPLED,
        "max_logprobs": -1,  # the schemas say how many alternatives a request may ask for
        "enforce_eager": not spec.compile,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_cls": WORKER,
        "language_model_only": True,  # towers that see or hear are neither loaded nor profiled
        # A part of vLLM's hash of the configuration, so that compiled models are kept apart by it.
        "additional_config": {
            "logsteer": {
                "rows": {"logits": spec.chunk_bytes, "columns": spec.column_bytes},
                "steering": asdict(steering_size(spec)),
            }
        },
    }
    if spec.adapter_slots:
        args["enable_lora"] = True
        # Those on the device and those in memory are the same, so that none is read twice.
        # Without an adapter a token has index -1, which vLLM's operations for CPUs take for the
        # last slot (vllm-project/vllm#48421): one more that stays empty, and so adds nothing.
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
        # Else vLLM refuses to start unless nearly all of the GPU is free, for it to share.
        args["gpu_memory_utilization"] = LEAST_SHARE
    return args | spec.engine_args


@dataclass(frozen=True, slots=True)
class SteeringSize:
    """Plans that a model holds at once; operations that a plan may have at a layer, and its probes
    at all of them; room for captured activations, in bytes; the activations of a layer that the
    tables are for.
    """

    slots: int
    depth: int
    probes: int
    capture_bytes: int
    hooks: tuple[str, ...] = ("resid_post",)

    def count_rows(self, layers: int, width: int) -> int:
        """Return how many float32 activations fit, at least one per layer."""
        return max(layers, self.capture_bytes // (4 * width))


def steering_size(spec: EngineSpec) -> SteeringSize:
    """Return the size of the steering tables; without slots there are no tables."""
    return SteeringSize(
        spec.steering_slots,
        spec.steering_depth,
        spec.steering_probes,
        spec.capture_bytes,
        tuple(hook for hook in HOOKS if hook in spec.hooks),
    )


COLUMNS_SHARE, MOST_COLUMNS = 8, 6 * 2**28
"""Room for policy columns on a GPU: this part of what the weights leave of the model's memory, and
at most so many bytes: enough for the rows of a product, by default."""


def widen_columns(given: int, left: int) -> int:
    """Return the memory for policy columns in bytes, at least the given number.

    `left`: what the weights leave of the model's memory. An H100 with 64 GiB left has 1.5 GiB.
    """
    return max(given, min(left // COLUMNS_SHARE, MOST_COLUMNS))


TUNED_BEYOND = 32_768
"""Context from which vLLM scales the queries of a Llama 4 by their position, whatever it says."""


def context_length(path: Path | str, limit: int | None, trusts: bool = False) -> int:
    """Return the model's context length; `trusts`: its configuration may run code of its own.

    Errors: ValueError as `fit_context_length`.
    """
    from vllm.transformers_utils.config import get_config

    config = get_config(str(path), trust_remote_code=trusts)
    return fit_context_length(path, config.get_text_config(), limit)


def fit_context_length(path: Path | str, text_config: Any, limit: int | None) -> int:
    """Return the context length of a model of this configuration in vLLM.

    Errors: ValueError where nothing says it, or where vLLM at that length computes another model.
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
    """Describe the engine; `config` is vLLM's; `unsteerable` says why it has no hooks.

    `faults`: why it has not all of those that it was compiled with, as of `find_faults`.
    `logits_dtype`: what the workers say that the head is computed in.
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
            config.cache_config.kv_cache_size_tokens or 0,  # on other nodes nobody knows
        ),
    )


STEPS_AHEAD = 8
"""Steps that prompts in the engine are enough for: more than pass while others are on their way."""


def find_room(step_tokens: int, sequences: int, cache_tokens: int) -> EngineRoom:
    """Return the room of an engine by the sizes of its steps and of its cache.

    An eighth of the sequences and half of the cache are never taken by what waits on the other
    side: texts that are only read need not wait until a generation ends.
    """
    ahead = min(STEPS_AHEAD * step_tokens, cache_tokens // 2)
    return EngineRoom(ahead, cache_tokens, sequences - sequences // 8)


def _find_missing_hooks(spec: EngineSpec, faults: Mapping[str, str]) -> dict[str, str]:
    """Return why each missing hook is missing, and what to do."""
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
    """Return what this model does not support, and what to do instead."""
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
    """Make vLLM zero each block that a request takes, on every rank, before it is first read.

    Attention multiplies what it masks by 0, and 0 times NaN is NaN: the numbers that a text leaves
    in a block where another one has none yet are not without effect if they are not finite. A text
    may be cancelled or preempted before anybody sees that they are not, so blocks are not cleared
    where they are freed but where they are taken, whoever had them: what vLLM does for some models
    on its own.

    It counts for caches that are set up later in this process. Blocks of the prefix cache are whole
    and stay as they are. States of state space layers are no blocks of this kind: vLLM begins a
    text with zeros of its own.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)
