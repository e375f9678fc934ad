"""Resolve a request's probes for engines, and convert readings for the answer.

Axis letters: T tokens, G probes, R numbers of a reading, D width of an activation.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer.errors import api_error
from logsteer.schemas import ProbeRead, ProbeRequest
from logsteer.schemas.steering import ProbedVector, SteeringCondition
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.plan import Condition, Probe, Readings, Vector
from logsteer_server.interventions.references import (
    check_feature,
    fetch,
    place_vectors,
    refuse_vector,
)
from logsteer_server.stores.layer_vectors import RESID_POST, Readout
from logsteer_server.stores.vectors import StoredVectors, VectorStore

READ_BY = {"probability": "logistic", "activation": "relu"}
"""Kind of reading that needs a vector with a readout -> the readout's kind."""

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedProbe:
    """A direction at one layer, the kind of its reading, and its description in an answer."""

    probe: Probe
    read: ProbeRead
    readout: Readout | None
    name: str | None
    sha256: str
    context: bool = False

    def describe(self) -> dict[str, Any]:
        """Return the fields of `ProbeReadings` that describe the probe."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "layer": self.probe.layer,
            "hook": self.probe.hook,
            "read": self.read,
        }

    def convert(self, components_T: Numbers, norms_T: Numbers) -> Numbers:
        """Return the readings requested, from c = x . u and |x|; NaN without a reading."""
        with np.errstate(all="ignore"):
            if self.read == "projection":
                return components_T
            if self.read == "cosine":
                return components_T / norms_T
            assert self.readout is not None
            z_T = (self.readout.slope * components_T + self.readout.bias).astype(np.float32)
            if self.readout.kind == "logistic":
                return np.asarray(1 / (1 + np.exp(-z_T)))
            is_off_T = z_T <= self.readout.threshold
            return np.where(is_off_T, np.float32(0), z_T)


def resolve_probes(
    asked: Sequence[ProbeRequest] | None, source: VectorStore, info: EngineInfo
) -> tuple[ResolvedProbe, ...]:
    """Resolve a request's probes for a model, each of their layers in turn.

    Errors: APIError `unknown_vector`, `invalid_vector`, `unsupported_by_engine`.
    """
    if not asked:
        return ()
    check_feature("steering", info, "probes")
    found: list[ResolvedProbe] = []
    for request in asked:
        for probe in _resolve(request, source, info, "probes", request.context):
            found.append(probe)
            check_room(len(found), info, "probes")
    return tuple(found)


def check_room(count: int, info: EngineInfo, param: str) -> None:
    """Refuse more probes than a request may have. Errors: APIError `unsupported_by_engine`."""
    if info.max_probes is not None and count > info.max_probes:
        detail = (
            f"A request may have {info.max_probes} probes on this model, each layer of each "
            "counting, those of conditions included: use fewer, or raise steering_probes."
        )
        raise api_error("unsupported_by_engine", detail, param=param)


def _resolve(
    given: ProbedVector, source: VectorStore, info: EngineInfo, param: str, context: bool = False
) -> Iterator[ResolvedProbe]:
    stored = fetch(given, source)
    directions: dict[int, Vector] = {}
    for own, (layer, hook), vector_D in place_vectors(given, stored, info, param):
        if hook not in info.hooks:
            detail = f"Probes read {', '.join(info.hooks)} on this engine, not {hook}: read "
            detail += f"{RESID_POST} of layer {layer - 1}, the same stream, after it was steered."
            raise api_error("unsupported_by_engine", detail, param=param)
        if own not in directions:
            directions[own] = _normalize(vector_D, stored, own, param)
        readout = None
        if given.read in READ_BY:
            readout = _find_readout(given.read, stored, own, param)
            if (layer, hook) != (own, stored.vectors.hook):
                detail = f"is read as {given.read} where it was made for, at layer {own}, "
                detail += f"{stored.vectors.hook}; elsewhere read its projection or cosine"
                raise refuse_vector(stored, detail, param)
        probe = Probe(layer, hook, directions[own])
        yield ResolvedProbe(probe, given.read, readout, stored.name, stored.sha256, context)


def _normalize(vector_D: Vector, stored: StoredVectors, layer: int, param: str) -> Vector:
    norm = float(np.linalg.norm(vector_D.astype(np.float64)))
    if not norm:
        detail = f"is 0 at layer {layer}, so there is nothing to read along it"
        raise refuse_vector(stored, detail, param)
    return (vector_D.astype(np.float64) / norm).astype(np.float32)


def _find_readout(read: ProbeRead, stored: StoredVectors, layer: int, param: str) -> Readout:
    readout, kind = stored.vectors.readouts.get(layer), READ_BY[read]
    if readout is not None and readout.kind == kind:
        return readout
    known = f"a {readout.kind} readout" if readout else "no readout"
    makers = {
        "logistic": "vectors that POST /vectors/train makes by method logistic have one",
        "relu": "features of an autoencoder stored by PUT /saes/NAME have one",
    }
    detail = (
        f"has {known} at layer {layer}, and read: {read} takes a {kind} one; {makers[kind]}. Read "
        "its projection or cosine"
    )
    raise refuse_vector(stored, detail, param)


def resolve_condition(
    given: SteeringCondition, number: int, source: VectorStore, info: EngineInfo
) -> tuple[Probe, Condition]:
    """Return a condition and its probe, which will have index `number` in the plan.

    Errors: as `resolve_probes`; `invalid_request` for a probe at several layers, and for a
    threshold that no reading can exceed.
    """
    found = list(_resolve(given.probe, source, info, "steering.vectors"))
    if len(found) != 1:
        layers = [resolved.probe.layer for resolved in found]
        detail = f"The probe of a condition is read at one layer, not at {layers}: name one."
        raise api_error("invalid_request", detail, param="steering.vectors")
    (resolved,) = found
    above, below = _find_bounds(given, resolved)
    relative = resolved.read == "cosine"
    return resolved.probe, Condition(number, above, below, relative, given.of)


def _find_bounds(given: SteeringCondition, resolved: ResolvedProbe) -> tuple[float, float]:
    """Convert a condition's thresholds to bounds of c, or of c / |x|."""
    above = -math.inf if given.above is None else given.above
    below = math.inf if given.below is None else given.below
    readout = resolved.readout
    if resolved.read == "cosine" and (above >= 1 or below <= -1 or (above < -1 and below > 1)):
        raise _out_of_reach("a cosine lies between -1 and 1")
    if readout is None:
        return above, below
    if resolved.read == "probability":
        if above >= 1 or below <= 0 or (above <= 0 and below >= 1):
            raise _out_of_reach("a probability lies between 0 and 1")
        above, below = _logit(above), _logit(below)
    else:
        if below <= 0 or (above < 0 and given.below is None):
            raise _out_of_reach("an activation is 0 or more")
        # Below the readout's threshold, the activation is 0.
        above = max(above, readout.threshold) if above >= 0 else -math.inf
        below = max(below, readout.threshold)
    if not readout.slope:
        raise _out_of_reach("the vector's readout has slope 0, so it reads the same everywhere")
    bounds = ((above - readout.bias) / readout.slope, (below - readout.bias) / readout.slope)
    return min(bounds), max(bounds)


def _logit(probability: float) -> float:
    if probability <= 0:
        return -math.inf
    return math.inf if probability >= 1 else math.log(probability / (1 - probability))


def _out_of_reach(reason: str) -> Exception:
    detail = f"No token can pass, or all do: {reason}."
    return api_error("invalid_request", detail, param="steering.vectors")


def show_readings(
    probes: Sequence[ResolvedProbe], readings: Readings | None, first: int, is_steered: bool
) -> dict[str, Any]:
    """Return readings as the field `probes` of an answer; nothing without probes.

    `first`: the position of the first token shown; the context's tokens precede it. A NaN reading
    is flagged.
    """
    if not probes:
        return {}
    values_TGR = np.zeros((0, len(probes), 4), np.float32)
    split = 0
    if readings is not None:
        values_TGR, split = readings.values_TGR, max(0, first - readings.first)
    shown = []
    for g, probe in enumerate(probes):
        entry = probe.describe()
        for name, part in (("", slice(split, None)), ("context_", slice(split))):
            if name and not probe.context:
                continue
            own_TR = values_TGR[part, g]
            entry[f"{name}before"] = probe.convert(own_TR[:, 0], own_TR[:, 1])
            if is_steered:
                entry[f"{name}after"] = probe.convert(own_TR[:, 2], own_TR[:, 3])
        read = [value for value in entry.values() if isinstance(value, np.ndarray)]
        finite = all(np.isfinite(values_T).all() for values_T in read)
        shown.append(entry | {"flags": [] if finite else ["non_finite"]})
    return {"probes": shown}
