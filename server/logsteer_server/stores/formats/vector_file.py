"""Files of steering vectors -> `LayerVectors`, and back.

| format | names of tensors |
|---|---|
| `safetensors` | a layer's number, alone or after `layer.`, `layers.`, `model.layers.`, |
| | `transformer.h.`, `blocks.` or `direction.`; or TransformerLens' `blocks.N.hook_resid_post` |
| `gguf` | `direction.N` |

In every format, N is the 0-based block whose output the vector is for; `gguf_file` has the evidence
for control vectors. A tensor has shape [D], or [1, …, D]. Readouts are the metadata entry
`logsteer.readouts` of both formats, which other readers ignore. Files of torch.save are pickles,
which the server does not read: the client converts them on the caller's machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from logsteer.schemas import ContentFormat, VectorFormat
from logsteer_server.stores.formats.gguf_file import MAGIC, MODEL_HINT, parse_gguf, render_gguf
from logsteer_server.stores.layer_vectors import (
    READOUTS,
    RESID_POST,
    LayerVectors,
    invalid_vector,
    parse_safetensors,
    place_tensors,
    render_readouts,
)

MEDIA_TYPES: Mapping[ContentFormat, str] = {
    "safetensors": "application/vnd.safetensors",
    "gguf": "application/vnd.gguf",
}

_STARTS_OF_PT = (b"PK\x03\x04", b"\x80")
"""First bytes of a zip archive, torch.save's format, and of a pickle, its older format."""


@dataclass(frozen=True, slots=True)
class ReadFile:
    """The vectors of a file, its format, and the model that it names."""

    vectors: LayerVectors
    format: VectorFormat
    model_hint: str | None = None


def read_file(data: bytes, given: VectorFormat | None = None) -> ReadFile:
    """Return the vectors of a file in the given format, or the one detected.

    Errors: APIError `invalid_vector`.
    """
    name = given or sniff_format(data)
    if name == "pt":
        raise invalid_vector(
            "the file is one of torch.save, which can run code where it is read, so the server "
            "takes safetensors and GGUF. `logsteer vectors put NAME FILE.pt` converts it on your "
            "machine."
        )
    if name == "safetensors":
        return ReadFile(parse_safetensors(data), name)
    try:
        tensors, fields = parse_gguf(data)
    except ValueError as error:
        raise invalid_vector(f"the GGUF file cannot be read: {error}.") from error
    hint, vectors = fields.get(MODEL_HINT), place_tensors(tensors, fields.get(READOUTS, "{}"))
    return ReadFile(vectors, name, hint[:200] if hint and isinstance(hint, str) else None)


def write_file(vectors: LayerVectors, name: ContentFormat, model_hint: str | None) -> bytes:
    """Return the vectors as a file.

    The safetensors file is `LayerVectors.content`, with the vectors' own SHA-256. Errors: APIError
    `invalid_vector` if the format cannot hold them.
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
    """Detect a file's format from its first bytes. Errors: APIError `invalid_vector`."""
    if data.startswith(MAGIC):
        return "gguf"
    if data.startswith(_STARTS_OF_PT):
        return "pt"
    if data[8:9] == b"{":
        return "safetensors"
    raise invalid_vector(
        "the body is neither safetensors nor GGUF; send the file's bytes as they are."
    )
