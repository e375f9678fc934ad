"""Answers as bytes: JSON, or MessagePack with the arrays as raw buffers."""

import math
from typing import Any

import msgpack
import numpy as np
import orjson

JSON = "application/json"
MSGPACK = "application/msgpack"


def encode_json(document: Any) -> bytes:
    """Encode a document as JSON; numbers that are not finite become null."""
    return orjson.dumps(document, default=_to_list, option=orjson.OPT_SERIALIZE_NUMPY)


def _to_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # orjson takes contiguous arrays only
        return np.ascontiguousarray(value)
    raise TypeError(f"cannot encode {type(value).__name__}")


def encode_msgpack(document: Any) -> bytes:
    """Encode a document as MessagePack; an array is a map of `dtype`, `shape` and raw `data`.

    Numbers that are not finite become nil, but stay NaN inside arrays.
    """
    packed: bytes = msgpack.packb(_finite(document), default=_to_buffer)
    return packed


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_finite(entry) for entry in value]
        case _:
            return value


def _to_buffer(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot encode {type(value).__name__}")
    dtype = "<i4" if value.dtype.kind in "iu" else "<f4"
    return {"dtype": dtype, "shape": list(value.shape), "data": value.astype(dtype).tobytes()}


def choose_encoding(accept: str) -> str:
    """Choose the media type of an answer: MessagePack where Accept names it, else JSON."""
    return MSGPACK if MSGPACK in accept else JSON


def encode(document: Any, media_type: str) -> bytes:
    """Encode a document in a media type of `choose_encoding`."""
    return encode_msgpack(document) if media_type == MSGPACK else encode_json(document)


DONE = b"data: [DONE]\n\n"
"""What ends a stream of OpenAI's shape."""


def encode_data(document: Any) -> bytes:
    """Encode a server-sent event without a name, as OpenAI's streams have them."""
    return b"data: " + encode_json(document) + b"\n\n"


def encode_event(name: str, document: Any) -> bytes:
    """Encode a server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + encode_json(document) + b"\n\n"
