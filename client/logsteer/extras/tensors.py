"""Safetensors files as numpy arrays, and vectors that torch has saved as such files."""

import io
import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

from logsteer.errors import InvalidRequestError
from logsteer.extras import import_package

_LENGTH = 8
"""Bytes that say how long the header of a safetensors file is."""
TORCH = "pt"
"""The format of files that torch.save writes."""
_TORCH_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02")
_HOOKS = {"decoder_block": "hook_resid_post", "self_attn": "hook_attn_out", "mlp": "hook_mlp_out"}
"""The kinds of layer of the package steering-vectors -> TransformerLens' name of their output."""


def read_tensors(file: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays of a safetensors file by name, and its metadata.

    Errors: ValueError for another file; ImportError that says what to install.
    """
    missing = ImportError('arrays need numpy and safetensors: pip install "logsteer[arrays]"')
    library, reader = (import_package(f"safetensors{of}", missing) for of in ("", ".numpy"))
    try:
        arrays: dict[str, Any] = reader.load(file)
        end = _LENGTH + int.from_bytes(file[:_LENGTH], "little")
        return arrays, json.loads(file[_LENGTH:end]).get("__metadata__") or {}
    except (library.SafetensorError, KeyError) as error:
        raise ValueError(f"it cannot be read as safetensors: {error}") from error


# ------------------------------------------------------------------ torch.save


class SavedVector:
    """Replaces the class of the package steering-vectors, whose objects are pickled whole."""

    layer_activations: Any = None
    layer_type: Any = "decoder_block"


def convert_upload(source: Any, form: Any) -> tuple[Any, Any]:
    """Return the source and the format of a vector to upload: what torch saved, as safetensors.

    A server takes safetensors and GGUF. A file that torch.save has written, from its format or its
    first bytes, is read on this machine, weights-only, so that none of its code runs; all other
    sources come back as they are. Errors: InvalidRequestError for a file that cannot be converted;
    ImportError without torch; OSError.
    """
    file: Any
    if isinstance(source, bytes):
        file = io.BytesIO(source)
    elif isinstance(source, str | PathLike) and (form == TORCH or Path(source).is_file()):
        # Anything else, as a pipe, can be read once only.
        file = Path(source).open("rb")  # noqa: SIM115  # closed below
    elif callable(getattr(source, "seek", None)) and source.seekable():
        file = nullcontext(source)
    elif form == TORCH:
        raise _refuse("give a path, an open file or bytes: what torch saved is converted first")
    else:
        return source, form
    with file as opened:
        place = opened.tell()
        beginning = opened.read(4)
        opened.seek(place)
        is_torch = form not in ("safetensors", "gguf") and beginning.startswith(_TORCH_BEGINNINGS)
        if not is_torch and form != TORCH:
            return source, form
        return convert_torch(opened.read()), "safetensors"


def convert_torch(data: bytes) -> bytes:
    """Return the tensors of a file that torch.save has written as a safetensors file.

    It is a dictionary of layer, or name of a hook, -> tensor; or a vector of steering-vectors.
    Errors: InvalidRequestError that says what to save instead; ImportError without torch.
    """
    torch, writer = (
        import_package(
            name,
            ImportError(
                "a file of torch is converted on this machine, which takes torch and safetensors: "
                "pip install torch safetensors; or save the vector as safetensors"
            ),
        )
        for name in ("torch", "safetensors.torch")
    )
    known: Any = (SavedVector, "steering_vectors.steering_vector.SteeringVector")
    try:
        with torch.serialization.safe_globals([known]):
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a broken file makes torch raise anything
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise _refuse(
                f"it names {named[1][:120]}, which only unpickling could run, and pickles are not "
                "run here; save a dictionary of layer -> tensor with torch.save, or safetensors"
            ) from error
        raise _refuse(f"torch cannot read it: {' '.join(str(error).split())[:200]}") from error
    tensors = _name_tensors(loaded)
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise _refuse(f"entry {name[:80]!r} is not a tensor of floating-point numbers")
    return bytes(writer.save({
        # A copy, as the layers may share memory, which safetensors refuses.
        name: tensor.detach().to_dense().to(torch.float32).contiguous().clone()
        for name, tensor in tensors.items()
    }))  # fmt: skip


def _name_tensors(loaded: Any) -> dict[str, Any]:
    """Return what was loaded as named tensors."""
    if isinstance(loaded, SavedVector):
        loaded = vars(loaded)
    if isinstance(loaded, Mapping) and "layer_activations" in loaded:
        kind = loaded.get("layer_type", "decoder_block")
        if kind not in _HOOKS:
            raise _refuse(f"its layer_type is {kind!r}; known are {', '.join(_HOOKS)}")
        layers = loaded["layer_activations"]
        if not isinstance(layers, Mapping):
            raise _refuse("its layer_activations are no dictionary")
        loaded = {f"blocks.{layer}.{_HOOKS[kind]}": tensor for layer, tensor in layers.items()}
    if not isinstance(loaded, Mapping):
        raise _refuse(
            f"it holds a {type(loaded).__name__}; save a dictionary of layer -> 1-D tensor"
        )
    return {str(name): tensor for name, tensor in loaded.items()}


def _refuse(detail: str) -> InvalidRequestError:
    return InvalidRequestError("invalid_vector", f"no vector of torch: {detail}", param="source")
