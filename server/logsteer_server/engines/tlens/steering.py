"""Steering of a batch: each row with a plan of its own, in the hooks of the model's activations.

Rows are steered together: their vectors are in tables with a slot for each part of each steered
row's plan (one, unless vectors have positions of their own). In the example of `points.PassTokens`,
with both prompts steered at `last_prompt`, tokens 1 and 5 are steered, at places 3 and 7. The next
pass has one column, no steered token, and no hooks.

Axis letters: B rows, Q parts of their plans, N tokens of a pass, n steered ones; S slots (parts
that steer an activation), G slices of an activation that a vector acts on alike; M slices of all
steered tokens, W width of a vector, K operations, P parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from logsteer_server.contract.plan import Positions, Readings, Site, SteeringPlan, SteeringTrace
from logsteer_server.engines.readings import ReadRequest, SequenceReadings
from logsteer_server.engines.tlens.points import (
    HookFunction,
    Integers,
    PassTokens,
    Point,
    PointMap,
    RefusedJobError,
)
from logsteer_server.engines.tlens.probes import (
    BatchProbes,
    ProbedRow,
    place_probes,
)
from logsteer_server.numerics.residual_ops import change_stream, pack_ops
from logsteer_server.numerics.sinks import average_changes

LARGEST_CHANGE = 1e14
"""A longer change counts as infinite, and its job fails. Attention scores grow with the square of
what attention is given, and with its weights; beyond float32 attention may hide that (`overflow`).
"""


@dataclass(frozen=True, slots=True)
class PlacedSite:
    """A site with the activation of the model that it names; `width` is that of its vectors.

    A vector is as wide as the whole activation of a token, or as its last axis: then it acts on
    each head alike, as it would in a hook that adds it to the tensor.
    """

    site: Site
    point: Point
    width: int

    @property
    def group(self) -> tuple[str, int, int]:
        """Sites of one group are applied together: same activation, width, number of operations."""
        return self.point.key, self.width, len(self.site.ops)


def place_sites(plan: SteeringPlan, points: PointMap) -> tuple[PlacedSite, ...]:
    """Return the plan's sites in the model. Errors: RefusedJobError where they do not fit."""
    placed = tuple(_place_site(site, points.find(site.layer, site.hook)) for site in plan.sites)
    keys = [site.point.key for site in placed]
    if len(set(keys)) < len(keys):
        twice = next(s.site.name for s in placed if keys.count(s.point.key) > 1)
        detail = f"{twice}: two sites change the same activation; join them"
        raise RefusedJobError("invalid_vector", detail)
    return placed


def _place_site(site: Site, point: Point) -> PlacedSite:
    vectors = [*(op.direction for op in site.ops), *([] if site.offset is None else [site.offset])]
    widths = {vector.shape for vector in vectors}
    width = len(vectors[0])
    if widths != {(width,)} or width not in (point.width, point.shape[-1]):
        found = sorted(vector.size for vector in vectors)
        wanted = " or ".join(map(str, sorted({point.width, point.shape[-1]}, reverse=True)))
        raise RefusedJobError(
            "invalid_vector",
            f"{site.name}: the activation is {wanted} wide, and the vectors are {found}",
        )
    return PlacedSite(site, point, width)


@dataclass(slots=True)
class SteeredRow:
    """One job's steering and probes: the sites of each part of its plan; `counts` holds, by site,
    tokens changed, the sum of their changes, and the change of the first token.
    """

    plan: SteeringPlan
    parts: tuple[tuple[PlacedSite, ...], ...]
    probed: ProbedRow | None
    prompt_len: int
    counts: dict[str, tuple[int, float, float]] = field(default_factory=dict)

    @classmethod
    def place(cls, plan: SteeringPlan, prompt_len: int, points: PointMap) -> "SteeredRow":
        """Place a plan in a model. Errors: RefusedJobError where it does not fit."""
        probed = None
        if plan.probes:
            sequence = SequenceReadings(ReadRequest.of(plan, prompt_len))
            probed = ProbedRow(plan, place_probes(plan, points), sequence)
        parts = tuple(place_sites(part, points) for part in plan.parts)
        return cls(plan, parts, probed, prompt_len)

    @property
    def points(self) -> list[Point]:
        """The activations that are steered or read."""
        read = self.probed.points if self.probed else ()
        return [*(placed.point for placed in chain.from_iterable(self.parts)), *read]

    def take_readings(self) -> Readings | None:
        """Return the readings since the last call; None where none are kept."""
        return self.probed.sequence.pop() if self.probed else None

    def trace(self, num_tokens: int) -> SteeringTrace:
        """Return the measurements of a sequence of which so many tokens were read."""
        sites = {
            placed.site.name: (sums[0], average_changes(*sums))
            for placed in chain.from_iterable(self.parts)
            for sums in [self.counts.get(placed.site.name, (0, 0.0, 0.0))]
        }
        parts = self.plan.parts
        tokens = tuple(part.positions.count(num_tokens, self.prompt_len) for part in parts)
        return SteeringTrace(tokens, sites, self.probed.sequence.passed if self.probed else ())


class _SiteGroup:
    """The vectors and operations at one activation, in a slot for each part that steers it.

    `sites` are by part, and `rows` [Q] the rows of parts, with their numbers in the batch.
    """

    def __init__(
        self,
        sites: dict[int, PlacedSite],
        rows: Sequence[tuple[int, SteeredRow]],
        probes: BatchProbes,
    ) -> None:
        first = next(iter(sites.values()))
        self._probes = probes
        self.point, self._width, self._depth = first.point, first.width, len(first.site.ops)
        self._measured = [(rows[part][1], placed.site.name) for part, placed in sites.items()]
        self._slot_Q = np.full(len(rows), -1)
        self._slot_Q[list(sites)] = range(len(sites))
        self._offsets_SW = torch.zeros(len(sites), self._width)
        for slot, placed in enumerate(sites.values()):
            if placed.site.offset is not None:
                self._offsets_SW[slot] = torch.from_numpy(placed.site.offset)
        packed = [pack_ops(p.site.ops, self._width) for p in sites.values()]
        self._directions_SKW = torch.stack([directions for directions, _ in packed])
        self._numbers_SKP = torch.stack([numbers for _, numbers in packed])
        self._has_conditions = bool((self._numbers_SKP[..., -1] >= 0).any())
        # By slot: tokens that were changed, the sum of their relative changes, the first token's.
        self._sums_S3 = torch.zeros(len(sites), 3, dtype=torch.float64)

    def select(self, tokens: PassTokens, steered_n: Integers, part_n: Integers) -> bool:
        """Steer these of a forward pass's tokens; return whether there are any."""
        slot_n = self._slot_Q[part_n]
        token_n, slot_n = steered_n[slot_n >= 0], slot_n[slot_n >= 0]
        is_first_n = tokens.position_N[token_n] == 0
        self._steered_4n = torch.from_numpy(
            np.stack([tokens.place_N[token_n], slot_n, is_first_n, token_n])
        )
        return len(token_n) > 0

    def steer(self, activation: Tensor, hook: object) -> Tensor:  # noqa: ARG002
        """Return the activation with the selected tokens changed: a hook of TransformerLens."""
        device = activation.device
        self._offsets_SW = self._offsets_SW.to(activation)
        self._directions_SKW, self._numbers_SKP, self._sums_S3, self._steered_4n = (
            table.to(device)
            for table in (self._directions_SKW, self._numbers_SKP, self._sums_S3, self._steered_4n)
        )
        place_n, slot_n, is_first_n, token_n = self._steered_4n
        changed = activation.reshape(activation.shape[0] * activation.shape[1], -1, self._width)
        before_nGW = changed[place_n]
        after_nGW = before_nGW + self._offsets_SW[slot_n, None]
        if self._depth:
            after_nGW = self._apply_ops(after_nGW, slot_n, token_n)
        self._measure(before_nGW.detach().float(), after_nGW.detach().float(), slot_n, is_first_n)
        # Never in place: the tensor may also be the residual that goes past this module.
        return changed.index_put((place_n,), after_nGW).view(activation.shape)

    def _apply_ops(self, x_nGW: Tensor, slot_n: Tensor, token_n: Tensor) -> Tensor:
        groups = x_nGW.shape[1]
        stream_MW = x_nGW.float().flatten(0, 1)
        slot_M = slot_n.repeat_interleave(groups)
        open_MK = None
        if self._has_conditions:
            open_nK = self._probes.decide(token_n, self._numbers_SKP[slot_n][..., -1])
            open_MK = open_nK.to(x_nGW.device).repeat_interleave(groups, dim=0)
        change_MW = change_stream(
            stream_MW, self._directions_SKW[slot_M], self._numbers_SKP[slot_M], open_MK
        )
        return (stream_MW + change_MW).to(x_nGW.dtype).view(x_nGW.shape)

    def _measure(
        self, before_nGW: Tensor, after_nGW: Tensor, slot_n: Tensor, is_first_n: Tensor
    ) -> None:
        change_n = vector_norm(after_nGW - before_nGW, dim=(1, 2))
        norm_n = vector_norm(before_nGW, dim=(1, 2))
        # Nothing is relative to an activation of 0.
        ratio_n = (change_n / norm_n).masked_fill(norm_n == 0, 0.0)
        ratio_n = ratio_n.masked_fill(change_n > LARGEST_CHANGE, torch.inf)
        sums_n3 = torch.stack([ratio_n != 0, ratio_n, ratio_n * is_first_n], dim=1)
        self._sums_S3.index_add_(0, slot_n, sums_n3.double())

    def collect(self) -> None:
        """Add the measurements to the rows' own counts, and reset them."""
        for (row, name), sums in zip(self._measured, self._sums_S3.tolist(), strict=True):
            before = row.counts.get(name, (0, 0.0, 0.0))
            count, total, first = (a + b for a, b in zip(before, sums, strict=True))
            row.counts[name] = (int(count), total, first)
        self._sums_S3.zero_()


class BatchSteering:
    """The steering of a batch whose rows stay the same; None stands for an unsteered row."""

    def __init__(self, rows: Sequence[SteeredRow | None]) -> None:
        sites: dict[tuple[str, int, int], dict[int, PlacedSite]] = {}
        self._parts: dict[tuple[Positions, int], list[tuple[int, int]]] = {}
        rows_Q: list[tuple[int, SteeredRow]] = []
        for b, row in enumerate(rows):
            for part, placed_sites in zip(row.plan.parts, row.parts, strict=True) if row else ():
                assert row is not None
                where = part.positions, row.prompt_len
                self._parts.setdefault(where, []).append((b, len(rows_Q)))
                for placed in placed_sites:
                    sites.setdefault(placed.group, {})[len(rows_Q)] = placed
                rows_Q.append((b, row))
        self._probes = BatchProbes([row.probed if row else None for row in rows])
        self._groups = [_SiteGroup(found, rows_Q, self._probes) for found in sites.values()]

    def hooks(self, tokens: PassTokens) -> list[tuple[Point, HookFunction]]:
        """Return the hooks of a forward pass over these tokens: at one activation probes before
        steering, the steering, and probes after it.
        """
        if self._probes.points:
            self._probes.begin(tokens)
        before, after = (self._probes.hook(after=after) for after in (False, True))
        steered_n, part_n = self._find_steered(tokens)
        steering = [
            (group.point, group.steer)
            for group in self._groups
            if group.select(tokens, steered_n, part_n)
        ]
        return [*before, *steering, *after] if steering else before

    def _find_steered(self, tokens: PassTokens) -> Integers:
        """Return which tokens are steered, and the part of each: [2, n]."""
        found = [np.zeros((2, 0), np.int64)]
        for (positions, prompt_len), parts in self._parts.items():
            owns = [np.arange(*tokens.starts[b : b + 2]) for b, _ in parts]
            token_n = np.concatenate(owns)
            part_n = np.repeat([part for _, part in parts], [len(own) for own in owns])
            is_steered_n = positions.contain(tokens.position_N[token_n], prompt_len)
            found.append(np.stack([token_n, part_n])[:, is_steered_n])
        return np.concatenate(found, axis=1)

    def end_pass(self) -> None:
        """Pass the readings of a forward pass to their rows."""
        self._probes.end()

    def collect(self) -> None:
        """Add the measurements to the rows' counts: before the batch changes or a row ends."""
        for group in self._groups:
            group.collect()
