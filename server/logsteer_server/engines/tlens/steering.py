"""Steering of a batch: each row by its own plan, in the hooks of the model's activations.

Rows are steered together: their vectors stand in tables with a slot for each part of each steered
row's plan (one, unless vectors have positions of their own), and the steered tokens of a forward
pass are listed by their places in it. Two continuations whose prompts have 2 and 4 tokens, both
steered at `last_prompt`, are padded on the left, and their first pass is

    column    0    1    2    3
    row 0     pad  pad  0    1     TokenRange(first=2, begin=0, end=2)
    row 1     0    1    2    3     TokenRange(first=0, begin=0, end=4)

Token 1 of row 0 and token 3 of row 1 are steered: places 0 * 4 + 3 = 3 and 1 * 4 + 3 = 7 of the
2 x 4 tokens. The next pass has one column, token 2 of row 0 and token 4 of row 1, and no hooks.

Axis letters: B rows, Q parts of their plans, T tokens, N steered tokens of a batch, S slots (parts
that steer an activation), G slices of an activation that a vector acts on alike, M all of these, W
the width of a vector, K operations, P parameters.
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
    Point,
    PointMap,
    RefusedJobError,
)
from logsteer_server.engines.tlens.probes import (
    BatchProbes,
    ProbedRow,
    TokenRange,
    place_probes,
)
from logsteer_server.numerics.residual_ops import change_stream, pack_ops
from logsteer_server.numerics.sinks import average_changes


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
        raise _invalid_plan(f"{twice}: two sites change the same activation; join them")
    return placed


def _place_site(site: Site, point: Point) -> PlacedSite:
    vectors = [op.direction for op in site.ops]
    if site.offset is not None:
        vectors.append(site.offset)
    if not vectors:
        raise _invalid_plan(f"{site.name}: the site changes nothing; leave it out")
    widths = {vector.shape for vector in vectors}
    width = len(vectors[0])
    if widths != {(width,)} or width not in (point.width, point.shape[-1]):
        found = sorted(vector.size for vector in vectors)
        wanted = " or ".join(map(str, sorted({point.width, point.shape[-1]}, reverse=True)))
        raise _invalid_plan(
            f"{site.name}: the activation is {wanted} wide, and the vectors are {found}"
        )
    numbers = np.array([op.numbers for op in site.ops])
    if not all(np.isfinite(vector).all() for vector in vectors) or np.isnan(numbers).any():
        raise _invalid_plan(f"{site.name}: a vector or number is not finite")
    return PlacedSite(site, point, width)


def _invalid_plan(detail: str) -> RefusedJobError:
    return RefusedJobError("invalid_vector", detail)


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
        """Return what was read and not taken before; None where nothing is kept."""
        return self.probed.sequence.take() if self.probed else None

    def trace(self, num_tokens: int) -> SteeringTrace:
        """Return what was measured, for a sequence of which so many tokens were read."""
        sites = {
            placed.site.name: (sums[0], average_changes(*sums))
            for placed in chain.from_iterable(self.parts)
            for sums in [self.counts.get(placed.site.name, (0, 0.0, 0.0))]
        }
        parts = self.plan.parts
        tokens = tuple(part.positions.count(num_tokens, self.prompt_len) for part in parts)
        return SteeringTrace(tokens, sites, self.probed.sequence.passed if self.probed else ())


@dataclass(frozen=True, slots=True)
class _TokenIndex:
    """The places of steered tokens among a forward pass's B x T, the part or slot of each, and
    whether it is the first of its sequence.
    """

    place_N: Tensor
    part_N: Tensor
    is_first_N: Tensor

    def to(self, device: torch.device) -> "_TokenIndex":
        return _TokenIndex(*(x.to(device) for x in (self.place_N, self.part_N, self.is_first_N)))


class _SiteGroup:
    """One activation's vectors and operations, in a slot for each part that steers it.

    `sites` are by part; `row_of_part` [Q] is the row of each.
    """

    def __init__(
        self, sites: dict[int, PlacedSite], row_of_part: Sequence[int], probes: BatchProbes
    ) -> None:
        first = next(iter(sites.values()))
        self._probes = probes
        self.point, self._width = first.point, first.width
        rows = [row_of_part[part] for part in sites]
        names = [placed.site.name for placed in sites.values()]
        self._counted = list(zip(rows, names, strict=True))
        self._rows_S = torch.tensor(rows)
        self._slot_Q = torch.full((len(row_of_part),), -1)
        self._slot_Q[torch.tensor(list(sites))] = torch.arange(len(sites))
        offsets = [p.site.offset for p in sites.values()]
        self._offsets_SW: Tensor | None = None
        if any(offset is not None for offset in offsets):
            zeros = np.zeros(self._width, np.float32)
            self._offsets_SW = torch.from_numpy(
                np.stack([zeros if offset is None else offset for offset in offsets])
            )
        self._depth = len(first.site.ops)
        packed = [pack_ops(p.site.ops, self._depth, self._width) for p in sites.values()]
        self._directions_SKW = torch.stack([directions for directions, _ in packed])
        self._numbers_SKP = torch.stack([numbers for _, numbers in packed])
        self._has_conditions = bool((self._numbers_SKP[..., -1] >= 0).any())
        # By slot: tokens that were changed, the sum of their relative changes, the first's own.
        self._counts_S = torch.zeros(len(sites), dtype=torch.int64)
        self._ratios_S2 = torch.zeros(len(sites), 2, dtype=torch.float64)
        self._tokens: _TokenIndex | None = None

    def select(self, tokens: _TokenIndex) -> None:
        """Steer these tokens in the next forward pass."""
        slot_N = self._slot_Q[tokens.part_N]
        own = slot_N >= 0
        self._tokens = _TokenIndex(tokens.place_N[own], slot_N[own], tokens.is_first_N[own])

    def steer(self, activation: Tensor, hook: object) -> Tensor | None:  # noqa: ARG002
        """Return the activation with the selected tokens changed: a hook of TransformerLens."""
        if self._tokens is None or not len(self._tokens.place_N):
            return None
        self._move_tables(activation)
        slot_N = self._tokens.part_N
        changed = activation.reshape(activation.shape[0] * activation.shape[1], -1, self._width)
        before_NGW = changed[self._tokens.place_N]
        after_NGW = before_NGW
        if self._offsets_SW is not None:
            after_NGW = after_NGW + self._offsets_SW[slot_N, None]
        if self._depth:
            after_NGW = self._apply_ops(after_NGW, slot_N)
        self._measure(before_NGW.detach().float(), after_NGW.detach().float(), self._tokens)
        # Never in place: the tensor may also be the residual that goes past this module.
        return changed.index_put((self._tokens.place_N,), after_NGW).view(activation.shape)

    def _move_tables(self, activation: Tensor) -> None:
        """Bring the tables to the activation's device, and the offsets to its dtype."""
        assert self._tokens is not None
        if self._tokens.place_N.device != activation.device:
            self._tokens = self._tokens.to(activation.device)
        if self._ratios_S2.device != activation.device:
            self._ratios_S2 = self._ratios_S2.to(activation.device)
            self._counts_S = self._counts_S.to(activation.device)
            self._directions_SKW = self._directions_SKW.to(activation.device)
            self._numbers_SKP = self._numbers_SKP.to(activation.device)
        if self._offsets_SW is not None:
            self._offsets_SW = self._offsets_SW.to(activation)

    def _apply_ops(self, x_NGW: Tensor, slot_N: Tensor) -> Tensor:
        groups = x_NGW.shape[1]
        stream_MW = x_NGW.float().flatten(0, 1)
        slot_M = slot_N.repeat_interleave(groups)
        open_MK = None
        if self._has_conditions:
            assert self._tokens is not None
            row_N = self._rows_S[slot_N.cpu()]
            conditions_NK = self._numbers_SKP[slot_N][..., -1]
            open_NK = self._probes.decide(self._tokens.place_N, row_N, conditions_NK)
            open_MK = open_NK.to(x_NGW.device).repeat_interleave(groups, dim=0)
        change_MW = change_stream(
            stream_MW, self._directions_SKW[slot_M], self._numbers_SKP[slot_M], open_MK
        )
        return (stream_MW + change_MW).to(x_NGW.dtype).view(x_NGW.shape)

    def _measure(self, before_NGW: Tensor, after_NGW: Tensor, tokens: _TokenIndex) -> None:
        change_N = vector_norm(after_NGW - before_NGW, dim=(1, 2))
        norm_N = vector_norm(before_NGW, dim=(1, 2))
        # Nothing is relative to an activation of 0.
        ratio_N = (change_N / norm_N).masked_fill(norm_N == 0, 0.0)
        first_N = ratio_N.masked_fill(~tokens.is_first_N, 0.0)
        self._ratios_S2.index_add_(0, tokens.part_N, torch.stack([ratio_N, first_N], 1).double())
        self._counts_S.index_add_(0, tokens.part_N, (ratio_N != 0).long())

    def collect(self, rows: Sequence[SteeredRow | None]) -> None:
        """Add what was measured to the rows' own counts, and reset it."""
        measured = zip(self._counts_S.tolist(), self._ratios_S2.tolist(), strict=True)
        for (index, name), (count, (total, first)) in zip(self._counted, measured, strict=True):
            row = rows[index]
            assert row is not None
            before = row.counts.get(name, (0, 0.0, 0.0))
            row.counts[name] = (before[0] + count, before[1] + total, before[2] + first)
        self._counts_S.zero_()
        self._ratios_S2.zero_()


class BatchSteering:
    """The steering of a batch whose rows stay the same; None stands for an unsteered row."""

    def __init__(self, rows: Sequence[SteeredRow | None]) -> None:
        self._rows = rows
        sites: dict[tuple[str, int, int], dict[int, PlacedSite]] = {}
        self._positions: list[list[tuple[int, Positions]]] = [[] for _ in rows]
        row_of_part: list[int] = []
        for index, row in enumerate(rows):
            for part, placed_sites in zip(row.plan.parts, row.parts, strict=True) if row else ():
                self._positions[index].append((len(row_of_part), part.positions))
                for placed in placed_sites:
                    sites.setdefault(placed.group, {})[len(row_of_part)] = placed
                row_of_part.append(index)
        self._probes = BatchProbes([row.probed if row else None for row in rows])
        self._groups = [_SiteGroup(found, row_of_part, self._probes) for found in sites.values()]

    def hooks(
        self, ranges: Sequence[TokenRange], num_columns: int
    ) -> list[tuple[Point, HookFunction]]:
        """Return what steers and reads a forward pass [B, num_columns] with these tokens of each
        row; at one activation, what reads it before, steers it, reads it after.
        """
        read = self._probes.points
        if not read:
            return self._steer_hooks(ranges, num_columns)
        self._probes.begin(ranges, num_columns)
        before = [(point, self._probes.read_hook(point, after=False)) for point in read]
        steering = self._steer_hooks(ranges, num_columns)
        if not steering:
            return before
        after = [(point, self._probes.read_hook(point, after=True)) for point in read]
        return [*before, *steering, *after]

    def _steer_hooks(
        self, ranges: Sequence[TokenRange], num_columns: int
    ) -> list[tuple[Point, HookFunction]]:
        if not self._groups:
            return []
        tokens = self._find_tokens(ranges, num_columns)
        if not len(tokens.place_N):
            return []
        for group in self._groups:
            group.select(tokens)
        return [(group.point, group.steer) for group in self._groups]

    def end_pass(self) -> None:
        """Give what was read in a forward pass to its rows."""
        self._probes.end()

    def _find_tokens(self, ranges: Sequence[TokenRange], num_columns: int) -> _TokenIndex:
        places: list[int] = []
        part_of: list[int] = []
        firsts: list[bool] = []
        for b, (row, tokens) in enumerate(zip(self._rows, ranges, strict=True)):
            if row is None:
                continue
            for number, positions in self._positions[b]:
                start = b * num_columns + tokens.first
                mask = positions.mask(tokens.begin, tokens.end, row.prompt_len)
                found = (np.nonzero(mask)[0] + start).tolist()
                places += found
                part_of += [number] * len(found)
                firsts += [place - start + tokens.begin == 0 for place in found]
        place_N, part_N, first_N = torch.tensor([places, part_of, firsts], dtype=torch.int64)
        return _TokenIndex(place_N, part_N, first_N.bool())

    def collect(self) -> None:
        """Add what was measured to the rows' counts: before the batch changes or a row ends."""
        for group in self._groups:
            group.collect(self._rows)
