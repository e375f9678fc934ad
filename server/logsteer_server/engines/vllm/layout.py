"""The memory layout that the host and the steering kernel share: token marks and table rows.

The host packs the marks of a step and the table rows of plans into arrays, each copied to the
device at once. Axis letters: L layers, S slots, D width, K operations, P numbers of an operation or
condition, G probes, C conditions, W fields of a layer's work, F fields of a mark; lower case: t
steered tokens of a step, r tokens that probes read, m marked tokens, or operations; s slots being
filled, n offsets, g probes, c conditions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.plan import SteeringPlan
from logsteer_server.engines.vllm.captures import Captured, Indices
from logsteer_server.numerics.residual_ops import CONDITION_NUMBERS, UNCHANGED

CLOSED, DECIDED = -1, -2
"""Special values of the deciding token's index, for conditions on the prompt's last token: CLOSED
for tokens before it, where the condition does not hold; DECIDED where an earlier step computed it,
and the decision is stored in the request's entry."""


class Mark(IntEnum):
    """Fields of a marked token, int32.

    PLACE: its index in the step. SLOT, READ_SLOT: its slot in the steering and the probe tables, 0
    for none. ENTRY: its request's entry. COUNTED: 0 if it was counted before, else 1, or 2 for the
    first token of a sequence. SOURCE: the index of the token that decides for it, or CLOSED, or
    DECIDED. CAPTURED: 0 no, 1 after steering, 2 before steering.
    """

    PLACE = 0
    SLOT = 1
    READ_SLOT = 2
    ENTRY = 3
    COUNTED = 4
    SOURCE = 5
    CAPTURED = 6
    UNUSED = 7  # 32 bytes are what a GPU loads at once


def no_tokens() -> Indices:
    """Return an empty array of token indices."""
    return np.zeros(0, np.int64)


def no_flags() -> npt.NDArray[np.bool_]:
    """Return an empty array of flags."""
    return np.zeros(0, np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class SteeredTokens:
    """The steered tokens of a step: indices in the step, slots, and their requests' entries.

    `is_new_t`: not counted before, so that the change is measured. `is_first_t`: first token of its
    sequence.
    """

    index_t: Indices = field(default_factory=no_tokens)
    slots_t: Indices = field(default_factory=no_tokens)
    entries_t: Indices = field(default_factory=no_tokens)
    is_new_t: npt.NDArray[np.bool_] = field(default_factory=no_flags)
    is_first_t: npt.NDArray[np.bool_] = field(default_factory=no_flags)


@dataclass(frozen=True, slots=True, eq=False)
class ReadTokens:
    """The tokens of a step that probes read: indices in the step, slots, their requests' entries.

    `sources_r`: index of the prompt's last token, which decides conditions on the prompt, or
    CLOSED, or DECIDED. `is_end_r`: the token is that last one, and a condition depends on it.
    `is_kept_r`: its readings go to the host. `reads_after`: some request needs readings after
    steering; conditions use those before it.
    """

    index_r: Indices = field(default_factory=no_tokens)
    slots_r: Indices = field(default_factory=no_tokens)
    entries_r: Indices = field(default_factory=no_tokens)
    sources_r: Indices = field(default_factory=no_tokens)
    is_end_r: npt.NDArray[np.bool_] = field(default_factory=no_flags)
    is_kept_r: npt.NDArray[np.bool_] = field(default_factory=no_flags)
    reads_after: bool = True


NONE_STEERED, NONE_READ = SteeredTokens(), ReadTokens()


@dataclass(frozen=True, slots=True)
class Step:
    """The marked tokens of one step: steered, captured, read."""

    steered: SteeredTokens = NONE_STEERED
    captured: Captured = field(default_factory=dict)
    read: ReadTokens = NONE_READ

    @property
    def is_idle(self) -> bool:
        """Whether no token is marked."""
        return not (len(self.steered.index_t) or self.captured or len(self.read.index_r))


def pack_marks(step: Step) -> npt.NDArray[np.int32]:
    """Return the marks of a step in token order, after a row with their number: [1 + m, F].

    In a step of four tokens, slot 2 steers the third, which belongs to the request of entry 5:

        [[1, 0, 0, 0, 0, 0, 0, 0], [2, 2, 0, 5, 1, -1, 0, 0]]
    """
    steered, read = step.steered, step.read
    captured = [index_t for index_t, _ in step.captured.values()]
    places = np.concatenate([steered.index_t, read.index_r, *captured])
    marked_m = np.unique(places)
    packed = np.zeros((1 + len(marked_m), len(Mark)), np.int32)
    packed[0, 0] = len(marked_m)
    packed_mF = packed[1:]
    packed_mF[:, Mark.PLACE] = marked_m
    packed_mF[:, Mark.SOURCE] = CLOSED
    rows_r = np.searchsorted(marked_m, read.index_r)
    packed_mF[rows_r, Mark.READ_SLOT] = read.slots_r
    packed_mF[rows_r, Mark.ENTRY] = read.entries_r
    packed_mF[rows_r, Mark.SOURCE] = read.sources_r
    rows_t = np.searchsorted(marked_m, steered.index_t)
    packed_mF[rows_t, Mark.SLOT] = steered.slots_t
    packed_mF[rows_t, Mark.ENTRY] = steered.entries_t
    packed_mF[rows_t, Mark.COUNTED] = np.where(steered.is_first_t, 2, 1) * steered.is_new_t
    for (_, before), (index_t, _) in step.captured.items():
        packed_mF[np.searchsorted(marked_m, index_t), Mark.CAPTURED] = 2 if before else 1
    return packed


class Work(IntEnum):
    """Fields of a plan's work at one layer, int32: number of operations; whether to add an offset;
    first and number of its probes, counted in order of layer.
    """

    DEPTH = 0
    HAS_OFFSET = 1
    FIRST_PROBE = 2
    PROBE_COUNT = 3


@dataclass(frozen=True, slots=True, eq=False)
class TableShape:
    """Sizes of the tables: layers, slots (with the empty slot 0), operations, probes, width."""

    layers: int
    slots: int
    depth: int
    probes: int
    width: int


def pack_plans(
    plans: Mapping[int, SteeringPlan], shape: TableShape
) -> tuple[npt.NDArray[Any], ...]:
    """Return the table rows of plans by slot. Errors: ValueError for more operations than fit.

        slots_s, work_LsW                             each plan's work at each layer
        offsets_at_n, offsets_nD                      rows of a table [L * S, D]
        ops_at_m, directions_mD, numbers_mP           rows of tables [L * S * K, ...]
        probes_at_g, probes_gD, order_g               rows of tables [S * G, ...]
        conditions_at_c, conditions_cP                rows of a table [S * C, P]

    For a plan that adds v at layer 5, in slot 2 of 65: `offsets_at_n` is [5 * 65 + 2], `offsets_nD`
    is [v], and `work_LsW[5, 0]` is [0, 1, 0, 0].
    """
    work_LsW = np.zeros((shape.layers, len(plans), len(Work)), np.int32)
    offsets, ops, probes, conditions = (dict[int, Any]() for _ in range(4))
    order: list[int] = []
    for s, (slot, plan) in enumerate(plans.items()):
        for site in plan.sites:
            if len(site.ops) > shape.depth:
                raise ValueError(f"{len(site.ops)} operations do not fit into {shape.depth} places")
            at = site.layer * shape.slots + slot
            work_LsW[site.layer, s, Work.DEPTH] = len(site.ops)
            ops |= dict(enumerate(site.ops, at * shape.depth))
            if site.offset is not None:
                work_LsW[site.layer, s, Work.HAS_OFFSET] = 1
                offsets[at] = site.offset
        layers = [probe.layer for probe in plan.probes]
        np.add.at(work_LsW[:, s, Work.PROBE_COUNT], layers, 1)
        order += sorted(range(len(layers)), key=layers.__getitem__)
        probes |= dict(enumerate(plan.probes, slot * shape.probes))
        conditions |= dict(enumerate(plan.conditions, slot * shape.probes))
    counts_Ls = work_LsW[..., Work.PROBE_COUNT]
    work_LsW[..., Work.FIRST_PROBE] = counts_Ls.cumsum(0) - counts_Ls
    return (
        np.array(list(plans)),
        work_LsW,
        np.array(list(offsets), np.int64),
        _stack(list(offsets.values()), shape.width),
        np.array(list(ops), np.int64),
        _stack([op.direction for op in ops.values()], shape.width),
        _stack([op.numbers for op in ops.values()], len(UNCHANGED)),
        np.array(list(probes), np.int64),
        _stack([probe.direction for probe in probes.values()], shape.width),
        np.array(order, np.int32),
        np.array(list(conditions), np.int64),
        _stack([condition.numbers for condition in conditions.values()], CONDITION_NUMBERS),
    )


def _stack(rows: list[Any], width: int) -> npt.NDArray[np.float32]:
    return np.array(rows, np.float32).reshape(-1, width)
