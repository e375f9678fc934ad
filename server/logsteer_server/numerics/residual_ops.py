"""The arithmetic of steering. Every engine steers with this, so they agree.

Axis letters: T tokens, D width of an activation, K operations of a site, P parameters.
"""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from logsteer_server.contract.plan import ResidualOp

UNCHANGED = (0.0, 0.0, 1.0, -inf, inf, 1.0, 0.0, -1.0)
"""The `numbers` of a `ResidualOp` that changes nothing, in their order."""


def pack_ops(ops: Sequence[ResidualOp], depth: int, width: int) -> tuple[Tensor, Tensor]:
    """Return directions [K, D] and numbers [K, P] of a site's operations, float32, K = `depth`.

    Places behind the last operation change nothing. Errors: ValueError for more than `depth`.
    """
    if len(ops) > depth:
        raise ValueError(f"{len(ops)} operations do not fit into {depth} places")
    directions_KD = torch.zeros((depth, width))
    numbers_KP = torch.tensor(UNCHANGED).repeat(depth, 1)
    for k, op in enumerate(ops):
        directions_KD[k] = torch.tensor(op.direction)
        numbers_KP[k] = torch.tensor(op.numbers)
    return directions_KD, numbers_KP


def change_stream(
    stream_TD: Tensor,
    directions_TKD: Tensor,
    numbers_TKP: Tensor,
    open_TK: Tensor | None = None,
) -> Tensor:
    """Return what K operations in turn add to each token's activation: float32 [T, D].

    Args:
        stream_TD: activations, float32.
        directions_TKD: unit vectors, or zeros for a place without an operation.
        numbers_TKP: `ResidualOp.numbers` of each operation.
        open_TK: whether each operation acts; None: all of them do.

    The formula is `logsteer_server.contract.plan.ResidualOp`'s. For x = (3, 4) and u = (1, 0):

        ablate, c' = 0              x' = (0, 4)     returns (-3, 0)
        clamp, c' = min(c, 1)       x' = (1, 4)     returns (-2, 0)
        rotate by 90 degrees        x' = (5, 0)     returns (2, -4); x is 53 degrees from u

    """
    changed_TD = stream_TD
    for k in range(directions_TKD.shape[1]):
        change_TD = _change_once(changed_TD, directions_TKD[:, k], numbers_TKP[:, k])
        if open_TK is not None:
            change_TD = torch.where(open_TK[:, k, None], change_TD, 0.0)
        changed_TD = changed_TD + change_TD
    return changed_TD - stream_TD


def _change_once(x_TD: Tensor, u_TD: Tensor, numbers_TP: Tensor) -> Tensor:
    base_T1, per_norm_T1, per_component_T1, low_T1, high_T1, keep_T1, degrees_T1, _ = (
        numbers_TP.unsqueeze(-1).unbind(1)
    )
    component_T1 = (x_TD * u_TD).sum(-1, keepdim=True)
    norm_T1 = x_TD.norm(dim=-1, keepdim=True)
    wanted_T1 = base_T1 + per_norm_T1 * norm_T1 + per_component_T1 * component_T1
    wanted_T1 = torch.minimum(torch.maximum(wanted_T1, low_T1), high_T1)
    across_TD = x_TD - component_T1 * u_TD
    across_norm_T1 = across_TD.norm(dim=-1, keepdim=True)
    # Along u exactly, there is no plane to turn in, and x stays as it is.
    turns_T1 = (degrees_T1 != 0) & (across_norm_T1 > 1e-6 * norm_T1)
    cosine_T1, sine_T1 = torch.deg2rad(degrees_T1).cos(), torch.deg2rad(degrees_T1).sin()
    along_u_T1 = (degrees_T1 > 0) & (component_T1 >= norm_T1 * cosine_T1)
    against_u_T1 = (degrees_T1 < 0) & (component_T1 <= -norm_T1 * cosine_T1)
    turned_T1 = component_T1 * cosine_T1 + across_norm_T1 * sine_T1
    turned_T1 = torch.where(along_u_T1, norm_T1, torch.where(against_u_T1, -norm_T1, turned_T1))
    rest_T1 = across_norm_T1 * cosine_T1 - component_T1 * sine_T1
    rest_T1 = torch.where(along_u_T1 | against_u_T1, 0.0, rest_T1)
    wanted_T1 = torch.where(turns_T1, turned_T1, wanted_T1)
    # Not by 0 where nothing turns: a derivative would be 0 times infinity there.
    divisor_T1 = torch.where(turns_T1, across_norm_T1, 1.0)
    keep_T1 = torch.where(turns_T1, rest_T1 / divisor_T1, keep_T1)
    return (keep_T1 - 1) * across_TD + (wanted_T1 - component_T1) * u_TD
