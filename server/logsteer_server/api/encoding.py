"""Answers as bytes: JSON, or MessagePack with the arrays as raw buffers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import orjson
from safetensors.numpy import save

from logsteer_server.tasks.completions import JsonText
from logsteer_server.tasks.logprob import FiniteDocuments

JSON = "application/json"
MSGPACK = "application/msgpack"
SAFETENSORS = "application/vnd.safetensors"


def encode_json(document: Any) -> bytes:
    """Encode a document as JSON; numbers that are not finite become null."""
    return orjson.dumps(document, default=_to_list, option=orjson.OPT_SERIALIZE_NUMPY)


def _to_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # orjson takes contiguous arrays only
        return np.ascontiguousarray(value)
    if isinstance(value, JsonText):
        return orjson.Fragment(value.text)
    raise TypeError(f"cannot encode {type(value).__name__}")


def encode_msgpack(document: Any) -> bytes:
    """Encode a document as MessagePack; an array is a map of `dtype`, `shape` and raw `data`.

    Numbers that are not finite become nil, but stay NaN inside arrays.
    """
    packed: bytes = msgpack.packb(_finite(document), default=_to_buffer)
    return packed


def _finite(value: Any) -> Any:
    """Return a document with None in the place of numbers that are not finite."""
    match value:
        case FiniteDocuments():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_finite(entry) for entry in value]
        case _:
            return value


PACKED = {np.dtype(name): name for name in ("<f4", "<f2", "<i4")}
"""Arrays whose buffers are packed as they are; others become one of them."""


def _to_buffer(value: Any) -> Any:
    if isinstance(value, JsonText):
        return orjson.loads(value.text)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot encode {type(value).__name__}")
    if (name := PACKED.get(value.dtype)) is None:
        return _to_buffer(value.astype("<i4" if value.dtype.kind in "iu" else "<f4"))
    return {"dtype": name, "shape": value.shape, "data": value.tobytes()}


TENSOR_DTYPES = {"f": "<f4", "i": "<i4"}
"""Kind of a number -> what a file has it as; half precision stays."""


def encode_tensors(tensors: Mapping[str, Sequence[np.ndarray]], about: Mapping[str, Any]) -> bytes:
    """Encode arrays as a safetensors file, each from parts that follow along its first axis.

    `about` are documents of its metadata.
    """
    joined = {}
    for name, parts in tensors.items():
        own = parts[0].dtype
        dtype = "<f2" if own == np.float16 else TENSOR_DTYPES[own.kind]
        joined[name] = np.concatenate(parts, dtype=dtype, casting="unsafe")
    return save(joined, {name: encode_json(text).decode() for name, text in about.items()})


def choose_encoding(accept: str, *, has_file: bool = False) -> str:
    """Choose the media type of an answer, by what Accept names.

    A safetensors file where the answer has one, or else MessagePack, or else JSON.
    """
    if has_file and SAFETENSORS in accept:
        return SAFETENSORS
    return MSGPACK if MSGPACK in accept else JSON


ENCODERS: Mapping[str, Callable[[Any], bytes]] = {JSON: encode_json, MSGPACK: encode_msgpack}
"""The encoder of each media type of `choose_encoding`, except files of tensors."""
DONE = b"data: [DONE]\n\n"
"""The end of a stream of OpenAI's shape."""
