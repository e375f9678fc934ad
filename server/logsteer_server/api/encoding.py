"""Encode answers: as JSON, as MessagePack with raw arrays, or as safetensors."""

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
    """Encode a document as JSON, with non-finite numbers as null."""
    return orjson.dumps(document, default=_to_list, option=orjson.OPT_SERIALIZE_NUMPY)


def _to_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # orjson supports contiguous arrays only
        return np.ascontiguousarray(value)
    if isinstance(value, JsonText):
        return orjson.Fragment(value.text)
    raise TypeError(f"cannot encode {type(value).__name__}")


def encode_msgpack(document: Any) -> bytes:
    """Encode a document as MessagePack; an array is a map of `dtype`, `shape` and raw `data`.

    Non-finite numbers become nil, but stay as they are in arrays.
    """
    packed: bytes = msgpack.packb(_finite(document), default=_to_buffer)
    return packed


def _finite(value: Any) -> Any:
    """Return a document with None for non-finite numbers."""
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
"""Dtypes packed unchanged; other arrays are converted to one of them."""


def _to_buffer(value: Any) -> Any:
    if isinstance(value, JsonText):
        return orjson.loads(value.text)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot encode {type(value).__name__}")
    if (name := PACKED.get(value.dtype)) is None:
        return _to_buffer(value.astype("<i4" if value.dtype.kind in "iu" else "<f4"))
    return {"dtype": name, "shape": value.shape, "data": value.tobytes()}


TENSOR_DTYPES = {"f": "<f4", "i": "<i4"}
"""Kind of a dtype -> dtype in a file; half precision stays."""


def encode_tensors(tensors: Mapping[str, Sequence[np.ndarray]], about: Mapping[str, Any]) -> bytes:
    """Encode tensors as a safetensors file, each given in parts along its first axis.

    `about`: documents for the metadata.
    """
    joined = {}
    for name, parts in tensors.items():
        own = parts[0].dtype
        dtype = "<f2" if own == np.float16 else TENSOR_DTYPES[own.kind]
        joined[name] = np.concatenate(parts, dtype=dtype, casting="unsafe")
    return save(joined, {name: encode_json(text).decode() for name, text in about.items()})


def choose_encoding(accept: str, *, has_file: bool = False) -> str:
    """Choose the media type of an answer from the Accept header.

    In order of preference: safetensors if the answer has a file, MessagePack, JSON.
    """
    if has_file and SAFETENSORS in accept:
        return SAFETENSORS
    return MSGPACK if MSGPACK in accept else JSON


ENCODERS: Mapping[str, Callable[[Any], bytes]] = {JSON: encode_json, MSGPACK: encode_msgpack}
"""The encoder of each media type of `choose_encoding`, except files of tensors."""
DONE = b"data: [DONE]\n\n"
"""The end of a stream of OpenAI's shape."""
