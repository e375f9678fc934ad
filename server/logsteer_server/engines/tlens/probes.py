"""Probes of a batch: what is read of each row's tokens, in the hooks of the model's activations.

The tokens of a forward pass that are read are listed row by row. Of the rows of `steering`'s
example the second one has a plan with probes, and its four tokens are the ones that are read:

    column    0    1    2    3
    row 0     pad  pad  0    1
    row 1     0    1    2    3      places 4, 5, 6, 7 of the 2 x 4 tokens

Axis letters: B rows, T tokens, r the read tokens of a pass, N pairs of such a token and a probe, G
probes, C conditions, P numbers of a condition, R numbers of a reading, K operations, W the width of
an activation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from logsteer_server.contract.plan import SteeringPlan
from logsteer_server.engines.readings import SequenceReadings
from logsteer_server.engines.tlens.points import (
    HookFunction,
    Point,
    PointMap,
    RefusedJobError,
)
from logsteer_server.numerics.residual_ops import (
    CONDITION_NUMBERS,
    READINGS,
    hold,
    pack_conditions,
    read_components,
)


def place_probes(plan: SteeringPlan, points: PointMap) -> tuple[Point, ...]:
    """Return the activation that each probe of a plan reads.

    Errors: RefusedJobError where one does not fit, or a condition is read behind where it decides.
    """
    placed = []
    for probe in plan.probes:
        point = points.find(probe.layer, probe.hook)
        if probe.direction.shape != (point.width,):
            raise RefusedJobError(
                "invalid_vector",
                f"probe at layer {probe.layer}, {probe.hook}: the activation is {point.width} "
                f"wide, and the vector {len(probe.direction)}",
            )
        placed.append(point)
    for site in plan.all_sites:
        place = points.find(site.layer, site.hook)
        for op in site.ops:
            if op.condition is None:
                continue
            read = placed[plan.conditions[op.condition].probe]
            if read.order > place.order:
                raise RefusedJobError(
                    "invalid_request",
                    f"a condition that is read at {read.key} cannot decide at {place.key}, which "
                    "comes before it: read it there or before",
                )
    return tuple(placed)


@dataclass(frozen=True, slots=True, eq=False)
class ProbedRow:
    """One job's probes: what they are, the activation of each, and what they have read."""

    plan: SteeringPlan
    points: tuple[Point, ...]
    sequence: SequenceReadings


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The tokens of a row in a forward pass: tokens [begin, end), from column `first` on."""

    first: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ReadRange:
    """The tokens of a row in a forward pass: `count` from place `start` on; the first's position.

    Of one row they lie side by side, so they are read tokens [first, first + count).
    """

    row: int
    start: int
    first: int
    count: int
    position: int


class BatchProbes:
    """The probes of a batch whose rows stay the same; None stands for a row without any."""

    def __init__(self, rows: Sequence[ProbedRow | None]) -> None:
        self._rows = rows
        probed = [(b, row) for b, row in enumerate(rows) if row is not None]
        self._count = max((len(row.points) for _, row in probed), default=0)
        most = max((len(row.plan.conditions) for _, row in probed), default=0)
        self._conditions_BCP = torch.zeros((len(rows), most, CONDITION_NUMBERS))
        self._by_point: dict[str, list[tuple[int, int, Tensor]]] = {}
        self._points: dict[str, Point] = {}
        for b, row in probed:
            packed_CP = pack_conditions(row.plan.conditions)
            self._conditions_BCP[b, : len(packed_CP)] = packed_CP
            for g, (probe, point) in enumerate(zip(row.plan.probes, row.points, strict=True)):
                self._points[point.key] = point
                direction_W = torch.from_numpy(probe.direction)
                self._by_point.setdefault(point.key, []).append((b, g, direction_W))
        self._ranges: list[ReadRange] = []
        self._readings_rGR = torch.zeros((0, self._count, READINGS))

    @property
    def points(self) -> list[Point]:
        """The activations that are read."""
        return list(self._points.values())

    def begin(self, tokens: Sequence[TokenRange], num_columns: int) -> None:
        """Begin a forward pass [B, num_columns] with these tokens of each row."""
        self._ranges, total = [], 0
        for b, (row, read) in enumerate(zip(self._rows, tokens, strict=True)):
            if row is not None and (count := read.end - read.begin) > 0:
                start = b * num_columns + read.first
                self._ranges.append(ReadRange(b, start, total, count, read.begin))
                total += count
        self._readings_rGR = torch.zeros((total, self._count, READINGS))
        self._token_of_place = torch.full((len(tokens) * num_columns,), -1)
        self._source_r = torch.full((total,), -1)
        self._decided_r = torch.zeros((total,), dtype=torch.int64)
        self._is_decided_r = torch.zeros((total,), dtype=torch.bool)
        for part in self._ranges:
            own = slice(part.first, part.first + part.count)
            self._token_of_place[part.start : part.start + part.count] = torch.arange(
                own.start, own.stop
            )
            row = self._rows[part.row]
            assert row is not None
            last = row.sequence.request.prompt_len - 1 - part.position
            if last < 0:
                self._is_decided_r[own] = True
                self._decided_r[own] = row.sequence.decided or 0
            elif last < part.count:
                self._source_r[part.first + last : own.stop] = part.first + last

    def read_hook(self, point: Point, *, after: bool) -> HookFunction:
        """Return what reads an activation, before or after it is steered."""
        return partial(self._read, point.key, after)

    @torch.no_grad()
    def _read(self, key: str, after: bool, activation: Tensor, hook: object) -> None:  # noqa: ARG002
        wide_TW = activation.detach().flatten(2).flatten(0, 1)
        self._readings_rGR = self._readings_rGR.to(activation.device)
        ranges = {part.row: part for part in self._ranges}
        for b, g, direction_W in self._by_point[key]:
            if (part := ranges.get(b)) is None:
                continue
            own_NW = wide_TW[part.start : part.start + part.count]
            read_N2 = read_components(own_NW, direction_W.to(activation.device))
            own = slice(part.first, part.first + part.count)
            self._readings_rGR[own, g, 2:] = read_N2
            if not after:
                self._readings_rGR[own, g, :2] = read_N2

    @torch.no_grad()
    def decide(self, place_N: Tensor, row_N: Tensor, conditions_NK: Tensor) -> Tensor:
        """Return whether each operation of steered tokens acts: bool [N, K].

        `conditions_NK`: the number of its condition among its row's; below 0 it has none.
        """
        device = self._readings_rGR.device
        place_N, row_N, conditions_NK = (
            x.to(device) for x in (place_N, row_N, conditions_NK.long())
        )
        asked_NK = conditions_NK.clamp(min=0)
        token_N1 = self._token_of_place.to(device)[place_N].clamp(min=0)[:, None]
        numbers_NKP = self._conditions_BCP.to(device)[row_N[:, None], asked_NK]
        source_N1 = self._source_r.to(device)[token_N1]
        of_prompt_NK = numbers_NKP[..., 4] > 0
        read_NK = torch.where(of_prompt_NK, source_N1.clamp(min=0), token_N1)
        readings_NKR = self._readings_rGR[read_NK, numbers_NKP[..., 0].long()]
        bounds = numbers_NKP[..., 1:4].unbind(-1)
        holds_NK = hold(readings_NKR[..., 0], readings_NKR[..., 1], *bounds)
        decided_NK = (self._decided_r.to(device)[token_N1] >> asked_NK & 1).bool()
        is_decided_N1 = self._is_decided_r.to(device)[token_N1]
        prompt_NK = torch.where(is_decided_N1, decided_NK, holds_NK & (source_N1 >= 0))
        return torch.where(of_prompt_NK, prompt_NK, holds_NK) | (conditions_NK < 0)

    def end(self) -> None:
        """Give what was read in this pass to the rows' sequences."""
        if not self._ranges:
            return
        read_rGR = self._readings_rGR.cpu().numpy()
        for part in self._ranges:
            row = self._rows[part.row]
            assert row is not None
            row.sequence.add(part.position, read_rGR[part.first : part.first + part.count].copy())
        self._ranges = []
