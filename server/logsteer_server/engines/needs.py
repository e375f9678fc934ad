"""Estimates of the memory that a configured model needs, from its files, without an engine.

They add the weights in the files, the configured cache, and the measured memory of a process. No
model library is imported.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines.gguf import find_converted, is_gguf, read_header
from logsteer_server.engines.vllm.arguments import check_checkpoint
from logsteer_server.engines.weights import check_path

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of a number, by dtype of safetensors."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that are converted to the dtype in which a model runs."""
DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PROCESS_BYTES: Mapping[str, int] = {
    "vllm": 850 * 2**20,
    "transformer_lens": 600 * 2**20,
    "fake": 60 * 2**20,
}
"""Resident memory of an engine's process without weights and cache, for the demo model on a CPU."""
CPU_CACHE_BYTES = 2**30
"""Default size of vLLM's key-value cache on a CPU."""


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The memory that one replica needs, in bytes.

    `dtype`: the one in which the model runs. `token_bytes`: keys and values of one token; 0 if the
    configuration does not say.
    """

    weights_bytes: int
    cache_bytes: int
    process_bytes: int
    dtype: str = "float32"
    token_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """The total."""
        return self.weights_bytes + self.cache_bytes + self.process_bytes


def parse_bytes(size: str) -> int:
    """Return the bytes of a size such as `512MiB`. Errors: ValueError for anything else."""
    for suffix, unit in (("GiB", 2**30), ("MiB", 2**20)):
        if size.endswith(suffix):
            return int(float(size.removesuffix(suffix)) * unit)
    raise ValueError(f"memory: {size!r} is not a size; write for example 512MiB or 1GiB")


def find_checkpoint(path: str) -> Path | None:
    """Return a checkpoint's directory, from its path or a hub id; None if that is not downloaded.

    A GGUF file's directory exists only after its first load. Errors: ValueError as `check_path`.
    """
    if is_gguf(path):
        return find_converted(Path(path))
    check_path(path)
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    hub_id, _, revision = path.partition("@")
    config = try_to_load_from_cache(hub_id, "config.json", revision=revision or None)
    return Path(config).parent if isinstance(config, str) else None


def estimate(spec: EngineSpec) -> ModelNeeds:
    """Estimate the memory that one replica of a model needs.

    Errors: ValueError if its files do not say, or its engine does not support the model.
    """
    process = PROCESS_BYTES[spec.engine]
    directory = find_checkpoint(spec.path)
    if directory is None:
        raise ValueError(
            f"{spec.path} is not on this machine; a hub id is downloaded at the first load"
        )
    if spec.engine == "fake":
        return ModelNeeds(0, 0, process)
    if is_gguf(spec.path) and not directory.is_dir():
        header = read_header(spec.path)
        config, dtype = header.config, "float32" if spec.dtype == "auto" else spec.dtype
        weights = header.num_parameters * DTYPE_BYTES[dtype]
    else:
        config, dtype = read_config(directory), choose_dtype(spec.dtype, directory)
        weights = estimate_weights(directory, dtype)
    cache = 0
    if spec.engine == "vllm":
        check_checkpoint(config, dtype)
        is_size = isinstance(spec.memory, str)
        cache = parse_bytes(str(spec.memory)) if is_size else CPU_CACHE_BYTES
    return ModelNeeds(weights, cache, process, dtype, _measure_token(config, dtype))


def read_config(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's configuration. Errors: ValueError if it cannot be read."""
    try:
        found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory}/config.json cannot be read") from error
    return found


def choose_dtype(requested: str, directory: Path) -> str:
    """Return the dtype in which a model is served; `auto` means the checkpoint's.

    The checkpoint's configuration names it; the default is float32. Errors: ValueError if the
    configuration cannot be read.
    """
    if requested != "auto":
        return requested
    config = read_config(directory)
    for part in (config, config.get("text_config", {})):
        named = str(part.get("dtype") or part.get("torch_dtype")).removeprefix("torch.")
        if named in DTYPE_BYTES:
            return named
    return "float32"


def _measure_token(config: dict[str, Any], dtype: str) -> int:
    """Return the bytes of a token's keys and values; 0 if the configuration's names are unknown."""
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads") or text.get("n_head")
    layers = text.get("num_hidden_layers") or text.get("n_layer")
    width = text.get("hidden_size") or text.get("n_embd")
    if not (heads and layers and width):
        return 0
    kept = text.get("num_key_value_heads") or heads
    size = text.get("head_dim") or width // heads
    return int(2 * layers * kept * size * DTYPE_BYTES[dtype])


def estimate_weights(directory: Path, dtype: str) -> int:
    """Return the bytes of a checkpoint's weights in the dtype in which the model runs.

    Errors: ValueError without weights.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = [*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.gguf")]
        if not others:
            raise ValueError(f"{directory} has no weights")
        return sum(file.stat().st_size for file in others)
    return sum(
        numbers * (DTYPE_BYTES[dtype] if kind in FLOATS else ITEM_BYTES.get(kind, 1))
        for file in files
        for kind, numbers in _list_tensors(file)
    )


def _list_tensors(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the dtype and the number of elements of each tensor, from a file's header."""
    try:
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                tensor = tensors.get_slice(name)
                yield tensor.get_dtype(), math.prod(tensor.get_shape())
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error
