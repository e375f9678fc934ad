"""Uploaded safetensors files: overrides, and LoRA adapters, PEFT's two files joined.

A file is memory-mapped and read a piece at a time, because it can be as large as a model.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from logsteer.errors import api_error
from logsteer.schemas.common import ProblemCode
from logsteer_server.contract.plan import CONFIG_KEY
from logsteer_server.numerics.lora import AdapterConfig, AdapterLayoutError, Factors, pair_factors
from logsteer_server.stores.layer_vectors import view_tensor, widen

MAX_HEADER_BYTES = 16 * 2**20
LENGTH_BYTES = 8
"""Bytes of the header's length, which precede it."""
MAX_TENSORS = 100_000
PIECE = 2**22
"""Numbers checked at once."""
COPIED = 2**20
"""Bytes copied at once."""


@dataclass(frozen=True, slots=True)
class TensorContent:
    """The shapes by name, and the Euclidean norm of all numbers, summed in float64."""

    shapes: dict[str, tuple[int, ...]]
    norm: float


@contextmanager
def refuse_invalid(code: ProblemCode, noun: str) -> Iterator[None]:
    """Refuse a file that what it decorates cannot use. Errors: APIError with the reason."""
    try:
        yield
    except (ValueError, KeyError) as error:
        raise api_error(code, f"The {noun} is invalid: {str(error).rstrip('.')}.") from error
    except RecursionError as error:
        raise api_error(code, f"The {noun} is invalid: its JSON is nested too deeply.") from error


class TensorFile:
    """The tensors of a safetensors file, read from the disk on access.

    Errors: ValueError.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            header, start = read_header(file)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.entries: dict[str, Any] = header
        self._numbers = np.memmap(path, mode="r")[start:]

    def view(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as stored: bfloat16 as 16-bit integers."""
        if name not in self.entries:
            raise ValueError(f"it has no tensor {name}")
        try:
            return view_tensor(self._numbers, self.entries[name])
        except ValueError as error:  # sizes that do not match; more axes than numpy supports
            raise ValueError(f"{name} cannot be read: {error}") from error

    def read(self, name: str, *index: Any) -> npt.NDArray[np.floating]:
        """Return a tensor, or the part that an index selects; bfloat16 as float32."""
        return widen(self.view(name)[index], self.entries[name]["dtype"])


@refuse_invalid("invalid_vector", "direction")
def read_direction(path: Path) -> TensorContent:
    """Check an override's file; return its shapes and norm. Errors: APIError `invalid_vector`."""
    return read_content(path)


def read_content(path: Path) -> TensorContent:
    """Check a file's sizes and numbers; return its shapes and norm. Errors: ValueError."""
    file = TensorFile(path)
    try:
        # The library checks every size in the header against the file.
        with safe_open(path, "numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"it cannot be read as safetensors: {error}") from error
    if not (count := len(file.entries)):
        raise ValueError("it has no tensors")
    if count > MAX_TENSORS:
        raise ValueError(f"it has {count} tensors, at most {MAX_TENSORS} are allowed")
    square = 0.0
    for name, entry in file.entries.items():
        flat = file.view(name).reshape(-1)
        for begin in range(0, len(flat), PIECE):
            numbers = widen(flat[begin : begin + PIECE], entry["dtype"])
            if not np.isfinite(numbers).all():
                raise ValueError(f"{name} has a number that is NaN or infinite")
            with np.errstate(over="ignore"):
                square += float(np.square(numbers, dtype=np.float64).sum())
    if not square:
        raise ValueError("every number is 0, so it would change nothing")
    if not math.isfinite(square):
        raise ValueError("its length is beyond float64; scale it down")
    shapes = {name: tuple(entry["shape"]) for name, entry in file.entries.items()}
    return TensorContent(shapes, math.sqrt(square))


def read_header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Return the header's entries by name, with `__metadata__`, and the offset of the numbers.

    The sizes in it are unchecked. Errors: ValueError.
    """
    size = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError("it is not a safetensors file; send one as it is")
    try:
        header = json.loads(file.read(size))
    except ValueError as error:
        raise ValueError(f"it cannot be read as safetensors: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("it cannot be read as safetensors: its header is not an object")
    return header, LENGTH_BYTES + size


def copy_with_metadata(
    file: IO[bytes], metadata: Mapping[str, str], write: Callable[[bytes], None]
) -> None:
    """Write a safetensors file again, with this metadata. Errors: ValueError."""
    header, _ = read_header(file)
    text = json.dumps({**header, "__metadata__": metadata}).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # align the numbers
    write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    while piece := file.read(COPIED):
        write(piece)


refuse_adapter = refuse_invalid("invalid_adapter", "adapter")


@refuse_adapter
def join_files(config: bytes, weights: IO[bytes], write: Callable[[bytes], None]) -> None:
    """Write the weights' safetensors file with the configuration in its metadata.

    Errors: APIError `invalid_adapter`.
    """
    AdapterConfig.parse(config)
    own = json.dumps(json.loads(config), sort_keys=True)
    copy_with_metadata(weights, {CONFIG_KEY: own}, write)


@refuse_adapter
def read_adapter(path: Path) -> dict[str, Any]:
    """Check a joined file; return what its card says of it. Errors: APIError `invalid_adapter`."""
    with path.open("rb") as file:
        header, _ = read_header(file)
    config = AdapterConfig.read(header.get("__metadata__", {}))
    content = read_content(path)
    updates = pair_factors(content.shapes)
    for update in updates:
        _check_shapes(update, content.shapes, config.rank)
    return {
        "rank": config.rank,
        "alpha": config.alpha,
        "modules": sorted({update.module.rsplit(".", 1)[-1] for update in updates}),
        "tensors": len(content.shapes),
        "norm": content.norm,
    }


def _check_shapes(factors: Factors, shapes: Mapping[str, tuple[int, ...]], rank: int) -> None:
    down, up = shapes[factors.down], shapes[factors.up]
    if len(down) != 2 or len(up) != 2 or not down[0] == up[1] == rank:
        raise AdapterLayoutError(
            f"the factors of {factors.module} are {list(down)} and {list(up)}, not [r, in] and "
            f"[out, r] with r = {rank}, as the configuration says"
        )
