"""Probes of a batch: readings of its tokens, taken by hooks on the model's activations.

Axis letters: B rows, T columns, N tokens of a pass, n some of them, G probes, C conditions, R
numbers of a reading, K operations, W width of an activation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.plan import MAX_CONDITIONS, SteeringPlan
from logsteer_server.engines.readings import SequenceReadings
from logsteer_server.engines.tlens.points import (
    HookFunction,
    PassTokens,
    Point,
    PointMap,
    RefusedJobError,
)
from logsteer_server.numerics.residual_ops import READINGS, read_components


def place_probes(plan: SteeringPlan, points: PointMap) -> tuple[Point, ...]:
    """Return the activation that each probe of a plan reads.

    Errors: RefusedJobError where one does not fit, or where a condition decides before its probe
    has read.
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
    """One job's probes: its plan, the activation that each probe reads, and the readings."""

    plan: SteeringPlan
    points: tuple[Point, ...]
    sequence: SequenceReadings


class BatchProbes:
    """The probes of a batch whose rows stay the same; None stands for a row without any."""

    def __init__(self, rows: Sequence[ProbedRow | None]) -> None:
        self._rows = [(b, row) for b, row in enumerate(rows) if row is not None]
        self._by_point: dict[str, list[tuple[int, int, Tensor]]] = {}
        self.points: dict[str, Point] = {}
        for b, row in self._rows:
            for g, (probe, point) in enumerate(zip(row.plan.probes, row.points, strict=True)):
                self.points[point.key] = point
                direction_W = torch.from_numpy(probe.direction)
                self._by_point.setdefault(point.key, []).append((b, g, direction_W))

    def begin(self, tokens: PassTokens) -> None:
        """Begin a forward pass over these tokens."""
        self._tokens = tokens
        most = max((len(row.points) for _, row in self._rows), default=0)
        self._readings_NGR = np.zeros((len(tokens.place_N), most, READINGS), np.float32)

    def hook(self, *, after: bool) -> list[tuple[Point, HookFunction]]:
        """Return the hooks that read activations before or after they are steered."""
        return [(point, partial(self._read, key, after)) for key, point in self.points.items()]

    @torch.no_grad()
    def _read(self, key: str, after: bool, activation: Tensor, hook: object) -> None:  # noqa: ARG002
        wide_TW = activation.detach().flatten(2).flatten(0, 1)
        places = [self._tokens.of_row(b) for b, _, _ in self._by_point[key]]
        read = []
        for own, (_, _, direction_W) in zip(places, self._by_point[key], strict=True):
            start = int(self._tokens.place_N[own.start])  # a row's tokens are side by side
            own_nW = wide_TW[start : start + own.stop - own.start]
            read.append(read_components(own_nW, direction_W.to(activation.device)))
        # One array, because each copy from a GPU waits for it.
        found = np.split(torch.cat(read).cpu().numpy(), np.cumsum([len(own_n2) for own_n2 in read]))
        for own, (_, g, _), read_n2 in zip(places, self._by_point[key], found, strict=False):
            self._readings_NGR[own, g, 2:] = read_n2
            if not after:
                self._readings_NGR[own, g, :2] = read_n2

    def decide(self, token_n: Tensor, conditions_nK: Tensor) -> Tensor:
        """Return whether each operation of steered tokens acts: bool [n, K].

        `token_n` counts among N. `conditions_nK`: the number of its condition among its row's;
        below 0 it has none.
        """
        holds_NC = np.zeros((len(self._readings_NGR), MAX_CONDITIONS), np.bool_)
        for row, own, begin in self._find_own():
            holds_TC = row.sequence.hold(begin, self._readings_NGR[own])
            holds_NC[own, : holds_TC.shape[1]] = holds_TC
        asked_nK = conditions_nK.cpu().numpy().astype(np.int64)
        holds_nK = holds_NC[token_n.cpu().numpy()[:, None], asked_nK]
        return torch.from_numpy(holds_nK | (asked_nK < 0))

    def end(self) -> None:
        """Pass the readings of this pass to the rows' sequences."""
        for row, own, begin in self._find_own():
            row.sequence.add(begin, self._readings_NGR[own])

    def _find_own(self) -> Iterator[tuple[ProbedRow, slice, int]]:
        """Yield each row, its tokens among N, and the position of the first of them."""
        for b, row in self._rows:
            own = self._tokens.of_row(b)
            yield row, own, int(self._tokens.position_N[own.start])
