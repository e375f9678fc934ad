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
from typing import Any, NamedTuple

from logsteer.errors import LogsteerError

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_CODES = {"F64": "d", "F32": "f", "F16": "e"}
_LENGTH = 8


class TensorPlace(NamedTuple):
    """A tensor of a file: its type, the lengths of its axes, and where its bytes lie there."""

    dtype: str
    shape: list[int]
    start: int
    end: int


class SafetensorsHeader:
    """What the header of a safetensors file says: its `metadata`, and where each tensor lies.

    Raises ValueError for data that is no such file.
    """

    def __init__(self, data: mmap.mmap | memoryview) -> None:
        self._length = len(data)
        self._start = _LENGTH + int.from_bytes(bytes(data[:_LENGTH]), "little")
        try:
            header = json.loads(bytes(data[_LENGTH : self._start]))
        except (ValueError, RecursionError) as error:
            raise ValueError("it is no safetensors file") from error
        metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
        if not isinstance(metadata, dict):
            raise ValueError("it is no safetensors file")
        self.metadata: dict[str, Any] = metadata
        self._entries: dict[str, Any] = header

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return list(self._entries)

    def find(self, name: str, sizes: Mapping[str, int]) -> TensorPlace:
        """Return where a tensor lies; `sizes` are the types that are read, with a number's bytes.

        Raises ValueError where it is not there, of another type, or not whole.
        """
        if name not in self._entries:
            raise ValueError(f"it has no tensor {name}")
        try:
            entry = self._entries[name]
            dtype, shape = str(entry["dtype"]), [int(size) for size in entry["shape"]]
            first, end = map(int, entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it has a damaged entry for tensor {name}") from error
        if dtype not in sizes:
            raise ValueError(f"it has {name} in type {dtype}; {', '.join(sizes)} are read")
        is_whole = first >= 0 and self._start + end <= self._length
        size = math.prod(shape) * sizes[dtype]
        if min(shape, default=0) < 0 or not is_whole or end - first != size:
            raise ValueError(f"it has not all numbers of tensor {name}: it is damaged")
        return TensorPlace(dtype, shape, self._start + first, self._start + end)


class TensorFile:
    """A safetensors file, of which only what is asked for is read; use it as a context.

    Raises LogsteerError for a file that is none, for a tensor that is not there, and for one of
    another type than F32, F16, BF16 and F64; OSError for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise self._refuse("it is empty")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._header = SafetensorsHeader(self._data)
        except ValueError as error:
            raise self._refuse(error) from error

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
        return name in self._header.names

    def shape(self, name: str) -> list[int]:
        """Return the lengths of a tensor's axes."""
        return self._find(name).shape

    def read_all(self, name: str) -> list[float]:
        """Return the numbers of a tensor, row after row."""
        found = self._find(name)
        return _decode(found.dtype, self._data[found.start : found.end])

    def read_one(self, name: str, index: int) -> float:
        """Return one number of a tensor with one axis."""
        kind, shape, start, _ = self._find(name)
        if len(shape) != 1 or index >= shape[0]:
            raise self._refuse(f"it has {name} with shape {shape}, and no number {index} in it")
        return self._read(kind, start + index * _SIZES[kind], 1)[0]

    def read_row(self, name: str, index: int) -> list[float]:
        """Return a row of a tensor with two axes."""
        kind, (_, width), start, _ = self._find(name)
        return self._read(kind, start + index * width * _SIZES[kind], width)

    def read_column(self, name: str, index: int) -> list[float]:
        """Return a column of a tensor with two axes."""
        kind, (height, width), start, _ = self._find(name)
        size = _SIZES[kind]
        places = (start + (row * width + index) * size for row in range(height))
        return _decode(kind, b"".join(self._data[place : place + size] for place in places))

    def _read(self, kind: str, start: int, count: int) -> list[float]:
        return _decode(kind, self._data[start : start + count * _SIZES[kind]])

    def _find(self, name: str) -> TensorPlace:
        try:
            return self._header.find(name, _SIZES)
        except ValueError as error:
            raise self._refuse(error) from error

    def _refuse(self, fault: object) -> LogsteerError:
        return LogsteerError(f"{self._path}: {fault}")


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
