"""Files of steering vectors -> `LayerVectors`, and back.

| format | names of tensors |
|---|---|
| `safetensors` | a layer's number, alone or behind `layer.`, `layers.`, `model.layers.`, |
| | `transformer.h.`, `blocks.` or `direction.`; or TransformerLens' `blocks.N.hook_resid_post` |
| `gguf` | `direction.N` |

N is the 0-based block whose output the vector is for, whatever the format; `gguf_file` has the
evidence for control vectors. A tensor is [D], or has further axes of length 1 in front. Readouts
are an entry `logsteer.readouts` of the metadata of safetensors and of GGUF, whose other readers
pass over it. What torch.save has written is a pickle, which is not read here: the client converts
it on its caller's machine.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from logsteer.schemas import ContentFormat, VectorFormat
from logsteer_server.stores.formats.gguf_file import MAGIC, MODEL_HINT, parse_gguf, render_gguf
from logsteer_server.stores.layer_vectors import (
    MAX_LAYERS,
    READOUTS,
    RESID_POST,
    LayerVectors,
    Readout,
    invalid_vector,
    parse_readouts,
    parse_tensor_name,
    read_metadata,
    render_readouts,
)

Array = npt.NDArray[np.floating]

MEDIA_TYPES: Mapping[ContentFormat, str] = {
    "safetensors": "application/vnd.safetensors",
    "gguf": "application/vnd.gguf",
}

MAX_AXES = 8
"""Of a tensor, most of them of length 1: numpy has no more than 64."""

_BY_NUMBER = re.compile(
    r"(?:(?:layers?|model\.layers|transformer\.h|blocks|direction)[._])?([0-9]{1,6})"
)
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_STARTS_OF_PT = (b"PK\x03\x04", b"\x80")
"""Of a zip archive, which torch.save writes, and of a pickle, which it once wrote."""


@dataclass(frozen=True, slots=True)
class ReadFile:
    """The vectors of a file, its format, and what it says of its model."""

    vectors: LayerVectors
    format: VectorFormat
    model_hint: str | None = None


def read_file(data: bytes, given: VectorFormat | None = None) -> ReadFile:
    """Return the vectors of a file in the format given, or the one that it looks like.

    Errors: APIError `invalid_vector`.
    """
    name = given or sniff_format(data)
    hint, readouts = None, "{}"
    if name == "gguf":
        try:
            tensors, fields = parse_gguf(data)
        except ValueError as error:
            raise invalid_vector(f"the GGUF file cannot be read: {error}.") from error
        hint, readouts = fields.get(MODEL_HINT), fields.get(READOUTS, readouts)
    elif name == "pt":
        raise invalid_vector(
            "the file is one of torch.save, which can run code where it is read, so the server "
            "takes safetensors and GGUF. `logsteer vectors put NAME FILE.pt` converts it on your "
            "machine."
        )
    else:
        tensors = _read_safetensors(data)
        readouts = read_metadata(data).get(READOUTS, readouts)
    vectors = _place_tensors(tensors, parse_readouts(readouts))
    return ReadFile(vectors, name, hint[:200] if hint and isinstance(hint, str) else None)


def write_file(vectors: LayerVectors, name: ContentFormat, model_hint: str | None) -> bytes:
    """Return the vectors as a file.

    The safetensors file is `LayerVectors.content`: its SHA-256 is the vectors' own. Errors:
    APIError `invalid_vector` where the format cannot hold them.
    """
    if name == "safetensors":
        return vectors.content
    if vectors.hook != RESID_POST:
        raise invalid_vector(
            f"it is for {vectors.hook}, and a GGUF control vector is always for {RESID_POST}; ask "
            "for format safetensors."
        )
    if 0 in vectors.layers:
        raise invalid_vector(
            "it has layer 0, which llama.cpp refuses in a control vector; ask for format "
            "safetensors, or combine it without that layer."
        )
    further = {READOUTS: render_readouts(vectors.readouts)} if vectors.readouts else {}
    return render_gguf(dict(vectors.layers), model_hint or "unknown", further)


def sniff_format(data: bytes) -> VectorFormat:
    """Return the format that a file's first bytes tell of. Errors: APIError `invalid_vector`."""
    if data.startswith(MAGIC):
        return "gguf"
    if data.startswith(_STARTS_OF_PT):
        return "pt"
    if data[8:9] == b"{":
        return "safetensors"
    raise invalid_vector(
        "the body is neither safetensors nor GGUF; send the file's bytes as they are."
    )


def _read_safetensors(data: bytes) -> dict[str, Array]:
    """Return tensors by name. The library compares every announced size with what is there."""
    try:
        entries = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise invalid_vector(f"the safetensors file cannot be read: {error}.") from error
    tensors: dict[str, Array] = {}
    for name, entry in entries:
        dtype, raw = entry["dtype"], entry["data"]
        if len(entry["shape"]) > MAX_AXES:
            raise invalid_vector(
                f"tensor {name[:80]!r} has {len(entry['shape'])} axes; give one number per "
                "dimension."
            )
        if dtype == "BF16":  # numpy has no such type: its bits are the upper half of float32's
            numbers = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        elif dtype in _DTYPES:
            numbers = np.frombuffer(raw, _DTYPES[dtype])
        else:
            raise invalid_vector(
                f"tensor {name[:80]!r} has type {dtype}; F32, F16, BF16 and F64 are read."
            )
        try:
            tensors[name] = numbers.reshape(entry["shape"])
        except ValueError as error:  # an axis beyond what numpy counts, beside one of length 0
            raise invalid_vector(f"tensor {name[:80]!r} has a shape that cannot be.") from error
    return tensors


def _place_tensors(tensors: Mapping[str, Array], readouts: Mapping[int, Readout]) -> LayerVectors:
    """Return named tensors as vectors by layer, with their readouts."""
    if len(tensors) > MAX_LAYERS:
        raise invalid_vector(f"it has {len(tensors)} tensors, at most {MAX_LAYERS} are allowed.")
    layers: dict[int, Array] = {}
    hooks = set()
    for name, tensor in tensors.items():
        place = parse_tensor_name(name)
        if place is None and (found := _BY_NUMBER.fullmatch(name)):
            place = int(found[1]), RESID_POST
        if place is None:
            raise invalid_vector(
                f"tensor {name[:80]!r} names no layer; put the layer's number into its name, such "
                "as '3', 'layer.3' or 'blocks.3.hook_resid_post'."
            )
        layer, hook = place
        if layer in layers:
            raise invalid_vector(f"layer {layer} is there twice; one tensor a layer is read.")
        if tensor.ndim > 1 and all(size == 1 for size in tensor.shape[:-1]):
            tensor = tensor.reshape(-1)
        layers[layer] = tensor
        hooks.add(hook)
    if len(hooks) > 1:
        raise invalid_vector(
            f"it has several hooks, {', '.join(sorted(hooks))}; store one vector for each."
        )
    return LayerVectors(layers, hooks.pop() if hooks else RESID_POST, readouts)
