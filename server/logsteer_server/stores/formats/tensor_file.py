"""What uploaded safetensors files hold: overrides, and LoRA adapters, PEFT's two files in one.

The file is mapped and read a piece at a time, because it can be as large as a model.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from logsteer.errors import APIError, api_error
from logsteer_server.contract.plan import CONFIG_KEY
from logsteer_server.numerics.lora import AdapterConfig, AdapterLayoutError, Factors, pair_factors

MAX_HEADER_BYTES = 16 * 2**20
LENGTH_BYTES = 8
"""Before the header: its own length."""
MAX_TENSORS = 100_000
PIECE = 2**22
"""Numbers that are looked at together."""
COPIED = 2**20
"""Bytes that are copied at once."""

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class TensorContent:
    """Shapes by name, and the Euclidean norm of all numbers together, summed in float64."""

    shapes: dict[str, tuple[int, ...]]
    norm: float


class TensorFileError(ValueError):
    """The file cannot be used; the message says why."""


def invalid_direction(detail: str) -> APIError:
    """Return the error for an override's file that cannot be used."""
    return api_error("invalid_vector", f"The direction is invalid: {detail}.")


def read_direction(path: Path) -> TensorContent:
    """Return what an override's file holds. Errors: APIError `invalid_vector`."""
    try:
        return read_content(path)
    except TensorFileError as error:
        raise invalid_direction(str(error)) from error


def read_content(path: Path) -> TensorContent:
    """Return what the file holds. Errors: TensorFileError."""
    with path.open("rb") as file:
        header, start = read_header(file)
    header.pop("__metadata__", None)
    try:
        # The library compares every announced size with the bytes that are there.
        with safe_open(path, "numpy"):
            pass
    except SafetensorError as error:
        raise TensorFileError(f"it cannot be read as safetensors: {error}") from error
    if not header:
        raise TensorFileError("it has no tensors")
    if len(header) > MAX_TENSORS:
        raise TensorFileError(f"it has {len(header)} tensors, at most {MAX_TENSORS} are allowed")
    square = 0.0
    for name, entry in header.items():
        for numbers in _read_numbers(path, start, name, entry):
            if not np.isfinite(numbers).all():
                raise TensorFileError(f"{name} has a number that is NaN or infinite")
            with np.errstate(over="ignore"):
                square += float(np.square(numbers, dtype=np.float64).sum())
    if not square:
        raise TensorFileError("every number is 0, so it would change nothing")
    if not math.isfinite(square):
        raise TensorFileError("its length is beyond float64; scale it down")
    shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    return TensorContent(shapes, math.sqrt(square))


def read_header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Return the entries by tensor, metadata among them, and where the numbers start.

    The sizes in it are as the file says: they have not been compared with what is there. Errors:
    TensorFileError.
    """
    size = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size > MAX_HEADER_BYTES:
        raise TensorFileError("it is not a safetensors file; send one as it is")
    try:
        header = json.loads(file.read(size))
    except (ValueError, RecursionError) as error:
        reason = "its header is nested too deeply" if isinstance(error, RecursionError) else error
        raise TensorFileError(f"it cannot be read as safetensors: {reason}") from error
    if not isinstance(header, dict):
        raise TensorFileError("it cannot be read as safetensors: its header is not an object")
    return header, LENGTH_BYTES + size


def copy_with_metadata(
    file: IO[bytes], metadata: Mapping[str, str], write: Callable[[bytes], None]
) -> None:
    """Write a safetensors file again, with this metadata. Errors: TensorFileError."""
    header, _ = read_header(file)
    try:
        text = json.dumps({**header, "__metadata__": metadata}).encode()
    except RecursionError as error:  # writing goes less deep than reading
        raise TensorFileError("its JSON is nested too deeply") from error
    text += b" " * (-len(text) % LENGTH_BYTES)  # numbers start at a multiple of their size
    write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    while piece := file.read(COPIED):
        write(piece)


def _read_numbers(
    path: Path, start: int, name: str, entry: dict[str, Any]
) -> Iterator[npt.NDArray[np.floating]]:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise TensorFileError(f"{name} has type {entry['dtype']}; F32, F16, BF16 and F64 are read")
    first, end = entry["data_offsets"]
    count = (end - first) // np.dtype(dtype).itemsize
    if not count:
        return
    mapped = np.memmap(path, dtype, "r", start + first, (count,))
    for begin in range(0, count, PIECE):
        piece = mapped[begin : begin + PIECE]
        if entry["dtype"] == "BF16":  # numpy has no such type: its bits are float32's upper half
            yield (piece.astype("<u4") << 16).view("<f4")
        else:
            yield piece


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """What an adapter is, as its card says it."""

    rank: int
    alpha: float
    modules: list[str]
    tensors: int
    norm: float


def invalid_adapter(detail: str) -> APIError:
    """Return the error for an adapter that cannot be used."""
    return api_error("invalid_adapter", f"The adapter is invalid: {detail}.")


def join_files(config: bytes, weights: IO[bytes], write: Callable[[bytes], None]) -> None:
    """Write the weights' safetensors file with the configuration in its metadata.

    Errors: APIError `invalid_adapter`.
    """
    try:
        AdapterConfig.parse(config)
        own = json.dumps(json.loads(config), sort_keys=True)
        copy_with_metadata(weights, {CONFIG_KEY: own}, write)
    except (AdapterLayoutError, TensorFileError) as error:
        raise invalid_adapter(str(error)) from error
    except RecursionError as error:  # writing goes less deep than reading
        raise invalid_adapter("its JSON is nested too deeply") from error


def read_adapter(path: Path) -> AdapterContent:
    """Return what a joined file holds. Errors: APIError `invalid_adapter`."""
    try:
        with path.open("rb") as file:
            header, _ = read_header(file)
        config = AdapterConfig.read(header.get("__metadata__", {}))
        content = read_content(path)
        updates = pair_factors(content.shapes)
        for update in updates:
            _check_shapes(update, content.shapes, config.rank)
    except (AdapterLayoutError, TensorFileError) as error:
        raise invalid_adapter(str(error)) from error
    return AdapterContent(
        config.rank,
        config.alpha,
        sorted({update.module.rsplit(".", 1)[-1] for update in updates}),
        len(content.shapes),
        content.norm,
    )


def _check_shapes(factors: Factors, shapes: Mapping[str, tuple[int, ...]], rank: int) -> None:
    down, up = shapes[factors.down], shapes[factors.up]
    if len(down) != 2 or len(up) != 2 or not down[0] == up[1] == rank:
        raise AdapterLayoutError(
            f"the factors of {factors.module} are {list(down)} and {list(up)}, not [r, in] and "
            f"[out, r] with r = {rank}, as the configuration says"
        )
