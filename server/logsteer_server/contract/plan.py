"""Steering plans: what an engine changes in the activations of one job, as plain arrays.

A plan says nothing about names, files or units: `logsteer_server.interventions` has resolved
those. The arithmetic is in `logsteer_server.numerics.residual_ops`.

Axis letters: T tokens, D width of an activation.
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Positions:
    """Which input tokens of a sequence are steered, with P the length of its prompt.

    `kind`: all, prompt (< P), completion (>= P), predicting (>= P - 1), last_prompt (= P - 1), or
    slices: tokens in one of `slices`, each [start, end).
    """

    kind: str = "all"
    slices: tuple[tuple[int, int], ...] = ()

    def bounds(self, prompt_len: int) -> tuple[int, int | None]:
        """[first, end) around all steered tokens; end None: as far as the sequence goes."""
        if self.kind == "slices":
            return min(s for s, _ in self.slices), max(e for _, e in self.slices)
        return {
            "all": (0, None),
            "prompt": (0, prompt_len),
            "completion": (prompt_len, None),
            "predicting": (prompt_len - 1, None),
            "last_prompt": (prompt_len - 1, prompt_len),
        }[self.kind]

    def contain(self, positions_T: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether each position lies in one of the slices."""
        found_T = np.zeros(len(positions_T), dtype=bool)
        for first, end in self.slices:
            found_T |= (positions_T >= first) & (positions_T < end)
        return found_T

    def mask(self, begin: int, end: int, prompt_len: int) -> npt.NDArray[np.bool_]:
        """Return whether each token of [begin, end) is steered."""
        positions_T = np.arange(begin, end)
        first, last = self.bounds(prompt_len)
        steered_T = (positions_T >= first) & (positions_T < (end if last is None else last))
        return steered_T & self.contain(positions_T) if self.slices else steered_T

    def holds(self, position: int, prompt_len: int) -> bool:
        """Return whether one token is steered."""
        first, last = self.bounds(prompt_len)
        inside = first <= position and (last is None or position < last)
        return inside and (not self.slices or any(s <= position < e for s, e in self.slices))

    def count(self, num_tokens: int, prompt_len: int) -> int:
        """Count a sequence's steered tokens."""
        return int(self.mask(0, num_tokens, prompt_len).sum())

    @property
    def knows_prompt(self) -> bool:
        """Whether the prompt's length matters."""
        return self.kind not in ("all", "slices")


@dataclass(frozen=True, slots=True, eq=False)
class ResidualOp:
    """A change that depends on the activation x: with c = x . u, u = `direction` of norm 1,

        c' = clip(base + per_norm |x| + per_component c, low, high)
        x' = keep (x - c u) + c' u

    or, where `degrees` is not 0, x turned toward u by that angle with its norm kept.
    """

    direction: Vector
    base: float = 0.0
    per_norm: float = 0.0
    per_component: float = 0.0
    low: float = -np.inf
    high: float = np.inf
    keep: float = 1.0
    degrees: float = 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        """All but the direction, in the order of `interventions.PARAMETERS`."""
        return (
            self.base, self.per_norm, self.per_component, self.low, self.high, self.keep,
            self.degrees,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """What happens at one activation: first `offset` is added to it, then each of `ops` acts."""

    layer: int
    hook: str
    offset: Vector | None
    ops: tuple[ResidualOp, ...] = ()

    @property
    def name(self) -> str:
        """The site's name in receipts: its layer, and its hook where that is not resid_post."""
        return str(self.layer) if self.hook == "resid_post" else f"{self.layer}.{self.hook}"


@dataclass(frozen=True, eq=False)
class SteeringPlan:
    """The changes of one steering object, each site another activation.

    Two plans with the same `digest` do the same.
    """

    sites: tuple[Site, ...]
    positions: Positions = field(default_factory=Positions)

    @cached_property
    def sites_digest(self) -> bytes:
        """SHA-256 of what happens at the sites, wherever in a sequence that is."""
        hasher = hashlib.sha256()
        for site in self.sites:
            name = site.hook.encode()
            offset = b"" if site.offset is None else site.offset.tobytes()
            hasher.update(struct.pack("<IIII", site.layer, len(name), len(offset), len(site.ops)))
            hasher.update(name + offset)
            for op in site.ops:
                hasher.update(struct.pack("<7dI", *op.numbers, op.direction.nbytes))
                hasher.update(op.direction.tobytes())
        return hasher.digest()

    def digest(self, prompt_len: int) -> bytes:
        """SHA-256 of all that makes a sequence with this prompt length different."""
        prompt = prompt_len if self.positions.knows_prompt else 0
        where = repr((self.positions.kind, self.positions.slices, prompt)).encode()
        return hashlib.sha256(self.sites_digest + where).digest()


@dataclass(frozen=True, slots=True)
class SteeringTrace:
    """What an engine measured while it steered one job.

    `tokens`: input tokens read under steering, those of a steered prefix cache included.
    `sites`: by `Site.name`, the tokens whose activation changed there and the mean of |change| /
    |activation| over them.
    """

    tokens: int
    sites: Mapping[str, tuple[int, float]]

    @property
    def is_finite(self) -> bool:
        """Whether every activation and its change could be measured."""
        return all(isfinite(mean) for _, mean in self.sites.values())
