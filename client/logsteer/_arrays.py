"""Numeric arrays inside MessagePack answers."""

import math
import struct
from typing import Any

import msgpack

_KEYS = {"dtype", "shape", "data"}
_CODES = {"<f4": "f", "<f2": "e", "<i4": "i"}
MAX_EMPTY = 2**20
"""Lists in an array without a number: no byte stands for them."""


def unpack(body: bytes) -> Any:
    """Return the document in `body`, its arrays as nested lists; non-finite numbers become None.

    An array is a map of `dtype` ("<f4", "<f2" or "<i4"), `shape` and little-endian `data`.
    Raises ValueError where the body is not MessagePack or an array contradicts itself.
    """
    try:
        return _expand(msgpack.unpackb(body))
    except (RecursionError, TypeError) as error:  # nested deeply; a shape that is none
        raise ValueError(str(error)) from error


def _expand(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == _KEYS and isinstance(value["data"], bytes):
            return _nested_list(value["dtype"], value["shape"], value["data"])
        return {key: _expand(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item) for item in value]
    return value


def _nested_list(dtype: str, shape: list[int], data: bytes) -> Any:
    if dtype not in _CODES:
        raise ValueError(f"array of dtype {dtype!r}; known are {sorted(_CODES)}")
    size = math.prod(shape)
    if len(data) != int(dtype[-1]) * size or (not size and max(shape) > MAX_EMPTY):
        raise ValueError(f"array of {dtype} and shape {shape} in {len(data)} bytes")
    numbers: list[Any] = list(struct.unpack(f"<{size}{_CODES[dtype]}", data))
    if dtype != "<i4":
        # The buffer has no null: the server writes NaN there for what JSON calls null.
        numbers = [number if math.isfinite(number) else None for number in numbers]
    return _fold(numbers, shape)


def _fold(numbers: list[Any], shape: list[int]) -> Any:
    if not shape:
        return numbers[0]
    if len(shape) == 1:
        return numbers
    size = math.prod(shape[1:])
    return [_fold(numbers[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]
