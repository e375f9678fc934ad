"""References of a request: vectors and their places, an override, an adapter.

A vector is referred to with its name, its SHA-256 or its numbers.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from logsteer.errors import APIError, api_error
from logsteer.schemas import AdapterCard, OverrideCard, ParameterOverride, VectorCard
from logsteer.schemas.steering import RECOMMENDED, ProbedVector, VectorReference
from logsteer_server.contract.engine import HOOKS, EngineInfo
from logsteer_server.contract.jobs import Feature
from logsteer_server.contract.plan import Adapter, Direction, Override, Vector
from logsteer_server.stores.layer_vectors import RESID_POST, LayerVectors, invalid_vector
from logsteer_server.stores.store import Namespace
from logsteer_server.stores.vectors import StoredVectors, VectorStore


def check_feature(feature: Feature, info: EngineInfo, param: str | None) -> None:
    """Check that the model's engine has a feature.

    Errors: APIError `unsupported_by_engine`, with what to do instead.
    """
    if detail := info.lacks.get(feature):
        raise api_error("unsupported_by_engine", f"{detail[0].upper()}{detail[1:]}.", param=param)


@dataclass(frozen=True, slots=True)
class ResolvedOverride:
    """An override, and its fields of `UsedOverride` in the answer."""

    override: Override
    used: dict[str, Any]


def resolve_override(
    given: ParameterOverride | None, store: Namespace[OverrideCard], info: EngineInfo
) -> ResolvedOverride | None:
    """Resolve a request's override for a model; None for a request without one.

    Errors: APIError `unknown_override`, `unsupported_by_engine`.
    """
    if given is None:
        return None
    check_feature("override", info, "override")
    return _resolve(given, store)


def resolve_direction(name: str | None, store: Namespace[OverrideCard]) -> ResolvedOverride | None:
    """Return the direction of a name, at eta 0; None for None. Errors: `unknown_override`."""
    return None if name is None else _resolve(ParameterOverride(name=name, eta=0.0), store)


def _resolve(given: ParameterOverride, store: Namespace[OverrideCard]) -> ResolvedOverride:
    _, found = store.look_up(given.name)
    used = {"sha256": found.sha256, **given.model_dump()}
    direction = Direction(found.source, found.sha256)
    return ResolvedOverride(Override(direction, given.eta, given.cast), used)


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """An adapter, and its fields of `UsedAdapter` in the answer."""

    adapter: Adapter
    used: dict[str, Any]


def resolve_adapter(
    name: str | None, store: Namespace[AdapterCard], info: EngineInfo
) -> ResolvedAdapter | None:
    """Resolve a request's adapter for a model; None for a request without one.

    Errors: APIError `unknown_adapter`, `unsupported_by_engine`.
    """
    if name is None:
        return None
    check_feature("adapter", info, "adapter")
    _, found = store.look_up(name)
    used = {"name": name, "sha256": found.sha256}
    return ResolvedAdapter(Adapter(found.source, found.sha256), used)


def fetch(given: VectorReference, source: VectorStore) -> StoredVectors:
    """Return the vectors that a request refers to.

    For a feature of an autoencoder these are its decoder row, or for a probe its encoder column.
    Errors: APIError `unknown_vector`, `invalid_vector`, `unknown_sae`, `invalid_sae`.
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
    """Yield, for each of the model's layers at which a request uses a vector: the vector's own
    layer, the model's layer and hook, and the numbers.

    Errors: APIError `invalid_vector`, `unsupported_by_engine`; `param` names the field.
    """
    hook = given.hook or stored.vectors.hook
    for layer, own in _choose_layers(given, stored, info, param).items():
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


def _choose_layers(
    given: VectorReference, stored: StoredVectors, info: EngineInfo, param: str
) -> dict[int, int]:
    """Return requested layer of the model -> layer of the vector."""
    own = list(stored.vectors.layers)
    if given.from_layer is not None:
        if given.from_layer not in own:
            detail = f"has layers {own}, not from_layer {given.from_layer}; name one of its own"
            raise refuse_vector(stored, detail, param)
        layers = given.layers if isinstance(given.layers, list) else range(info.num_layers)
        return dict.fromkeys(layers, given.from_layer)
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


def find_fitting(cards: Iterable[VectorCard], info: EngineInfo) -> list[VectorCard]:
    """Return the cards of vectors that fit a model; `other_weights`: trained on another model."""
    found = []
    for card in cards:
        width = info.hook_widths.get(card.hook, info.hidden_size)
        has_layers = len(card.layers) == 1 or card.layers[-1] < info.num_layers
        has_hook = card.hook in info.hooks or _has_other_name(card.hook, card.layers[0], info)
        if card.width == width and has_layers and has_hook:
            is_other = card.about.weights_digest not in (None, info.weights_digest)
            found.append(card.model_copy(update={"other_weights": is_other}))
    return found


def _has_other_name(hook: str, layer: int, info: EngineInfo) -> bool:
    """Return whether an engine has an activation as resid_post of the previous layer."""
    return hook == "resid_pre" and layer > 0 and RESID_POST in info.hooks


def refuse_vector(stored: StoredVectors, detail: str, param: str) -> APIError:
    """Return the error for an unusable vector; `detail` continues its name."""
    name = repr(stored.name) if stored.name else f"with SHA-256 {stored.sha256[:12]}"
    return api_error("invalid_vector", f"The vector {name} {detail}.", param=param)
