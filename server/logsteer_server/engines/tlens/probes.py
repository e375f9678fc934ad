"""Probes of a batch: readings of its tokens, taken by hooks on the model's activations.

Axis letters: B rows, T columns, N tokens of a pass, n some of them, G probes, C conditions, P
numbers of a condition, R numbers of a reading, K operations, W width of an activation.
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
from logsteer_server.engines.tlens.tokens import PassTokens
from logsteer_server.numerics.residual_ops import (
    CONDITION_NUMBERS,
    READINGS,
    hold,
    pack_conditions,
    read_components,
)


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
        self._count = max((len(row.points) for _, row in self._rows), default=0)
        most = max((len(row.plan.conditions) for _, row in self._rows), default=0)
        self._conditions_BCP = torch.zeros((len(rows), most, CONDITION_NUMBERS))
        self._by_point: dict[str, list[tuple[int, int, Tensor]]] = {}
        self.points: dict[str, Point] = {}
        for b, row in self._rows:
            packed_CP = pack_conditions(row.plan.conditions)
            self._conditions_BCP[b, : len(packed_CP)] = packed_CP
            for g, (probe, point) in enumerate(zip(row.plan.probes, row.points, strict=True)):
                self.points[point.key] = point
                direction_W = torch.from_numpy(probe.direction)
                self._by_point.setdefault(point.key, []).append((b, g, direction_W))

    def begin(self, tokens: PassTokens) -> None:
        """Begin a forward pass over these tokens."""
        self._tokens, count = tokens, len(tokens.place_N)
        self._readings_NGR = torch.zeros((count, self._count, READINGS))
        # Where a token's condition on the prompt is decided: in this pass, by the prompt's last
        # token; or by bits that an earlier pass has decided. Before that token none holds.
        self._source_N = torch.full((count,), -1)
        self._decided_N = torch.zeros((count,), dtype=torch.int64)
        for b, row in self._rows:
            own = tokens.of_row(b)
            last = row.sequence.request.prompt_len - 1 - int(tokens.position_N[own.start])
            if last < 0:
                self._decided_N[own] = row.sequence.decided or 0
            else:
                self._source_N[own][last:] = own.start + last

    def hook(self, *, after: bool) -> list[tuple[Point, HookFunction]]:
        """Return the hooks that read activations before or after they are steered."""
        return [(point, partial(self._read, key, after)) for key, point in self.points.items()]

    @torch.no_grad()
    def _read(self, key: str, after: bool, activation: Tensor, hook: object) -> None:  # noqa: ARG002
        wide_TW = activation.detach().flatten(2).flatten(0, 1)
        self._readings_NGR = self._readings_NGR.to(activation.device)
        for b, g, direction_W in self._by_point[key]:
            own = self._tokens.of_row(b)
            start = int(self._tokens.place_N[own.start])  # a row's tokens are side by side
            own_nW = wide_TW[start : start + own.stop - own.start]
            read_n2 = read_components(own_nW, direction_W.to(activation.device))
            self._readings_NGR[own, g, 2:] = read_n2
            if not after:
                self._readings_NGR[own, g, :2] = read_n2

    @torch.no_grad()
    def decide(self, token_n: Tensor, row_n: Tensor, conditions_nK: Tensor) -> Tensor:
        """Return whether each operation of steered tokens acts: bool [n, K].

        `token_n` counts among N. `conditions_nK`: the number of its condition among its row's;
        below 0 it has none.
        """
        device = self._readings_NGR.device
        token_n1, row_n1 = token_n.to(device)[:, None], row_n.to(device)[:, None]
        asked_nK = conditions_nK.to(device).long()
        bit_nK = asked_nK.clamp(min=0)
        numbers_nKP = self._conditions_BCP.to(device)[row_n1, bit_nK]
        source_n1 = self._source_N.to(device)[token_n1]
        of_prompt_nK = numbers_nKP[..., 4] > 0
        read_nK = torch.where(of_prompt_nK, source_n1.clamp(min=0), token_n1)
        readings_nKR = self._readings_NGR[read_nK, numbers_nKP[..., 0].long()]
        bounds = numbers_nKP[..., 1:4].unbind(-1)
        holds_nK = hold(readings_nKR[..., 0], readings_nKR[..., 1], *bounds)
        decided_nK = (self._decided_N.to(device)[token_n1] >> bit_nK & 1).bool()
        holds_nK = torch.where(of_prompt_nK & (source_n1 < 0), decided_nK, holds_nK)
        return holds_nK | (asked_nK < 0)

    def end(self) -> None:
        """Pass the readings of this pass to the rows' sequences."""
        if self._rows:
            read_NGR = self._readings_NGR.cpu().numpy()
        for b, row in self._rows:
            own = self._tokens.of_row(b)
            row.sequence.add(int(self._tokens.position_N[own.start]), read_NGR[own].copy())
