"""The arithmetic of probes and conditions. Every engine reads and decides with this.

Axis letters: T tokens, D width of an activation, N pairs of a token and a probe, K operations, P
numbers of a condition.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logsteer_server.contract.plan import Condition

READINGS = 4
"""Numbers of a reading: c and |x| before a change, then after it."""
CONDITION_NUMBERS = 5
"""Numbers of a condition: `Condition.numbers`."""

Numbers = TypeVar("Numbers", Tensor, npt.NDArray[np.float32])


def read_components(stream_ND: Tensor, directions_ND: Tensor) -> Tensor:
    """Return c = x . u and |x| of each activation x and unit vector u: float32 [N, 2].

    For x = (3, 4) and u = (1, 0): (3, 5). With activations [T, 1, D] and directions [T, G, D], of
    each token by each of its own: [T, G, 2].
    """
    x_ND = stream_ND.float()
    components_N = (x_ND * directions_ND).sum(-1)
    return torch.stack([components_N, x_ND.norm(dim=-1).expand_as(components_N)], dim=-1)


def pack_conditions(conditions: Sequence[Condition]) -> Tensor:
    """Return the numbers of conditions: float32 [C, P]."""
    packed = [condition.numbers for condition in conditions]
    return torch.tensor(packed, dtype=torch.float32).reshape(-1, CONDITION_NUMBERS)


def hold(
    components: Numbers, norms: Numbers, above: Numbers, below: Numbers, relative: Numbers
) -> Numbers:
    """Return where above < reading < below, of c or, where `relative`, of c / |x|.

    All of one shape, float32. A reading that is no number passes nowhere.
    """
    scale = relative * norms + (1 - relative)
    return (components > above * scale) & (components < below * scale)  # type: ignore[return-value]


def hold_all(
    conditions: Sequence[Condition], readings_TGR: npt.NDArray[np.float32]
) -> npt.NDArray[np.bool_]:
    """Return where each of C conditions holds of its probe's reading: bool [T, C]."""
    if not conditions:
        return np.zeros((len(readings_TGR), 0), dtype=bool)
    own_TCR = readings_TGR[:, [condition.probe for condition in conditions]]
    with np.errstate(invalid="ignore", over="ignore"):
        numbers_CP = np.array([condition.numbers for condition in conditions], dtype=np.float32)
        found_TC = hold(own_TCR[..., 0], own_TCR[..., 1], *numbers_CP[:, 1:4].T)
    return np.asarray(found_TC, dtype=bool)
