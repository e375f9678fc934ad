"""Single rows and columns of safetensors files, and small files of that format, in plain Python.

The layout: eight bytes that say how long the header is, the header as JSON (for each tensor its
dtype, shape and place), the numbers, little-endian.
"""

import json
import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from logsteer.errors import LogsteerError

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_CODES = {"F64": "d", "F32": "f", "F16": "e"}
_LENGTH = 8


class TensorFile:
    """A safetensors file, of which only what is asked for is read; use it as a context.

    Raises LogsteerError for a file that is none, for a tensor that is not there, and for one of
    another type than F32, F16, BF16 and F64; OSError for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise self._refuse("is empty")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._start = _LENGTH + int.from_bytes(self._data[:_LENGTH], "little")
        try:
            header = json.loads(self._data[_LENGTH : self._start])
        except (ValueError, RecursionError) as error:
            raise self._refuse("is no safetensors file") from error
        if not isinstance(header, dict):
            raise self._refuse("is no safetensors file")
        self._entries: dict[str, Any] = header

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._data.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> list[int]:
        """Return the lengths of a tensor's axes."""
        return self._describe(name)[1]

    def read_all(self, name: str) -> list[float]:
        """Return the numbers of a tensor, row after row."""
        kind, shape, start = self._describe(name)
        return self._read(kind, start, math.prod(shape))

    def read_one(self, name: str, index: int) -> float:
        """Return one number of a tensor with one axis."""
        kind, shape, start = self._describe(name)
        if len(shape) != 1 or index >= shape[0]:
            raise self._refuse(f"has {name} with shape {shape}, and no number {index} in it")
        return self._read(kind, start + index * _SIZES[kind], 1)[0]

    def read_row(self, name: str, index: int) -> list[float]:
        """Return a row of a tensor with two axes."""
        kind, (_, width), start = self._describe(name)
        return self._read(kind, start + index * width * _SIZES[kind], width)

    def read_column(self, name: str, index: int) -> list[float]:
        """Return a column of a tensor with two axes."""
        kind, (height, width), start = self._describe(name)
        size = _SIZES[kind]
        places = (start + (row * width + index) * size for row in range(height))
        return _decode(kind, b"".join(self._data[place : place + size] for place in places))

    def _read(self, kind: str, start: int, count: int) -> list[float]:
        return _decode(kind, self._data[start : start + count * _SIZES[kind]])

    def _describe(self, name: str) -> tuple[str, list[int], int]:
        """Return a tensor's type, shape, and place in the file, where all its numbers are there."""
        if name not in self._entries:
            raise self._refuse(f"has no tensor {name}")
        try:
            entry = self._entries[name]
            kind, shape = entry["dtype"], [int(size) for size in entry["shape"]]
            first, end = map(int, entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._refuse(f"has a damaged entry for tensor {name}") from error
        if kind not in _SIZES:
            raise self._refuse(f"has {name} in type {kind}; {', '.join(_SIZES)} are read")
        is_whole = first >= 0 and self._start + end <= len(self._data)
        if min(shape, default=0) < 0 or not is_whole or end - first != _count(shape, kind):
            raise self._refuse(f"has not all numbers of tensor {name}: it is damaged")
        return kind, shape, self._start + first

    def _refuse(self, detail: str) -> LogsteerError:
        return LogsteerError(f"{self._path} {detail}")


def _count(shape: Sequence[int], kind: str) -> int:
    return math.prod(shape) * _SIZES[kind]


def _decode(kind: str, data: bytes) -> list[float]:
    count = len(data) // _SIZES[kind]
    if kind == "BF16":  # the upper half of a float32
        halves = struct.unpack(f"<{count}H", data)
        data = struct.pack(f"<{count}I", *(half << 16 for half in halves))
        kind = "F32"
    return list(struct.unpack(f"<{count}{_CODES[kind]}", data))


def render_tensors(
    tensors: Mapping[str, Sequence[float]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return a safetensors file of float32 tensors with one axis.

    Raises OverflowError for a number beyond float32.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    body = b""
    for name, numbers in tensors.items():
        data = struct.pack(f"<{len(numbers)}f", *numbers)
        place = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F32", "shape": [len(numbers)], "data_offsets": place}
        body += data
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % _LENGTH)
    return len(head).to_bytes(_LENGTH, "little") + head + body
