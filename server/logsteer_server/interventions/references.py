"""Vectors as a request names them: by name, by SHA-256 or by their numbers; and where they go."""

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas.steering import VectorReference
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.plan import Vector
from logsteer_server.stores.layer_vectors import RESID_POST, LayerVectors, invalid_vector
from logsteer_server.stores.vectors import StoredVectors


class VectorSource(Protocol):
    """What finds vectors: a `VectorStore`. Errors: APIError `unknown_vector`."""

    def find(self, name: str) -> StoredVectors:
        """Return the vectors of a name."""
        ...

    def find_content(self, sha256: str) -> StoredVectors:
        """Return the vectors with a SHA-256."""
        ...


def fetch(given: VectorReference, source: VectorSource) -> StoredVectors:
    """Return the vectors that a request refers to.

    Errors: APIError `unknown_vector`, `invalid_vector`.
    """
    if given.name is not None:
        return source.find(given.name)
    if given.sha256 is not None:
        return source.find_content(given.sha256)
    numbers = {int(layer): _read_numbers(entry) for layer, entry in (given.data or {}).items()}
    vectors = LayerVectors(numbers, given.hook or RESID_POST)
    return StoredVectors(None, vectors.sha256, vectors)


def _read_numbers(given: Sequence[float] | str) -> Vector:
    if not isinstance(given, str):
        with np.errstate(over="ignore"):  # `LayerVectors` refuses what is beyond float32
            return np.array(given, dtype=np.float32)
    try:
        return np.frombuffer(base64.b64decode(given, validate=True), dtype="<f4").copy()
    except (binascii.Error, ValueError) as error:
        raise invalid_vector(
            "data is a string, but no base64 of little-endian float32 numbers."
        ) from error


def place_vectors(
    given: VectorReference, vectors: LayerVectors, info: EngineInfo, param: str
) -> Iterator[tuple[int, tuple[int, str], Vector]]:
    """Yield, for each layer that a request uses a vector at: the vector's own layer, which is the
    only one it has where it is used at others; the model's layer and hook; the numbers.

    Errors: APIError `invalid_vector`, `unsupported_by_engine`; `param` names the field.
    """
    hook = given.hook or vectors.hook
    for layer, own in _choose_layers(given, vectors).items():
        vector_D = vectors.layers[own]
        yield own, _check_place(layer, hook, vector_D, info, param), vector_D


def _choose_layers(given: VectorReference, vectors: LayerVectors) -> dict[int, int]:
    """Return, for each layer of the model that is asked for, the vector's own."""
    own = list(vectors.layers)
    if given.layers is None:
        return {layer: layer for layer in own}
    if len(own) == 1:
        return dict.fromkeys(given.layers, own[0])
    missing = sorted(set(given.layers) - set(own))
    if missing:
        raise invalid_vector(f"it has layers {sorted(own)}, not {missing}; name some of its own.")
    return {layer: layer for layer in given.layers}


def _check_place(
    layer: int, hook: str, vector_D: Vector, info: EngineInfo, param: str
) -> tuple[int, str]:
    """Return the layer and hook that are meant. Errors: APIError where the model lacks them."""
    if layer >= info.num_layers:
        raise invalid_vector(
            f"it has layer {layer}, the model's layers are 0 to {info.num_layers - 1}."
        )
    if hook == "resid_pre" and hook not in info.hooks and layer > 0:
        layer, hook = layer - 1, RESID_POST  # the same stream, by the name that the engine has
    if hook not in info.hooks:
        detail = f"This engine reads and steers {', '.join(info.hooks)}, not {hook}"
        hint = "; transformer_lens has more." if len(info.hooks) == 1 else "."
        raise api_error("unsupported_by_engine", detail + hint, param=param)
    if hook.startswith("resid_") and len(vector_D) != info.hidden_size:
        raise invalid_vector(
            f"it has {len(vector_D)} numbers a layer, the model's activations {info.hidden_size}."
        )
    return layer, hook
