"""A steering object as the plan that engines carry out."""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import Steering, SteeringVector
from logsteer.schemas.steering import PositionName, SlicePositions
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.plan import Positions, ResidualOp, Site, SteeringPlan, Vector
from logsteer_server.interventions.parameters import check_feature
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


@dataclass(frozen=True, slots=True)
class ResolvedSteering:
    """A plan, and the vectors that it is made of as a receipt's `vectors`."""

    plan: SteeringPlan
    vectors: list[dict[str, Any]]


def resolve_steering(
    steering: Steering, source: VectorSource, info: EngineInfo
) -> ResolvedSteering:
    """Resolve what a steering object means for a model.

    Errors: APIError `unknown_vector`, `invalid_vector`, `unsupported_by_engine`.
    """
    check_feature("steering", info, "steering")
    sites: dict[tuple[int, str], _SiteDraft] = {}
    used = []
    for use in steering.vectors:
        stored = _fetch(use, source)
        used.append({"name": stored.name, "sha256": stored.sha256, "scale": use.scale})
        hook = use.hook or stored.vectors.hook
        for layer, vector_D in _choose_layers(use, stored.vectors).items():
            place = _check_place(layer, hook, vector_D, info)
            sites.setdefault(place, _SiteDraft()).take(use, vector_D, layer)
    finished = [draft.finish(*place) for place, draft in sorted(sites.items())]
    return ResolvedSteering(
        SteeringPlan(tuple(finished), place_positions(steering.positions)), used
    )


def place_positions(given: PositionName | SlicePositions) -> Positions:
    """Return the positions that a request names."""
    if isinstance(given, str):
        return Positions(given)
    return Positions("slices", tuple(given.slices))


def _fetch(use: SteeringVector, source: VectorSource) -> StoredVectors:
    if use.name is not None:
        return source.find(use.name)
    if use.sha256 is not None:
        return source.find_content(use.sha256)
    numbers = {int(layer): _read_numbers(given) for layer, given in (use.data or {}).items()}
    vectors = LayerVectors(numbers, use.hook or RESID_POST)
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


def _choose_layers(use: SteeringVector, vectors: LayerVectors) -> dict[int, Vector]:
    own = dict(vectors.layers)
    if use.layers is None:
        return own
    if len(own) == 1:
        (vector_D,) = own.values()
        return dict.fromkeys(use.layers, vector_D)
    missing = sorted(set(use.layers) - own.keys())
    if missing:
        raise invalid_vector(f"it has layers {sorted(own)}, not {missing}; name some of its own.")
    return {layer: own[layer] for layer in use.layers}


def _check_place(layer: int, hook: str, vector_D: Vector, info: EngineInfo) -> tuple[int, str]:
    """Return the layer and hook that are steered. Errors: APIError where the model lacks them."""
    if layer >= info.num_layers:
        raise invalid_vector(
            f"it has layer {layer}, the model's layers are 0 to {info.num_layers - 1}."
        )
    if hook == "resid_pre" and hook not in info.hooks and layer > 0:
        layer, hook = layer - 1, RESID_POST  # the same stream, by the name that the engine has
    if hook not in info.hooks:
        detail = f"This engine steers {', '.join(info.hooks)}, not {hook}"
        hint = "; transformer_lens has more." if len(info.hooks) == 1 else "."
        raise api_error("unsupported_by_engine", detail + hint, param="steering.vectors")
    if hook.startswith("resid_") and len(vector_D) != info.hidden_size:
        raise invalid_vector(
            f"it has {len(vector_D)} numbers a layer, the model's activations {info.hidden_size}."
        )
    return layer, hook


class _SiteDraft:
    """What the vectors of a steering object do at one place, in their order."""

    def __init__(self) -> None:
        self._offset: np.ndarray | None = None
        self._ops: list[ResidualOp] = []

    def take(self, use: SteeringVector, vector_D: Vector, layer: int) -> None:
        """Put one vector behind the others. Plain additions in front cost nothing each."""
        norm = float(np.linalg.norm(vector_D.astype(np.float64)))
        needs_direction = use.op not in ("add", "replace") or use.unit != "raw"
        if not norm and needs_direction:
            raise invalid_vector(f"it is 0 at layer {layer}, so it has no direction there.")
        if use.op == "add" and use.unit != "residual_norm" and not self._ops:
            factor = use.scale / norm if use.unit == "unit" else use.scale
            with np.errstate(over="ignore", invalid="ignore"):  # `finish` refuses what that gives
                added_D = factor * vector_D.astype(np.float64)
                self._offset = added_D if self._offset is None else self._offset + added_D
            return
        if use.op == "rotate" and abs(use.scale) > 180:
            raise invalid_vector(f"it turns by {use.scale} degrees, at most 180 are possible.")
        direction = vector_D / np.float32(norm) if norm else vector_D
        self._ops.append(ResidualOp(direction, **_describe_op(use, norm)))

    def finish(self, layer: int, hook: str) -> Site:
        """Make the site. Errors: APIError where the sum of its vectors is beyond float32."""
        offset = None
        if self._offset is not None:
            with np.errstate(over="ignore"):
                offset = self._offset.astype(np.float32)
            if not np.isfinite(offset).all():
                raise invalid_vector(f"at layer {layer} the scaled sum is beyond float32.")
        return Site(layer, hook, offset, tuple(self._ops))


def _describe_op(use: SteeringVector, norm: float) -> dict[str, float]:
    """Return the fields of `ResidualOp` for an operation with a vector of this norm."""
    scale = use.scale
    amount = {
        "raw": {"base": scale * norm},
        "unit": {"base": scale},
        "residual_norm": {"per_norm": scale},
    }[use.unit]
    match use.op:
        case "add":
            return {**amount, "per_component": 1.0}
        case "replace":
            return {**amount, "keep": 0.0}
        case "project":
            return {"per_norm": scale} if use.unit == "residual_norm" else {"base": scale}
        case "ablate":
            return {"per_component": 1.0 - scale}
        case "rotate":
            return {"per_component": 1.0, "degrees": scale}
        case "clamp":
            assert use.params is not None
            low, high = use.params.min, use.params.max
            return {
                "per_component": 1.0,
                "low": -np.inf if low is None else low,
                "high": np.inf if high is None else high,
            }
