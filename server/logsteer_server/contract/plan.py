"""The changes of a model for one job: of activations (steering plans), of parameters.

A steering plan contains no names, files or units, which `logsteer_server.interventions` has
resolved. The arithmetic is in `logsteer_server.numerics.residual_ops`.

Axis letters: T tokens, D width of an activation, G probes.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite
from typing import Literal

import numpy as np
import numpy.typing as npt

Cast = Literal["float32"]
"""The precision in which a job may compute a model of half precision."""


@dataclass(frozen=True, slots=True)
class Direction:
    """A direction v in the space of parameters: the safetensors file with this SHA-256."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Override:
    """For one job, the model's parameters are theta + eta v.

    With `cast` the job computes the whole model in that precision, so that changes too small for
    the model's own dtype take effect.
    """

    direction: Direction
    eta: float
    cast: Cast | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """An identifier of its effect, whatever its file's path: equal ones give equal results."""
        return (self.direction.sha256, self.eta, *((self.cast,) if self.cast else ()))


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: the safetensors file with this SHA-256.

    Its metadata contains PEFT's adapter_config.json under CONFIG_KEY.
    """

    path: str
    sha256: str


CONFIG_KEY = "adapter_config"


@dataclass(frozen=True, slots=True)
class ParameterDelta:
    """A change of the model's parameters: an adapter's product first, then an override."""

    override: Override | None = None
    adapter: Adapter | None = None

    def __bool__(self) -> bool:
        return self.override is not None or self.adapter is not None

    @property
    def files(self) -> tuple[Adapter | Direction, ...]:
        """The stored files that it consists of."""
        adapter = () if self.adapter is None else (self.adapter,)
        return adapter if self.override is None else (*adapter, self.override.direction)

    @property
    def cast(self) -> Cast | None:
        """The precision that the model is computed in; None for its own dtype."""
        return self.override.cast if self.override else None


Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Positions:
    """Which input tokens of a sequence are steered, with P the length of its prompt.

    `kind`: all, prompt (< P), completion (>= P), predicting (>= P - 1), last_prompt (= P - 1);
    last (the `number` tokens before P), every (P, P + number, P + 2 number, ...); slices: tokens in
    any of `slices`, each [start, end); window: one slice, counted from P. Of these, only tokens
    that are in all of `within` and in none of `without`. For positions that depend on the prompt's
    tokens, `find` returns the slices; `resolve` calls it.
    """

    kind: str = "all"
    slices: tuple[tuple[int, int], ...] = ()
    number: int = 1
    within: tuple["Positions", ...] = ()
    without: tuple["Positions", ...] = ()
    find: Callable[[npt.NDArray[np.int32]], tuple[tuple[int, int], ...]] | None = None

    def bounds(self, prompt_len: int) -> tuple[int, int | None]:
        """Return a range [first, end) with all steered tokens; end None: the sequence's end."""
        if self.kind == "slices":
            starts, ends = [s for s, _ in self.slices], [e for _, e in self.slices]
            return min(starts, default=0), max(ends, default=0)
        if self.kind == "window":
            ((start, end),) = self.slices
            return prompt_len + start, prompt_len + end
        return {
            "all": (0, None),
            "prompt": (0, prompt_len),
            "completion": (prompt_len, None),
            "predicting": (prompt_len - 1, None),
            "last_prompt": (prompt_len - 1, prompt_len),
            "last": (max(0, prompt_len - self.number), prompt_len),
            "every": (prompt_len, None),
        }[self.kind]

    @property
    def is_range(self) -> bool:
        """Whether all tokens in `bounds` are steered."""
        joint = self.within or self.without
        return not joint and len(self.slices) < 2 and self.kind != "every"

    def contain(self, positions_T: npt.NDArray[np.int64], prompt_len: int) -> npt.NDArray[np.bool_]:
        """Return whether the token at each position is steered."""
        first, end = self.bounds(prompt_len)
        found_T = positions_T >= first
        if end is not None:
            found_T &= positions_T < end
        if len(self.slices) > 1:
            inside_T = np.zeros(len(positions_T), dtype=bool)
            for start, stop in self.slices:
                inside_T |= (positions_T >= start) & (positions_T < stop)
            found_T &= inside_T
        if self.kind == "every":
            found_T &= (positions_T - prompt_len) % self.number == 0
        for other in self.within:
            found_T &= other.contain(positions_T, prompt_len)
        for other in self.without:
            found_T &= ~other.contain(positions_T, prompt_len)
        return found_T

    def mask(self, begin: int, end: int, prompt_len: int) -> npt.NDArray[np.bool_]:
        """Return whether each token of [begin, end) is steered."""
        return self.contain(np.arange(begin, end), prompt_len)

    def count(self, num_tokens: int, prompt_len: int) -> int:
        """Count a sequence's steered tokens."""
        return int(self.mask(0, num_tokens, prompt_len).sum())

    @property
    def knows_prompt(self) -> bool:
        """Whether the positions depend on the prompt's length."""
        joint = (*self.within, *self.without)
        return self.kind not in ("all", "slices") or any(one.knows_prompt for one in joint)

    @property
    def knows_tokens(self) -> bool:
        """Whether the positions depend on a prompt's tokens, and must be resolved before use."""
        joint = (*self.within, *self.without)
        return self.find is not None or any(one.knows_tokens for one in joint)

    def resolve(self, prompt: npt.NDArray[np.int32]) -> "Positions":
        """Return the positions for a sequence with this prompt, without `find`."""
        if not self.knows_tokens:
            return self
        return replace(
            self,
            slices=self.slices if self.find is None else self.find(prompt),
            within=tuple(one.resolve(prompt) for one in self.within),
            without=tuple(one.resolve(prompt) for one in self.without),
            find=None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ResidualOp:
    """A change that depends on the activation x: with c = x . u, u = `direction` of norm 1,

        c' = clip(base + per_norm |x| + per_component c, low, high)
        x' = keep (x - c u) + c' u

    or, if `degrees` is not 0, x rotated toward u by that angle, with its norm kept. `condition`:
    index of the plan's condition without which x is unchanged.
    """

    direction: Vector
    base: float = 0.0
    per_norm: float = 0.0
    per_component: float = 0.0
    low: float = -np.inf
    high: float = np.inf
    keep: float = 1.0
    degrees: float = 0.0
    condition: int | None = None

    @property
    def numbers(self) -> tuple[float, ...]:
        """All fields except the direction, in order; -1 for no condition."""
        return (
            self.base, self.per_norm, self.per_component, self.low, self.high, self.keep,
            self.degrees, -1 if self.condition is None else self.condition,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """The changes of one activation: first add `offset`, then apply each of `ops`."""

    layer: int
    hook: str
    offset: Vector | None
    ops: tuple[ResidualOp, ...] = ()

    @property
    def name(self) -> str:
        """The site's name in receipts: its layer, and its hook unless that is resid_post."""
        return str(self.layer) if self.hook == "resid_post" else f"{self.layer}.{self.hook}"


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The reading of an activation x: c = x . u, u = `direction` of norm 1, and |x|."""

    layer: int
    hook: str
    direction: Vector

    def feed(self, hasher: "hashlib._Hash") -> None:
        """Feed all fields to a hash."""
        name = self.hook.encode()
        hasher.update(struct.pack("<III", self.layer, len(name), self.direction.nbytes))
        hasher.update(name + self.direction.tobytes())


MAX_CONDITIONS = 31
"""Most conditions of a plan: engines store the decisions as bits of one 32-bit integer."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a reading: above < reading < below.

    The reading is of the plan's probe with index `probe`, before steering: c, or c / |x| if
    `relative`. With `of` token, each token's own reading decides for it. With `of` prompt, the
    reading of the prompt's last token decides for that token and all later ones; the condition does
    not hold for earlier tokens.
    """

    probe: int
    above: float = -inf
    below: float = inf
    relative: bool = False
    of: Literal["token", "prompt"] = "token"

    @property
    def numbers(self) -> tuple[float, ...]:
        """All fields in order; 1 for true, and for `of` prompt."""
        return (self.probe, self.above, self.below, self.relative, self.of == "prompt")


Kept = Literal["none", "scored", "all"]
"""Tokens whose readings a job returns: none; those from the token before the first scored or
generated one on; all."""


@dataclass(frozen=True, eq=False)
class SteeringPlan:
    """The steering and readings of one job.

    `sites`: the changes, each of a different activation. `probes`: including those of conditions.
    `more`: plans with the same probes and conditions for other tokens; the positions of all these
    plans are disjoint. Two plans with the same `digest` have the same effect on a sequence.
    """

    sites: tuple[Site, ...]
    positions: Positions = field(default_factory=Positions)
    probes: tuple[Probe, ...] = ()
    conditions: tuple[Condition, ...] = ()
    kept: Kept = "none"
    more: tuple["SteeringPlan", ...] = ()

    @property
    def parts(self) -> tuple["SteeringPlan", ...]:
        """The plan without `more`, and the plans in `more`."""
        return (replace(self, more=()), *self.more) if self.more else (self,)

    @property
    def all_sites(self) -> tuple[Site, ...]:
        """The sites of all parts."""
        return self.sites + tuple(site for part in self.more for site in part.sites)

    def find_positions(self, condition: int) -> tuple[Positions, ...]:
        """Return the positions of the operations that depend on a condition."""
        if not self.more:
            return (self.positions,)
        return tuple(
            part.positions
            for part in self.parts
            if any(op.condition == condition for site in part.sites for op in site.ops)
        )

    def resolve(self, prompt: npt.NDArray[np.int32]) -> "SteeringPlan":
        """Return the plan with its positions resolved for this prompt."""
        return replace(
            self,
            positions=self.positions.resolve(prompt),
            more=tuple(part.resolve(prompt) for part in self.more),
        )

    @property
    def knows_tokens(self) -> bool:
        """Whether positions depend on a prompt's tokens, and must be resolved before use."""
        return any(part.positions.knows_tokens for part in self.parts)

    def first_changed(self, prompt_len: int) -> int:
        """Return the position of the first token that may be changed."""
        return min(part.positions.bounds(prompt_len)[0] for part in self.parts)

    def first_kept(self, prompt_len: int) -> int | None:
        """Return the position of the first token whose readings are kept, or None."""
        return {"none": None, "scored": prompt_len - 1, "all": 0}[self.kept]

    @cached_property
    def content_digest(self) -> bytes:
        """SHA-256 of the changes and readings, without positions."""
        hasher = hashlib.sha256(self.sites_digest)
        for probe in self.probes:
            probe.feed(hasher)
        hasher.update(bytes(condition.probe for condition in self.conditions))
        return hasher.digest()

    @cached_property
    def sites_digest(self) -> bytes:
        """SHA-256 of the changes, without positions."""
        hasher = hashlib.sha256()
        for site in self.sites:
            name = site.hook.encode()
            offset = b"" if site.offset is None else site.offset.tobytes()
            hasher.update(struct.pack("<IIII", site.layer, len(name), len(offset), len(site.ops)))
            hasher.update(name + offset)
            for op in site.ops:
                hasher.update(struct.pack("<8dI", *op.numbers, op.direction.nbytes))
                hasher.update(op.direction.tobytes())
        for condition in self.conditions:
            hasher.update(struct.pack("<4d", *condition.numbers[1:]))
            self.probes[condition.probe].feed(hasher)
        return hasher.digest()

    def digest(self, prompt_len: int) -> bytes:
        """Return SHA-256 of the effect on a sequence with this prompt length."""
        has_prompt_condition = any(condition.of == "prompt" for condition in self.conditions)
        prompt = prompt_len if self.positions.knows_prompt or has_prompt_condition else 0
        others = b"".join(part.digest(prompt_len) for part in self.more)
        positions = repr((self.positions, prompt)).encode()
        return hashlib.sha256(self.sites_digest + positions + others).digest()


@dataclass(frozen=True, slots=True)
class SteeringTrace:
    """The measurements of one steered job.

    `tokens`: number of steered input tokens, by part of the plan, including those from the prefix
    cache. `sites`: by `Site.name`, the number of tokens whose activation changed, and their mean
    |change| / |activation|, as `numerics.sinks.average_changes`. `passed`: by condition, the number
    of tokens at which it held, among the positions of operations that depend on it; without those
    from the prefix cache.
    """

    tokens: tuple[int, ...]
    sites: Mapping[str, tuple[int, float]]
    passed: tuple[int, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether every measured activation and change is finite."""
        return all(isfinite(mean) for _, mean in self.sites.values())


@dataclass(frozen=True, slots=True, eq=False)
class Readings:
    """The readings of a plan's G probes for the T tokens from position `first` on.

    `values_TGR`, float32 [T, G, 4]: c and |x| before steering, then c and |x| after it.
    """

    first: int
    values_TGR: npt.NDArray[np.float32]
