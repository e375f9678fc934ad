"""Arrays in MessagePack."""

import math
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer._arrays import unpack


def packed(dtype: str, shape: list[int], data: bytes) -> bytes:
    body: bytes = msgpack.packb({"a": [{"dtype": dtype, "shape": shape, "data": data}]})
    return body


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "expected"),
    [
        ("<i4", [2, 3], struct.pack("<6i", *range(6)), [[0, 1, 2], [3, 4, 5]]),
        ("<i4", [], struct.pack("<i", -7), -7),
        ("<i4", [0], b"", []),
        ("<i4", [2, 0], b"", [[], []]),
        ("<i4", [1, 2, 1], b"\1\0\0\0\0\1\0\0", [[[1], [256]]]),
        ("<f4", [3], struct.pack("<3f", 0.5, math.nan, -math.inf), [0.5, None, None]),
    ],
)
def test_arrays_are_expanded(dtype: str, shape: list[int], data: bytes, expected: Any) -> None:
    assert unpack(packed(dtype, shape, data)) == {"a": [expected]}


@given(st.lists(st.floats(width=32, allow_infinity=False), max_size=20))
def test_every_float_survives_but_nan(values: list[float]) -> None:
    found = unpack(packed("<f4", [len(values)], struct.pack(f"<{len(values)}f", *values)))
    assert found == {"a": [[None if math.isnan(value) else value for value in values]]}


@pytest.mark.parametrize(
    "body",
    [
        packed("<f8", [1], b"\0" * 8),
        packed("<f4", [2], b"\0" * 4),
        b"\xc1",
        b"",
        msgpack.packb(1) + b"\0",
        packed("<f4", [2**40, 0], b""),  # a list of 2**40 empty ones
        packed("<f4", "ab", b"\0" * 4),  # type: ignore[arg-type]
        packed([["a", "<f4"]], [1], b"\0" * 4),  # type: ignore[arg-type]
        b"\x91" * 100_000,
        b"\x91" * 1000 + b"\x01",
    ],
)
def test_contradictions_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpack(body)


def test_what_only_resembles_an_array_stays() -> None:
    document = {"dtype": "<f4", "shape": [1], "data": "text"}
    assert unpack(msgpack.packb(document)) == document
