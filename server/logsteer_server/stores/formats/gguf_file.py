"""GGUF control vectors, as repeng and llama.cpp write and read them.

Layer numbers need no shift: both add the tensor `direction.N` to the output of block N, 0-based.
repeng trains `directions[N]` on `hidden_states[N + 1]`, which is the output of block N, and adds it
there. llama.cpp stores `direction.N` in row N - 1, reads row N - 1 for layer N, and adds it to
`l_out-N`; so it has no layer 0 and refuses `direction.0`, which repeng can write. (llama.cpp's own
cvector-generator trains on `l_out-N` and writes that as `direction.N+1`; here the file's effect
decides.)

The layout is ggml's docs/gguf.md, versions 2 and 3, little-endian. The `gguf` package is not used:
its import takes seconds and loads tokenizer libraries, and its reader needs a path and creates an
array for each element of metadata, so that a small file can use all memory. Here every size is
checked against the number of bytes present, and arrays, which no control vector has, are refused.
"""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"GGUF"
ARCHITECTURE = "controlvector"
MODEL_HINT = f"{ARCHITECTURE}.model_hint"
MAX_FIELDS = 1024
MAX_TENSORS = 4096
ALIGNMENT = 32

_UINT32, _STRING = 4, 8
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_DTYPES = {0: "<f4", 1: "<f2", 28: "<f8"}
"""ggml's type -> numpy's; other types are quantised or integers."""


class _Cursor:
    """A position in the bytes, which never reads or reserves beyond their end."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.position = 0

    def read(self, size: int) -> memoryview:
        """Read the next bytes. Errors: ValueError if too few are left."""
        if size > len(self.data) - self.position:
            left = len(self.data) - self.position
            raise ValueError(
                f"it ends too early: {size} bytes are announced at byte {self.position}, {left} "
                "are there"
            )
        self.position += size
        return self.data[self.position - size : self.position]

    def number(self, layout: str) -> Any:
        """Read one number in a `struct` layout."""
        return struct.unpack(layout, self.read(struct.calcsize(layout)))[0]

    def string(self) -> str:
        """Read a string, after its length. Errors: ValueError, also if it is not UTF-8."""
        return str(self.read(self.number("<Q")), "utf-8")

    def count(self, limit: int, what: str) -> int:
        """Read a count. Errors: ValueError if it exceeds the limit."""
        count: int = self.number("<Q")
        if count > limit:
            raise ValueError(f"it announces {count} {what}, at most {limit} are allowed")
        return count


def parse_gguf(data: bytes) -> tuple[dict[str, npt.NDArray[np.floating]], dict[str, Any]]:
    """Return the tensors of a control vector file, by name, and its fields.

    Errors: ValueError with what is wrong.
    """
    cursor = _Cursor(data)
    if cursor.read(4) != MAGIC:
        raise ValueError("it does not begin as GGUF files do")
    version = cursor.number("<I")
    if version not in (2, 3):
        raise ValueError(f"it has version {version}; little-endian versions 2 and 3 are read")
    num_tensors = cursor.count(MAX_TENSORS, "tensors")
    num_fields = cursor.count(MAX_FIELDS, "fields")
    fields = {}
    for _ in range(num_fields):
        name = cursor.string()
        fields[name] = _read_value(cursor, name)
    architecture = fields.get("general.architecture", ARCHITECTURE)
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"its architecture is {str(architecture)[:80]!r}, so it is a model; a control "
            f"vector has {ARCHITECTURE!r}"
        )
    places = [_read_place(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment!r}, which is not a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, npt.NDArray[np.floating]] = {}
    for name, count, dtype, offset in places:
        if name in tensors:
            raise ValueError(f"tensor {name[:80]!r} is there twice")
        cursor.position = min(start + offset, len(data))
        numbers = cursor.read(count * np.dtype(dtype).itemsize)
        tensors[name] = np.frombuffer(numbers, dtype)
    return tensors, fields


def _read_value(cursor: _Cursor, name: str) -> Any:
    """Read a field's value, after its type. Errors: ValueError for an array."""
    kind = cursor.number("<I")
    if kind == _STRING:
        return cursor.string()
    if kind not in _SCALARS:
        told = f"its field {name[:80]!r} has type {kind}: strings and numbers are read"
        raise ValueError(told)
    return cursor.number(_SCALARS[kind])


def _read_place(cursor: _Cursor) -> tuple[str, int, str, int]:
    """Read a tensor's name, number of elements, numpy type, and offset in the data."""
    name = cursor.string()
    num_dims = cursor.number("<I")
    if not 1 <= num_dims <= 4:
        raise ValueError(f"tensor {name[:80]!r} has {num_dims} dimensions")
    dims = [cursor.number("<Q") for _ in range(num_dims)]
    if any(size != 1 for size in dims[1:]):
        raise ValueError(f"tensor {name[:80]!r} has shape {dims[::-1]}; a direction has one axis")
    kind = cursor.number("<I")
    if kind not in _DTYPES:
        raise ValueError(f"tensor {name[:80]!r} has ggml type {kind}; F32, F16 and F64 are read")
    return name, dims[0], _DTYPES[kind], cursor.number("<Q")


def render_gguf(
    directions: Mapping[int, npt.NDArray[np.float32]],
    model_hint: str,
    further: Mapping[str, str] | None = None,
) -> bytes:
    """Return a control vector file with `direction.N` for each layer N, as repeng writes it.

    `further`: additional strings of its metadata.
    """
    fields = [
        ("general.architecture", _STRING, _render_string(ARCHITECTURE)),
        (MODEL_HINT, _STRING, _render_string(model_hint)),
        (f"{ARCHITECTURE}.layer_count", _UINT32, struct.pack("<I", len(directions))),
        *((name, _STRING, _render_string(text)) for name, text in (further or {}).items()),
    ]
    head = [MAGIC, struct.pack("<IQQ", 3, len(directions), len(fields))]
    for name, kind, value in fields:
        head += [_render_string(name), struct.pack("<I", kind), value]
    body: list[bytes] = []
    offset = 0
    for layer, vector_D in directions.items():
        head += [
            _render_string(f"direction.{layer}"),
            struct.pack("<IQIQ", 1, len(vector_D), 0, offset),
        ]
        numbers = _pad(vector_D.astype("<f4").tobytes())
        body.append(numbers)
        offset += len(numbers)
    return _pad(b"".join(head)) + b"".join(body)


def _render_string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
