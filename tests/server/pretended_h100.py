"""vLLM configured for an H100, on a machine that has none; prints what came of it, as JSON.

The platform says that it is an H100 of eight, and what vLLM then looks for and its build for CPUs
has not is stood in for. All else is vLLM's own: its arguments, its configuration, its layers, which
are built without memory. No kernel runs.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import triton.backends

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines.vllm import arguments
from logsteer_server.engines.vllm.config import (
    BREAKABLE,
    V2,
    prepare,
    set_breakable_graphs,
    set_environment,
)
from tests.ports import find_port
from tests.probes import finish

FLASH_ATTENTION = ("", ".flash_attn_interface", ".layers", ".layers.rotary", ".ops")
OPERATIONS = (
    "silu_and_mul(Tensor x, Tensor y) -> ()",
    "cutlass_scaled_mm_supports_fp8(int capability) -> bool",
    "cutlass_scaled_mm_supports_block_fp8(int capability) -> bool",
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
"""A model of sizes that vLLM has tuned batch-invariant products for, those of Qwen 3 1.7B."""
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
EIGHT_BITS = {
    "targets": ["Linear"],
    "weights": FP8 | {"strategy": "channel", "dynamic": False},
    "input_activations": FP8 | {"strategy": "token", "dynamic": True},
}
FOUR_BITS = {"bits": 4, "group_size": 128}


def compress(*targets: str) -> dict[str, Any]:
    """The configuration of a checkpoint whose products have 8 bits, of more targets than layers."""
    group = EIGHT_BITS | {"targets": ["Linear", *targets]}
    ignore = [] if targets else ["lm_head"]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


HEADS: dict[str, dict[str, Any]] = {
    "plain": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "plain over FP8": {"quantization_config": compress()},
    "plain over AWQ": {
        "quantization_config": FOUR_BITS | {"quant_method": "awq", "zero_point": True}
    },
    "FP8": {"quantization_config": compress("re:.*lm_head")},
    "GPTQ": {
        "quantization_config": FOUR_BITS
        | {"quant_method": "gptq", "desc_act": False, "sym": True, "lm_head": True}
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "auto": {"runner": "auto"},
    "eager": {"compile": False},
    "adapters": {"adapter_slots": 3},
    **{f"tensor parallel {ranks}": {"tensor_parallel": ranks} for ranks in (2, 8)},
    "pipeline parallel 2": {"runner": "auto", "pipeline_parallel": 2},
    "own batch": {"engine_args": {"max_num_batched_tokens": 512, "max_num_seqs": 7}},
}
"""Of a model's configuration; V1 where no runner is named."""
MODEL_TYPES = {
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32MTPModel"),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepSeekV4MTPModel",
    ),
    "deepseek_v41": ("DeepseekV41ForCausalLM",),
    "dots3_note": ("Dots3NoteForCausalLM", "Dots3NoteMTPModel"),
    "glm5_next": ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration", "Glm5NextMTPModel"),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM",),
    "hy_v4": ("HYV4ForCausalLM", "HYV4MTPModel"),
    "inkling_model": ("InklingForCausalLM",),
    "inkling_mm_model": ("InklingForConditionalGeneration",),
    "kimi_k3": ("KimiK3ForConditionalGeneration", "KimiK3MTPModel"),
    "kimi_linear": ("KimiLinearForCausalLM",),
    "minimax_m3_vl": ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
    "qwen4_exp": ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "Qwen4ExpMTP"),
    "llama": ("LlamaForCausalLM",),
}  # fmt: skip
"""The architectures that vLLM breaks graphs up for, and one that it does not."""
NEEDED = {"deepseek_v32": {"index_topk": 2048}}
"""What a configuration without values is refused for the lack of."""


def pretend() -> torch.library.Library:
    """Have vLLM take this machine for one with eight H100. Call it before vLLM is imported.

    Return operations that are there as long as this is.
    """
    arguments._has_distribution = lambda name: name == "vllm"
    for backend in triton.backends.backends.values():
        backend.driver.is_active = staticmethod(lambda own=backend.driver: "Cuda" in own.__name__)
    for name in FLASH_ATTENTION:
        sys.modules[f"vllm.vllm_flash_attn{name}"] = MagicMock(__path__=[], __spec__=None)
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):
        sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    library = torch.library.Library("_C", "FRAGMENT")
    for schema in OPERATIONS:
        library.define(schema)
        library.impl(schema.partition("(")[0], lambda *_: True, "CompositeExplicitAutograd")
    import vllm.platforms as platforms

    platforms.vllm_version_matches_substr = lambda _: False  # the name of the build
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H100(CudaPlatformBase):  # type: ignore[misc]
        """What is asked of a platform before a device is used."""

        get_device_capability = classmethod(lambda _, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda _, device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_total_memory = classmethod(lambda _, device_id=0: 80 * 2**30)
        device_count = classmethod(lambda _: 8)
        log_warnings = classmethod(lambda _: None)
        import_kernels = classmethod(lambda _: None)

    platforms._current_platform = H100()
    torch.cuda.device_count = lambda: 8
    return library


def write_model(values: Mapping[str, Any]) -> Path:
    """The directory of a checkpoint that has a configuration alone."""
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(dict(values)))
    return directory


def configure(path: Path, **fields: Any) -> Any:
    """vLLM's configuration of a model. Errors: those of the engine's start."""
    from logsteer_server.engines.vllm import core

    spec = EngineSpec("probe", "vllm", str(path), **{"runner": "v1"} | fields)
    os.environ.pop(V2, None)
    set_environment(spec)
    arguments.check_runner(spec)
    return core.configure(spec, path, 512)


def describe(config: Any) -> dict[str, Any]:
    """What of a configuration an engine of ours depends on."""
    compilation, scheduler = config.compilation_config, config.scheduler_config
    return {
        "v2": config.use_v2_model_runner,
        "async": bool(scheduler.async_scheduling),
        "batch": [scheduler.max_num_batched_tokens, scheduler.max_num_seqs],
        "chunked": scheduler.enable_chunked_prefill,
        "compiles": compilation.mode.name,
        "graphs": compilation.cudagraph_mode.name,
        "largest_graph": compilation.max_cudagraph_capture_size,
        "prefixes": config.cache_config.enable_prefix_caching,
        "dtype": str(config.model_config.dtype),
        "executor": config.parallel_config.distributed_executor_backend,
        "ranks": config.parallel_config.world_size,
        "worker": config.parallel_config.worker_cls,
        "adapters": config.lora_config and config.lora_config.max_loras,
    }


def compute_head(path: Path) -> str:
    """What the head of a model is computed in, once our worker has loaded it.

    The layers are those of an eager model: the passes of the compiler know a GPU's operations.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    from logsteer_server.engines.vllm import worker

    config = configure(path, compile=False)
    with set_current_vllm_config(config), torch.device("meta"):
        model = initialize_model(config)
    worker.widen_head(model)
    return worker.find_logits_dtype(model, config.model_config.dtype)


def begin_rank() -> None:
    """Make this process the one rank, as layers expect it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(configure(write_model(LLAMA))):
        address = f"tcp://127.0.0.1:{find_port()}"
        init_distributed_environment(1, 0, address, 0, backend="gloo")
        initialize_model_parallel(1, 1)


def inspect_all_as(architecture: str) -> None:
    """Have vLLM take every model's class for one that its build for CPUs can import."""
    from vllm.model_executor.models import registry

    look = registry._LazyRegisteredModel.inspect_model_cls
    known = look(registry.ModelRegistry.models[architecture])
    registry._LazyRegisteredModel.inspect_model_cls = lambda _: known


def choose(path: Path) -> list[str | None]:
    """Whether graphs are broken up: by `set_breakable_graphs`, and by vLLM's configuration; and why
    that then refuses to start.
    """
    os.environ.pop(BREAKABLE, None)
    set_breakable_graphs(EngineSpec("probe", "vllm", str(path)), path)
    ours, refusal = os.environ.pop(BREAKABLE, None), None
    try:
        configure(path)
    except ValueError as error:
        refusal = str(error)
    return [ours, os.environ.get(BREAKABLE), refusal]


def main() -> None:
    """Start as for a model, and configure others: the first is named on the command line.

    `LlamaForCausalLM` has settings and heads configured, and one model of the others; any other
    name has all of `MODEL_TYPES`, and a Llama whose numbers do not depend on its batch.
    """
    os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp()
    paths = {
        name: write_model({"model_type": kind, "architectures": [name]} | NEEDED.get(kind, {}))
        for kind, names in MODEL_TYPES.items()
        for name in names
    }
    first = sys.argv[1]
    spec = EngineSpec("probe", "vllm", str(paths[first]), runner="v1")
    set_environment(spec)
    operations = pretend()
    prepare(spec)
    found: dict[str, Any] = {"started_with": os.environ.get(BREAKABLE)}
    from vllm.config import ModelConfig
    from vllm.config.vllm import default_breakable_cudagraph_architectures

    # As the engine does: attention is imported here.
    from logsteer_server.engines.vllm import core, worker  # noqa: F401

    found["listed"] = sorted(default_breakable_cudagraph_architectures())
    inspect_all_as("LlamaForCausalLM")
    if first == "LlamaForCausalLM":
        llama = write_model(LLAMA)
        found["settings"] = {
            name: describe(configure(llama, **fields)) for name, fields in SETTINGS.items()
        }
        with patch.object(ModelConfig, "is_hybrid", True):
            found["settings"]["hybrid"] = describe(configure(llama, runner="auto"))
        begin_rank()
        found["heads"] = {
            name: compute_head(write_model(LLAMA | {"num_hidden_layers": 1} | values))
            for name, values in HEADS.items()
        }
        found["chosen"] = {"other": choose(paths["DeepseekV32ForCausalLM"])}
    else:
        found["chosen"] = {name: choose(path) for name, path in paths.items()}
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        found["chosen"]["batch invariant"] = choose(write_model(LLAMA))
    del operations
    finish(found)


if __name__ == "__main__":
    main()
