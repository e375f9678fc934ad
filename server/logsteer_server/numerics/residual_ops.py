"""The arithmetic of steering, probes and conditions, shared by all engines.

Axis letters: T tokens, D width of an activation, N pairs of a token and a probe, K operations of a
site, P numbers of an operation or a condition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logsteer_server.contract.plan import Condition, ResidualOp

UNCHANGED = (0.0, 0.0, 1.0, -inf, inf, 1.0, 0.0, -1.0)
"""The `numbers` of a `ResidualOp` that changes nothing, in their order."""


def pack_ops(ops: Sequence[ResidualOp], width: int) -> tuple[Tensor, Tensor]:
    """Return directions [K, D] and numbers [K, P] of a site's operations, float32."""
    directions_KD = torch.tensor(np.array([op.direction for op in ops]), dtype=torch.float32)
    numbers_KP = torch.tensor([op.numbers for op in ops], dtype=torch.float32)
    return directions_KD.reshape(-1, width), numbers_KP.reshape(-1, len(UNCHANGED))


@dataclass(frozen=True, slots=True)
class OpForm:
    """Which terms of the formula the k-th operation needs, over all tokens of a step.

    The other terms have no effect for any token; leaving them out changes a finite result by at
    most one rounding.
    """

    uses_norm: bool = True
    clips: bool = True
    keeps: bool = True
    turns: bool = True


ALL_TERMS = OpForm()


def find_forms(numbers_TKP: Tensor) -> tuple[OpForm, ...]:
    """Return which terms are needed for each of the K operations of tokens, from their numbers."""
    _, per_norm_TK, _, low_TK, high_TK, keep_TK, degrees_TK, _ = numbers_TKP.unbind(-1)
    counts = (per_norm_TK != 0, (low_TK > -inf) | (high_TK < inf), keep_TK != 1, degrees_TK != 0)
    return tuple(OpForm(*terms) for terms in torch.stack([c.any(0) for c in counts], 1).tolist())


def change_stream(
    stream_TD: Tensor,
    directions_TKD: Tensor,
    numbers_TKP: Tensor,
    open_TK: Tensor | None = None,
    forms: tuple[OpForm, ...] | None = None,
) -> Tensor:
    """Return the change of each token's activation by K operations in turn: float32 [T, D].

    Args:
        stream_TD: activations, float32.
        directions_TKD: unit vectors, or zeros without an operation; [1, K, D] if all tokens have
            the same.
        numbers_TKP: `ResidualOp.numbers` of each operation; or [1, K, P].
        open_TK: whether each operation acts, by its condition; None: all act.
        forms: the needed terms, from `find_forms`; None: all terms are computed.

    The formula is `logsteer_server.contract.plan.ResidualOp`'s. For x = (3, 4) and u = (1, 0):

        ablate, c' = 0              x' = (0, 4)     returns (-3, 0)
        clamp, c' = min(c, 1)       x' = (1, 4)     returns (-2, 0)
        rotate by 90 degrees        x' = (5, 0)     returns (2, -4); x is 53 degrees from u

    """
    changed_TD, columns = stream_TD, numbers_TKP.unbind(-1)
    for k in range(directions_TKD.shape[1]):
        form = ALL_TERMS if forms is None else forms[k]
        open_T1 = None if open_TK is None else open_TK[:, k : k + 1]
        numbers_T1 = [columns_TK[:, k : k + 1] for columns_TK in columns]
        changed_TD = _change_once(changed_TD, directions_TKD[:, k], numbers_T1, open_T1, form)
    return changed_TD - stream_TD


def _change_once(
    x_TD: Tensor,
    u_TD: Tensor,
    numbers_T1: Sequence[Tensor],
    open_T1: Tensor | None,
    form: OpForm,
) -> Tensor:
    base_T1, per_norm_T1, per_component_T1, low_T1, high_T1, keep_T1, degrees_T1, _ = numbers_T1
    component_T1 = (x_TD * u_TD).sum(-1, keepdim=True)
    wanted_T1 = base_T1
    if form.uses_norm:
        wanted_T1 = wanted_T1 + per_norm_T1 * x_TD.norm(dim=-1, keepdim=True)
    wanted_T1 = wanted_T1 + per_component_T1 * component_T1
    if form.clips:
        wanted_T1 = torch.minimum(torch.maximum(wanted_T1, low_T1), high_T1)
    if form.turns:
        wanted_T1, keep_T1 = _turn(x_TD, u_TD, component_T1, wanted_T1, keep_T1, degrees_T1)
    # A condition masks one number per token, which is cheaper than masking the width.
    along_T1 = wanted_T1 - component_T1
    if open_T1 is not None:
        along_T1 = torch.where(open_T1, along_T1, 0.0)
    if not (form.keeps or form.turns):
        return torch.addcmul(x_TD, along_T1, u_TD)
    across_T1 = keep_T1 - 1
    if open_T1 is not None:
        across_T1 = torch.where(open_T1, across_T1, 0.0)
    return x_TD + (across_T1 * (x_TD - component_T1 * u_TD) + along_T1 * u_TD)


def _turn(
    x_TD: Tensor,
    u_TD: Tensor,
    component_T1: Tensor,
    wanted_T1: Tensor,
    keep_T1: Tensor,
    degrees_T1: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the component along u and the kept share of the rest, of tokens that are rotated."""
    norm_T1 = x_TD.norm(dim=-1, keepdim=True)
    across_norm_T1 = (x_TD - component_T1 * u_TD).norm(dim=-1, keepdim=True)
    # An x along u defines no plane to rotate in, and stays as it is.
    turns_T1 = (degrees_T1 != 0) & (across_norm_T1 > 1e-6 * norm_T1)
    cosine_T1, sine_T1 = torch.deg2rad(degrees_T1).cos(), torch.deg2rad(degrees_T1).sin()
    along_u_T1 = (degrees_T1 > 0) & (component_T1 >= norm_T1 * cosine_T1)
    against_u_T1 = (degrees_T1 < 0) & (component_T1 <= -norm_T1 * cosine_T1)
    turned_T1 = component_T1 * cosine_T1 + across_norm_T1 * sine_T1
    turned_T1 = torch.where(along_u_T1, norm_T1, torch.where(against_u_T1, -norm_T1, turned_T1))
    rest_T1 = across_norm_T1 * cosine_T1 - component_T1 * sine_T1
    rest_T1 = torch.where(along_u_T1 | against_u_T1, 0.0, rest_T1)
    wanted_T1 = torch.where(turns_T1, turned_T1, wanted_T1)
    # Divide by 1 where nothing is rotated: with 0, the derivative there would be 0 times infinity.
    divisor_T1 = torch.where(turns_T1, across_norm_T1, 1.0)
    return wanted_T1, torch.where(turns_T1, rest_T1 / divisor_T1, keep_T1)


READINGS = 4
"""Numbers of a reading: c and |x| before a change, then after it."""
CONDITION_NUMBERS = 5
"""Numbers of a condition: `Condition.numbers`."""

Numbers = TypeVar("Numbers", Tensor, npt.NDArray[np.float32])


def read_components(stream_ND: Tensor, directions_ND: Tensor) -> Tensor:
    """Return c = x . u and |x| for each activation x and unit vector u: float32 [N, 2].

    For x = (3, 4) and u = (1, 0) it is (3, 5). For activations [T, 1, D] and directions [T, G, D]
    it is [T, G, 2].
    """
    x_ND = stream_ND.float()
    components_N = (x_ND * directions_ND).sum(-1)
    return torch.stack([components_N, x_ND.norm(dim=-1).expand_as(components_N)], dim=-1)


def hold(
    components: Numbers, norms: Numbers, above: Numbers, below: Numbers, relative: Numbers
) -> Numbers:
    """Return whether above < reading < below; the reading is c, or c / |x| if `relative`.

    All arguments are float32 of one shape. A NaN reading gives False.
    """
    scale = relative * norms + (1 - relative)
    return (components > above * scale) & (components < below * scale)  # type: ignore[return-value]


def hold_all(
    conditions: Sequence[Condition], readings_TGR: npt.NDArray[np.float32]
) -> npt.NDArray[np.bool_]:
    """Return whether each of C conditions holds for its probe's readings: bool [T, C]."""
    if not conditions:
        return np.zeros((len(readings_TGR), 0), dtype=bool)
    own_TCR = readings_TGR[:, [condition.probe for condition in conditions]]
    with np.errstate(invalid="ignore", over="ignore"):
        numbers_CP = np.array([condition.numbers for condition in conditions], dtype=np.float32)
        found_TC = hold(own_TCR[..., 0], own_TCR[..., 1], *numbers_CP[:, 1:4].T)
    return np.asarray(found_TC, dtype=bool)
