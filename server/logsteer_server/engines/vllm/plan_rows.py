"""A plan as the rows of the tables that it fills, ready to go to a device in one copy.

Axis letters: L layers, S slots, D width, K operations, P numbers of an operation or of a condition,
G probes, C conditions, W what a layer has of a plan; lower case n: offsets, m: operations.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.plan import SteeringPlan
from logsteer_server.numerics.probes import CONDITION_NUMBERS
from logsteer_server.numerics.residual_ops import UNCHANGED


class Work(IntEnum):
    """What a layer has to do of a plan, int32: how many operations; whether an offset is added; its
    probes, from which on and how many, in the order of layers.
    """

    DEPTH = 0
    HAS_OFFSET = 1
    FIRST_PROBE = 2
    PROBE_COUNT = 3


@dataclass(frozen=True, slots=True, eq=False)
class TableShape:
    """Sizes of the tables: layers, slots (the empty one included), operations, probes, width."""

    layers: int
    slots: int
    depth: int
    probes: int
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class PlanRows:
    """The rows of one plan.

    `offsets_at_n` and `ops_at_m` count the rows of tables [L * S, D] and [L * S * K, D].
    """

    offsets_at_n: npt.NDArray[np.int64]
    ops_at_m: npt.NDArray[np.int64]
    offsets_nD: npt.NDArray[np.float32]
    directions_mD: npt.NDArray[np.float32]
    numbers_mP: npt.NDArray[np.float32]
    work_LW: npt.NDArray[np.int32]
    probes_GD: npt.NDArray[np.float32]
    order_G: npt.NDArray[np.int32]
    conditions_CP: npt.NDArray[np.float32]

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        """All of them, in the order of the fields."""
        return [getattr(self, name) for name in self.__slots__]


def pack_plan(plan: SteeringPlan, slot: int, shape: TableShape) -> PlanRows:
    """Return the rows of a plan in a slot. Errors: ValueError for more operations than fit.

    A plan that adds v at layer 5, in slot 2 of 65: `offsets_at_n` is [5 * 65 + 2], `offsets_nD` is
    [v], and `work_LW[5]` is [0, 1, 0, 0].
    """
    offsets = [(site.layer, site.offset) for site in plan.sites if site.offset is not None]
    ops = [(site.layer, k, op) for site in plan.sites for k, op in enumerate(site.ops)]
    work_LW = np.zeros((shape.layers, len(Work)), np.int32)
    for site in plan.sites:
        if len(site.ops) > shape.depth:
            raise ValueError(f"{len(site.ops)} operations do not fit into {shape.depth} places")
        work_LW[site.layer, Work.DEPTH] = len(site.ops)
        work_LW[site.layer, Work.HAS_OFFSET] = site.offset is not None
    layers_G = np.array([probe.layer for probe in plan.probes], np.int64)
    order_G = np.argsort(layers_G, kind="stable")
    counts_L = np.bincount(layers_G, minlength=shape.layers)
    work_LW[:, Work.PROBE_COUNT] = counts_L
    work_LW[:, Work.FIRST_PROBE] = counts_L.cumsum() - counts_L
    width = shape.width
    return PlanRows(
        np.array([layer * shape.slots + slot for layer, _ in offsets], np.int64),
        np.array([(i * shape.slots + slot) * shape.depth + k for i, k, _ in ops], np.int64),
        _stack([offset for _, offset in offsets], width),
        _stack([op.direction for _, _, op in ops], width),
        _stack([op.numbers for _, _, op in ops], len(UNCHANGED)),
        work_LW,
        _stack([probe.direction for probe in plan.probes], width),
        order_G.astype(np.int32),
        _stack([condition.numbers for condition in plan.conditions], CONDITION_NUMBERS),
    )


def _stack(rows: list[Any], width: int) -> npt.NDArray[np.float32]:
    return np.array(rows, np.float32).reshape(-1, width)
