"""Safetensors files as numpy arrays, and vectors that torch has saved as such files.

The layout: eight bytes that say how long the header is, the header as JSON (for each tensor its
dtype, shape and place), the numbers, little-endian.
"""

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

from logsteer.errors import InvalidRequestError
from logsteer.extras import import_package

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4"}
FLOATS = ("F64", "F32", "F16", "BF16")
_LENGTH = 8

TORCH = "pt"
"""The format of files that torch.save writes."""
MAX_TENSORS = 4096
MAX_BYTES = 2**30
"""Bytes of float32 that a file of torch may unfold to: a few kilobytes can say terabytes."""
_TORCH_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02")
_HOOKS = {"decoder_block": "hook_resid_post", "self_attn": "hook_attn_out", "mlp": "hook_mlp_out"}
"""The kinds of layer of the package steering-vectors -> TransformerLens' name of their output."""


class TensorFile:
    """The tensors of a safetensors file, each read from `data` when it is needed.

    `data` is bytes, or a numpy.memmap, of which only what is needed is read. Raises ValueError
    for any other data, and for a tensor that is not there, not whole, or of a type that
    is not read; ImportError that says what to install.
    """

    def __init__(self, data: Any) -> None:
        self._data = import_numpy().frombuffer(data, dtype="u1")
        self._start = _LENGTH + int.from_bytes(self._data[:_LENGTH].tobytes(), "little")
        try:
            header = json.loads(self._data[_LENGTH : self._start].tobytes())
            self.metadata: dict[str, Any] = dict(header.pop("__metadata__", {}))
        except (ValueError, RecursionError, TypeError, AttributeError) as error:
            raise ValueError("it is not a safetensors file") from error
        self.entries: dict[str, Any] = header

    def read(self, name: str, dtypes: Sequence[str], *index: Any) -> Any:
        """Return a tensor of one of these types, or what `index` selects of it, as an array.

        Numbers in bfloat16 are given as float32; all others share the memory of `data`.
        """
        if name not in self.entries:
            raise ValueError(f"it has no tensor {name}")
        try:
            entry = self.entries[name]
            dtype, shape = str(entry["dtype"]), [int(size) for size in entry["shape"]]
            first, end = (self._start + int(place) for place in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it has a damaged entry for tensor {name}") from error
        if dtype not in dtypes:
            raise ValueError(f"it has {name} in type {dtype}; {', '.join(dtypes)} are read")
        size = math.prod(shape) * int(_DTYPES[dtype][-1])
        is_inside = self._start <= first <= end <= len(self._data)
        if min(shape, default=0) < 0 or not is_inside or end - first != size:
            raise ValueError(f"it has not all numbers of tensor {name}: it is damaged")
        found = self._data[first:end].view(_DTYPES[dtype]).reshape(shape)
        try:
            found = found[index]
        except IndexError as error:
            raise ValueError(f"it has {name} with shape {shape}, and no {index} in it") from error
        # bfloat16 is the upper half of a float32.
        return (found.astype("u4") << 16).view("f4") if dtype == "BF16" else found


def render_tensors(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors file of arrays, in float32. Errors: OverflowError beyond float32."""
    np = import_numpy()
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts, place = [], 0
    for name, numbers in tensors.items():
        with np.errstate(over="ignore"):
            array = np.ascontiguousarray(numbers, "<f4")
        if not np.isfinite(array).all():
            raise OverflowError(f"tensor {name} has numbers beyond float32, or NaN")
        parts.append(array.tobytes())
        end = place + array.nbytes
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [place, end]}
        place = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % _LENGTH)
    return b"".join((len(head).to_bytes(_LENGTH, "little"), head, *parts))


def import_numpy() -> Any:
    """Return the module numpy; ImportError that says what to install where it is missing."""
    return import_package("numpy", ImportError("tensors are numpy arrays: pip install numpy"))


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
    torch = import_package(
        "torch",
        ImportError(
            "a file of torch is converted on this machine, which takes torch: pip install torch; "
            "or save the vector as safetensors"
        ),
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
        if not isinstance(tensor, torch.Tensor):
            raise _refuse(f"entry {name[:80]!r} is a {type(tensor).__name__}, not a tensor")
        if tensor.layout is not torch.strided or not tensor.is_floating_point():
            raise _refuse(f"entry {name[:80]!r} is not a dense tensor of floating-point numbers")
    # An expanded tensor counts for what it comes to once it is laid out.
    size = sum(4 * tensor.numel() for tensor in tensors.values())
    if size > MAX_BYTES:
        raise _refuse(f"its tensors come to {size} bytes, at most {MAX_BYTES} are converted")
    arrays = {name: one.detach().to(torch.float32).numpy() for name, one in tensors.items()}
    try:
        return render_tensors(arrays)
    except OverflowError as error:
        raise _refuse(str(error)) from error


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
    if len(loaded) > MAX_TENSORS:
        raise _refuse(f"it has {len(loaded)} entries, at most {MAX_TENSORS} are read")
    return {str(name): tensor for name, tensor in loaded.items()}


def _refuse(detail: str) -> InvalidRequestError:
    return InvalidRequestError("invalid_vector", f"no vector of torch: {detail}", param="source")
