"""What a direction's file holds: shapes of its tensors, and numbers that are all finite.

The file is mapped and read a piece at a time, because it can be as large as the model.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from logsteer.errors import APIError, api_error

MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 100_000
PIECE = 2**22
"""Numbers that are looked at together."""

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class DirectionContent:
    """Shapes by name, and the Euclidean norm of all numbers together, summed in float64."""

    shapes: dict[str, tuple[int, ...]]
    norm: float


def invalid_direction(detail: str) -> APIError:
    """The error for a direction that cannot be used."""
    return api_error("invalid_vector", f"The direction is invalid: {detail}")


def read_content(path: Path) -> DirectionContent:
    """What the file holds. Errors: APIError `invalid_vector`."""
    header, start = _read_header(path)
    if not header:
        raise invalid_direction("it has no tensors; give one for each parameter that moves.")
    if len(header) > MAX_TENSORS:
        raise invalid_direction(f"it has {len(header)} tensors, at most {MAX_TENSORS} are read.")
    square = 0.0
    for name, entry in header.items():
        for numbers in _read_numbers(path, start, name, entry):
            if not np.isfinite(numbers).all():
                raise invalid_direction(f"{name} has a number that is NaN or infinite.")
            with np.errstate(over="ignore"):
                square += float(np.square(numbers, dtype=np.float64).sum())
    if not square:
        raise invalid_direction("every number is 0, so it would change nothing.")
    if not math.isfinite(square):
        raise invalid_direction("its length is beyond float64; scale it down.")
    shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    return DirectionContent(shapes, math.sqrt(square))


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Entries by tensor, and where their numbers start."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise invalid_direction("it is no safetensors file; send one as it is.")
        raw = file.read(size)
    try:
        # The library compares every announced size with the bytes that are there.
        with safe_open(path, "numpy"):
            pass
        header: dict[str, Any] = json.loads(raw)
    except (SafetensorError, ValueError) as error:
        raise invalid_direction(f"it cannot be read as safetensors: {error}.") from error
    header.pop("__metadata__", None)
    return header, 8 + size


def _read_numbers(
    path: Path, start: int, name: str, entry: dict[str, Any]
) -> Iterator[npt.NDArray[np.floating]]:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise invalid_direction(
            f"{name} has type {entry['dtype']}; F32, F16, BF16 and F64 are read."
        )
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
