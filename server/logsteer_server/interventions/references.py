"""Vectors as a request names them: by name, by SHA-256 or by their numbers; and where they go."""

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from logsteer.errors import APIError, api_error
from logsteer.schemas.steering import RECOMMENDED, ProbedVector, VectorReference
from logsteer_server.contract.engine import HOOKS, EngineInfo
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

    def find_feature(self, name: str, feature: int | str, *, reads: bool) -> StoredVectors:
        """Return what a feature of an autoencoder writes, or what it reads."""
        ...


def fetch(given: VectorReference, source: VectorSource) -> StoredVectors:
    """Return the vectors that a request refers to.

    A feature of an autoencoder is what it writes, and for a probe what it reads. Errors: APIError
    `unknown_vector`, `invalid_vector`, `unknown_sae`, `invalid_sae`.
    """
    if given.sae is not None and given.feature is not None:
        return source.find_feature(given.sae, given.feature, reads=isinstance(given, ProbedVector))
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
    given: VectorReference, stored: StoredVectors, info: EngineInfo, param: str
) -> Iterator[tuple[int, tuple[int, str], Vector]]:
    """Yield, for each layer that a request uses a vector at: the vector's own layer, which is the
    only one it has where it is used at others; the model's layer and hook; the numbers.

    Errors: APIError `invalid_vector`, `unsupported_by_engine`; `param` names the field.
    """
    hook = given.hook or stored.vectors.hook
    for layer, own in _choose_layers(given, stored, param).items():
        vector_D = stored.vectors.layers[own]
        if layer >= info.num_layers:
            detail = f"is used at layer {layer}, the model's are 0 to {info.num_layers - 1}"
            raise refuse_vector(stored, detail, param)
        if hook not in info.hooks and not _has_other_name(hook, layer, info):
            detail = info.explain_hook(hook)
            detail = f"{detail[0].upper()}{detail[1:]}."
            raise api_error("unsupported_by_engine", detail, param=param)
        if hook in HOOKS and len(vector_D) != info.hidden_size:
            detail = f"has {len(vector_D)} numbers a layer, the model's activations "
            raise refuse_vector(stored, f"{detail}{info.hidden_size}", param)
        yield own, (layer, hook), vector_D


def _choose_layers(given: VectorReference, stored: StoredVectors, param: str) -> dict[int, int]:
    """Return, for each layer of the model that is asked for, the vector's own."""
    own = list(stored.vectors.layers)
    if given.layers == RECOMMENDED and stored.recommendation is not None:
        own = [stored.recommendation.layer]
    if given.layers is None or given.layers == RECOMMENDED:
        return {layer: layer for layer in own}
    if len(own) == 1:
        return dict.fromkeys(given.layers, own[0])
    if missing := sorted(set(given.layers) - set(own)):
        detail = f"has layers {sorted(own)}, not {missing}; name some of its own"
        raise refuse_vector(stored, detail, param)
    return {layer: layer for layer in given.layers}


def _has_other_name(hook: str, layer: int, info: EngineInfo) -> bool:
    """Return whether an engine has an activation by its name in the layer in front."""
    return hook == "resid_pre" and layer > 0 and RESID_POST in info.hooks


def refuse_vector(stored: StoredVectors, detail: str, param: str) -> APIError:
    """Return the error for an unusable vector; `detail` goes on after its name."""
    name = repr(stored.name) if stored.name else f"with SHA-256 {stored.sha256[:12]}"
    return api_error("invalid_vector", f"The vector {name} {detail}.", param=param)
