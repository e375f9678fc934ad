"""Steering vectors as a value: one vector for each of some layers.

Axis letters: D width of an activation.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save

from logsteer.errors import APIError, api_error
from logsteer.schemas.steering import Finite

Vector = npt.NDArray[np.float32]
Array = npt.NDArray[np.floating]

FLOAT_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Supported dtype of safetensors -> numpy's; numpy has no bfloat16."""

RESID_POST = "resid_post"
MAX_LAYERS = 4096
MAX_WIDTH = 2**20

_HOOK = re.compile(r"[A-Za-z0-9_.]{1,128}")
_NAME = re.compile(r"blocks\.(0|[1-9][0-9]{0,5})\.([A-Za-z0-9_.]+)")
_BY_NUMBER = re.compile(
    r"(?:(?:layers?|model\.layers|transformer\.h|blocks|direction)[._])?([0-9]{1,6})"
)


READOUTS = "logsteer.readouts"
"""The metadata entry of a file with the readouts, JSON by layer."""


@checked_dataclass(frozen=True, slots=True, config={"strict": True, "extra": "forbid"})
class Readout:
    """The meaning of the projection c = x . v / |v| of an activation x on one layer's vector v.

    With z = slope c + bias, `logistic` is the probability 1 / (1 + exp(-z)), and `relu` the
    activation of a feature: z if z > `threshold`, else 0 (JumpReLU of sparse autoencoders, arXiv
    2407.14435; threshold 0 is ReLU). Errors: ValueError.
    """

    kind: Literal["logistic", "relu"]
    slope: Finite
    bias: Finite
    threshold: Annotated[Finite, Field(ge=0)] = 0.0


@dataclass(frozen=True, eq=False)
class LayerVectors:
    """Checked vectors by layer, ascending; equal if hook, numbers and readouts are equal.

    Layer L with hook `resid_post` is the residual stream after block L, 0-based. The arrays are
    read-only copies. `readouts`: by layer, the meaning of a projection, if known. Errors: APIError
    `invalid_vector`.
    """

    layers: Mapping[int, Vector]
    hook: str = RESID_POST
    readouts: Mapping[int, Readout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _HOOK.fullmatch(self.hook):
            raise invalid_vector(f"hook {self.hook[:200]!r} is not the name of an activation.")
        if not self.layers:
            raise invalid_vector("it has no layers: give the numbers of at least one.")
        checked: dict[int, Vector] = {}
        for layer in sorted(self.layers):
            if not 0 <= layer < MAX_LAYERS:
                raise invalid_vector(f"layer {layer} is outside 0 to {MAX_LAYERS - 1}.")
            checked[int(layer)] = _check_numbers(layer, self.layers[layer])
        first = next(iter(checked))
        for layer, vector_D in checked.items():
            if len(vector_D) != len(checked[first]):
                detail = (
                    f"layer {first} has {len(checked[first])} numbers and layer {layer} has "
                    f"{len(vector_D)}; all layers of a vector have the model's hidden size."
                )
                raise invalid_vector(detail)
        if not any(vector_D.any() for vector_D in checked.values()):
            raise invalid_vector("every number is 0, so it would change nothing.")
        object.__setattr__(self, "layers", MappingProxyType(checked))
        readouts = {layer: self.readouts[layer] for layer in sorted(self.readouts)}
        for layer in readouts:
            if layer not in checked or not checked[layer].any():
                raise invalid_vector(
                    f"it has a readout for layer {layer}, and no direction there to project on."
                )
        object.__setattr__(self, "readouts", MappingProxyType(readouts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerVectors) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    @property
    def width(self) -> int:
        """Numbers of each layer's vector."""
        return len(next(iter(self.layers.values())))

    def norms(self) -> dict[int, float]:
        """Return the Euclidean norm of each layer's vector, summed in float64."""
        return {
            layer: float(np.linalg.norm(vector_D.astype(np.float64)))
            for layer, vector_D in self.layers.items()
        }

    @cached_property
    def content(self) -> bytes:
        """The vectors as a safetensors file: one float32 tensor per layer.

        Its metadata has the readouts, if any. The file depends only on hook, numbers and readouts.
        A test pins its bytes, because the content address is their hash.
        """
        metadata = {READOUTS: render_readouts(self.readouts)} if self.readouts else None
        tensors = {name_tensor(layer, self.hook): v for layer, v in self.layers.items()}
        return save(tensors, metadata)

    @cached_property
    def sha256(self) -> str:
        """The content address: SHA-256 of `content`, in hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()


def invalid_vector(detail: str) -> APIError:
    """Return the error for unusable vectors; `detail` continues "The vector is invalid"."""
    return api_error("invalid_vector", f"The vector is invalid: {detail}")


def name_tensor(layer: int, hook: str) -> str:
    """Return TransformerLens' name of an activation, such as `blocks.3.hook_resid_post`."""
    return f"blocks.{layer}.{hook if '.' in hook else 'hook_' + hook}"


def parse_tensor_name(name: str) -> tuple[int, str] | None:
    """Return layer and hook of a name from `name_tensor`, or of a layer's number alone or after
    `layer.` and similar prefixes; None for any other name.
    """
    if found := _BY_NUMBER.fullmatch(name):
        return int(found[1]), RESID_POST
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    hook = found[2]
    if "." not in hook:
        if not hook.startswith("hook_"):
            return None
        hook = hook.removeprefix("hook_")
    # TransformerLens' bridge calls a block's output hook_out.
    return int(found[1]), RESID_POST if hook == "out" else hook


def render_readouts(readouts: Mapping[int, Readout]) -> str:
    """Return readouts as JSON for files; equal readouts give equal text."""
    return json.dumps({str(layer): asdict(one) for layer, one in readouts.items()}, sort_keys=True)


def parse_readouts(text: str) -> dict[int, Readout]:
    """Parse the JSON of `render_readouts`. Errors: APIError `invalid_vector`."""
    try:
        return {int(layer): Readout(**one) for layer, one in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise invalid_vector(
            f"its {READOUTS} does not map layers to readouts, such as "
            '{"3": {"kind": "logistic", "slope": 2.0, "bias": -1.5}}.'
        ) from error


def view_tensor(numbers: npt.NDArray[np.uint8], entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Return a tensor of a safetensors file as a view, given the bytes of all its numbers.

    bfloat16 becomes 16-bit integers. Errors: ValueError.
    """
    if (dtype := entry["dtype"]) not in FLOAT_TYPES:
        raise ValueError(f"it has type {dtype}; {', '.join(FLOAT_TYPES)} are read")
    first, end = entry["data_offsets"]
    return numbers[first:end].view(FLOAT_TYPES[dtype]).reshape(entry["shape"])


def widen(numbers: npt.NDArray[Any], dtype: str) -> Array:
    """Convert a result of `view_tensor` to floating point: bfloat16 to float32."""
    # bfloat16 is the upper half of a float32.
    return (numbers.astype("<u4") << 16).view("<f4") if dtype == "BF16" else numbers


def parse_safetensors(data: bytes) -> LayerVectors:
    """Return the vectors of a safetensors file. Errors: APIError `invalid_vector`."""
    try:
        deserialize(data)  # type: ignore[no-untyped-call]  # checks all sizes against the data
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        metadata = header.pop("__metadata__", None) or {}
        numbers = np.frombuffer(data, np.uint8)[start:]
        tensors = {
            name: widen(view_tensor(numbers, entry), entry["dtype"])
            for name, entry in header.items()
        }
    except (SafetensorError, ValueError) as error:
        raise invalid_vector(f"the safetensors file cannot be read: {str(error)[:400]}.") from error
    return place_tensors(tensors, metadata.get(READOUTS, "{}"))


def place_tensors(tensors: Mapping[str, Array], readouts: str) -> LayerVectors:
    """Return named tensors as vectors by layer; `readouts`: the JSON of `render_readouts`.

    Errors: APIError `invalid_vector`.
    """
    if len(tensors) > MAX_LAYERS:
        raise invalid_vector(f"it has {len(tensors)} tensors, at most {MAX_LAYERS} are allowed.")
    layers: dict[int, Array] = {}
    hooks = set()
    for name, tensor in tensors.items():
        place = parse_tensor_name(name)
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
    return LayerVectors(layers, hooks.pop() if hooks else RESID_POST, parse_readouts(readouts))


def read_layer(content: Path, layer: int, hook: str) -> Vector:
    """Read one layer of a file of `LayerVectors.content`, without the rest.

    Errors: ValueError for any other file.
    """
    try:
        with safe_open(content, "numpy") as file:
            vector_D: Vector = file.get_tensor(name_tensor(layer, hook))
    except SafetensorError as error:
        raise ValueError(f"no layer {layer} of {hook}: {error}") from error
    return vector_D


def _check_numbers(layer: int, numbers: npt.NDArray[np.floating]) -> Vector:
    """Return the numbers as read-only float32, with -0.0 as 0.0, so that equal vectors have equal
    bytes.
    """
    if numbers.ndim != 1:
        shape = list(numbers.shape)
        raise invalid_vector(f"layer {layer} has shape {shape}; give one number per dimension.")
    if not 0 < len(numbers) <= MAX_WIDTH:
        raise invalid_vector(f"layer {layer} has {len(numbers)} numbers, not 1 to {MAX_WIDTH}.")
    with np.errstate(over="ignore", invalid="ignore"):
        vector_D = numbers.astype("<f4") + np.float32(0.0)
    wrong = np.flatnonzero(~np.isfinite(vector_D))
    if len(wrong):
        detail = (
            f"layer {layer} has {len(wrong)} numbers that are NaN, infinite or beyond float32; the "
            f"first is number {wrong[0]}."
        )
        raise invalid_vector(detail)
    vector_D.flags.writeable = False
    return vector_D
