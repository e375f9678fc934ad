"""Resolve a steering object to a plan for engines.

Vectors may have different positions, which overlap. The plan has a part for each combination of
positions, so that a token belongs to at most one part:

    "happy" at all, "loud" at completion        prompt    completion
    parts       {all}                           ▇▇▇▇▇▇
                {all, completion}                         ▇▇▇▇▇▇▇▇▇▇
                {completion}                    no token has only this one
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from logsteer.errors import api_error
from logsteer.schemas import Steering, SteeringVector
from logsteer.schemas.steering import FLOAT32_MAX, PositionName, PositionRule, SlicePositions
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.plan import (
    MAX_CONDITIONS,
    Condition,
    Positions,
    Probe,
    ResidualOp,
    Site,
    SteeringPlan,
    Vector,
)
from logsteer_server.interventions.probes import resolve_condition
from logsteer_server.interventions.references import (
    check_feature,
    fetch,
    place_vectors,
)
from logsteer_server.stores.layer_vectors import RESID_POST, invalid_vector
from logsteer_server.stores.vectors import VectorStore

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens."""

Slices = tuple[tuple[int, int], ...]

MAX_POSITIONS = 4
"""Most different positions of a request's vectors, which have at most 15 combinations."""
MAX_PARTS = 2 ** (MAX_POSITIONS - 1)
"""Combinations that contain a given vector's positions."""


@dataclass(frozen=True, slots=True)
class FindIds:
    """Find the tokens with these ids in a prompt."""

    ids: tuple[int, ...]

    def __call__(self, prompt: npt.NDArray[np.int32]) -> Slices:
        """Return the positions of the tokens, as slices."""
        return tuple((n, n + 1) for n in np.flatnonzero(np.isin(prompt, self.ids)).tolist())


@dataclass(frozen=True, slots=True)
class FindAfter:
    """Find the tokens of a prompt after the first occurrence of a text."""

    text: str
    decode: Decode = field(compare=False)

    def __call__(self, prompt: npt.NDArray[np.int32]) -> Slices:
        """Return the rest of the prompt, as a slice; none without an occurrence."""
        ids = prompt.tolist()
        if self.text not in self.decode(ids):
            return ()
        without, having = 0, len(ids)
        while having - without > 1:
            middle = (without + having) // 2
            if self.text in self.decode(ids[:middle]):
                having = middle
            else:
                without = middle
        return ((having, len(ids)),) if having < len(ids) else ()


def place_positions(
    given: PositionName | SlicePositions | PositionRule, decode: Decode | None = None
) -> Positions:
    """Return the positions that a request names; those after a text need `decode`."""
    if isinstance(given, str):
        return Positions(given)
    if given.slices is not None:
        return Positions("slices", tuple(given.slices))
    assert isinstance(given, PositionRule)
    if given.last is not None:
        return Positions("last", number=given.last)
    if given.every is not None:
        return Positions("every", number=given.every)
    if given.completion is not None:
        return Positions("window", (given.completion,))
    if given.token_ids is not None:
        return Positions("slices", find=FindIds(tuple(given.token_ids)))
    assert given.after is not None
    if decode is None:
        raise ValueError("positions: after takes a tokenizer; give slices")
    return Positions("slices", find=FindAfter(given.after, decode))


def place_parts(
    steering: Steering, decode: Decode | None
) -> tuple[list[Positions], list[tuple[int, ...]]]:
    """Return the positions of a plan's parts, and for each vector the indices of its parts.

    Errors: APIError for too many positions.
    """
    given = [use.positions or steering.positions for use in steering.vectors]
    placed = [place_positions(one, decode) for one in given]
    distinct = list(dict.fromkeys(placed))
    if len(distinct) > MAX_POSITIONS:
        detail = (
            f"The vectors have {len(distinct)} different positions, at most {MAX_POSITIONS} are "
            "allowed, because every combination of them takes a slot: use fewer."
        )
        raise api_error("invalid_request", detail, param="steering.vectors")
    numbers = range(len(distinct))
    subsets = [
        subset for size in range(1, len(distinct) + 1) for subset in combinations(numbers, size)
    ]
    parts_of = [
        tuple(n for n, subset in enumerate(subsets) if distinct.index(positions) in subset)
        for positions in placed
    ]
    return [_join(distinct, subset) for subset in subsets], parts_of


def _join(distinct: Sequence[Positions], active: tuple[int, ...]) -> Positions:
    """Return the positions in all active ones and in none of the others."""
    first, *within = (distinct[number] for number in active)
    without = tuple(one for number, one in enumerate(distinct) if number not in active)
    return replace(first, within=tuple(within), without=without)


PARAM = "steering.vectors"
"""The field named in errors."""

DTYPE_MAX = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
"""The largest number of each dtype with a smaller range than float32."""

SMALLEST = {"float16": 6e-8}
"""The smallest positive number of a dtype; TINY for others."""
TINY = 1e-30
"""Smaller numbers do not change any activation, and their ratio to one may round to 0."""

MAX_NORM = FLOAT32_MAX**0.5
"""The largest norm and factor, because engines and models square activations in float32."""


@dataclass(frozen=True, slots=True)
class UsedSteering:
    """A vector for the receipt, with the index of its condition, if any.

    `parts`: the indices of the plan's parts in which it acts.
    """

    name: str | None
    sha256: str
    scale: float
    condition: int | None
    parts: tuple[int, ...] = (0,)
    other_weights: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedSteering:
    """A plan, and the vectors that it uses."""

    plan: SteeringPlan
    vectors: list[UsedSteering]


def resolve_steering(
    steering: Steering, source: VectorStore, info: EngineInfo, decode: Decode | None = None
) -> ResolvedSteering:
    """Resolve a steering object for a model; positions after a text need `decode`.

    Errors: APIError `unknown_vector`, `invalid_vector`, `unsupported_by_engine`; `invalid_request`
    for a condition that cannot hold.
    """
    check_feature("steering", info, "steering")
    placed, parts_of = place_parts(steering, decode)
    drafts: list[dict[tuple[int, str], _SiteDraft]] = [{} for _ in placed]
    used: list[UsedSteering] = []
    probes: list[Probe] = []
    conditions: list[Condition] = []
    for use, own in zip(steering.vectors, parts_of, strict=True):
        stored = fetch(use, source)
        number = None
        if use.when is not None:
            number = len(conditions)
            if number == MAX_CONDITIONS:
                detail = f"A request has at most {MAX_CONDITIONS} conditions; leave some out."
                raise api_error("invalid_request", detail, param=PARAM)
            probe, condition = resolve_condition(use.when, number, source, info)
            probes.append(probe)
            conditions.append(condition)
        advice = stored.recommendation
        scale = use.choose_scale(advice.scale if advice else None)
        is_other = stored.weights_digest not in (None, info.weights_digest)
        used.append(UsedSteering(stored.name, stored.sha256, scale, number, own, is_other))
        for _, (layer, hook), vector_D in place_vectors(use, stored, info, PARAM):
            if number is not None:
                _check_order(probes[number], layer, hook)
            place = (layer, hook)
            if hook not in info.hooks:  # the same stream, by the name that the engine has
                place = (layer - 1, RESID_POST)
            for part in own:
                draft = drafts[part].setdefault(place, _SiteDraft())
                draft.append(use, scale, vector_D, layer, number)
    parts = [
        SteeringPlan(
            tuple(draft.finish(*place, info.dtype) for place, draft in sorted(sites.items())),
            positions,
            tuple(probes),
            tuple(conditions),
        )
        for sites, positions in zip(drafts, placed, strict=True)
    ]
    return ResolvedSteering(replace(parts[0], more=tuple(parts[1:])), used)


def _check_order(probe: Probe, layer: int, hook: str) -> None:
    """Check that a condition's activation comes before the steered layer.

    The engine checks the order of activations in one layer.
    """
    reads_after = probe.hook == RESID_POST and hook == "resid_pre" and probe.layer == layer
    if probe.layer > layer or reads_after:
        detail = (
            f"A vector at layer {layer}, {hook}, cannot wait for a condition that is read at layer "
            f"{probe.layer}, {probe.hook}, after it: read it there or before."
        )
        raise api_error("invalid_request", detail, param=PARAM)


class _SiteDraft:
    """The operations of a steering object's vectors at one site, in order."""

    def __init__(self) -> None:
        self._offset: np.ndarray | None = None
        self._ops: list[ResidualOp] = []

    def append(
        self,
        use: SteeringVector,
        scale: float,
        vector_D: Vector,
        layer: int,
        condition: int | None,
    ) -> None:
        """Append one vector; merge unconditional additions at the beginning into one offset."""
        norm = float(np.linalg.norm(vector_D.astype(np.float64)))
        is_plain = use.op in ("add", "replace") and use.unit == "raw" and condition is None
        if not norm and not is_plain:
            raise invalid_vector(f"it is 0 at layer {layer}, so it has no direction there.")
        joins = use.op == "add" and use.unit != "residual_norm" and condition is None
        if joins and not self._ops:
            factor = scale / norm if use.unit == "unit" else scale
            added_D = factor * vector_D.astype(np.float64)  # float64: no request can overflow it
            self._offset = added_D if self._offset is None else self._offset + added_D
            return
        if use.op == "rotate" and abs(scale) > 180:
            raise invalid_vector(f"it turns by {scale} degrees, at most 180 are allowed.")
        direction = (vector_D.astype(np.float64) / norm).astype(np.float32) if norm else vector_D
        op = ResidualOp(direction, **_describe_op(use, scale, norm), condition=condition)
        sets = (op.base, op.per_norm, op.per_component, op.low, -op.high)
        if max(map(abs, sets[:3])) > MAX_NORM or max(sets[3:]) > MAX_NORM:
            raise invalid_vector(
                f"at layer {layer} {use.op} would set a component beyond {MAX_NORM:.2g}, which "
                "float32 cannot square; use a smaller scale or narrower bounds."
            )
        self._ops.append(op)

    def finish(self, layer: int, hook: str, dtype: str) -> Site:
        """Build the site. Errors: APIError if the model cannot hold the sum of its vectors."""
        if self._offset is None:
            return Site(layer, hook, None, tuple(self._ops))
        largest, norm = np.abs(self._offset).max(), np.linalg.norm(self._offset)
        if largest > DTYPE_MAX.get(dtype, FLOAT32_MAX) or norm > MAX_NORM:
            raise invalid_vector(
                f"at layer {layer} the scaled sum has norm {norm:.2g} and a number of "
                f"{largest:.2g}, beyond what a model in {dtype} computes with; use a smaller scale."
            )
        if 0 < largest < SMALLEST.get(dtype, TINY):
            raise invalid_vector(
                f"at layer {layer} the largest number of the scaled sum is {largest:.2g}, which "
                f"changes nothing in {dtype}; use a larger scale, or 0."
            )
        return Site(layer, hook, self._offset.astype(np.float32), tuple(self._ops))


def _describe_op(use: SteeringVector, scale: float, norm: float) -> dict[str, float]:
    """Return the fields of `ResidualOp` for an operation with a vector of this norm."""
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
