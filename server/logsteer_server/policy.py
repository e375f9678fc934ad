"""Sampling policies: the distribution that a policy draws from, and the draw.

The engine that samples and whoever wants to know what it sampled from use the same functions.
Axis letters: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from logsteer_server.engines.base import Policy

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them leaves nothing but the largest logit."""


@dataclass(frozen=True)
class ShapedRows:
    """What R rows are drawn from: q is the softmax of `logits_RV`.

    These are the logits at the row's temperature, minus infinity where a token cannot be drawn.
    `head_mass_R` is the mass that the cut at `top_p` left of 1.
    """

    logits_RV: Tensor
    head_mass_R: Tensor

    @cached_property
    def q_RV(self) -> Tensor:
        """The probability of every token, per row."""
        return self.logits_RV.softmax(-1)

    def log_q(self, ids_R: Tensor) -> Tensor:
        """log q of one token per row; it does not underflow as q does."""
        own_R = self.logits_RV.gather(-1, ids_R[:, None]).squeeze(-1)
        return own_R - self.logits_RV.logsumexp(-1)


def is_greedy(policy: Policy) -> bool:
    """Whether the most probable token is certain."""
    return policy.temperature < GREEDY_BELOW


def _cuts(policy: Policy) -> bool:
    return policy.top_k > 0 or policy.top_p < 1 or policy.min_p > 0


def shape_rows(logits_RV: Tensor, policies: Sequence[Policy]) -> ShapedRows:
    """q of every token under each row's policy, each row's sum 1; float32, or float64 for float64.

    The order is vLLM's: softmax at the temperature; without tokens less probable than `min_p`
    times the most probable; the `top_k` most probable; of these, renormalised, the smallest set of
    most probable tokens whose mass reaches `top_p`; renormalised. Of equally probable tokens those
    with smaller ids come first.
    """
    logits_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    device = logits_RV.device
    best_R = logits_RV.argmax(-1)
    greedy = [r for r, policy in enumerate(policies) if is_greedy(policy)]
    cut = [r for r, policy in enumerate(policies) if _cuts(policy) and not is_greedy(policy)]
    temperatures = [1.0 if is_greedy(p) else p.temperature for p in policies]
    temperature_R = torch.tensor(temperatures, dtype=logits_RV.dtype, device=device)
    # The largest logit is taken off first, so that a small temperature cannot overflow.
    logits_RV = (logits_RV - logits_RV.gather(-1, best_R[:, None])) / temperature_R[:, None]
    head_mass_R = torch.ones_like(temperature_R)
    if greedy:
        rows = torch.tensor(greedy, device=device)
        is_best_RV = torch.nn.functional.one_hot(best_R[rows], logits_RV.shape[-1]).bool()
        logits_RV[rows] = logits_RV[rows].masked_fill(~is_best_RV, -inf)
    if cut:
        rows = torch.tensor(cut, device=device)
        kept_RV, head_mass_R[rows] = _find_kept(logits_RV[rows], [policies[r] for r in cut])
        logits_RV[rows] = logits_RV[rows].masked_fill(~kept_RV, -inf)
    return ShapedRows(logits_RV, head_mass_R)


def _find_kept(logits_RV: Tensor, policies: Sequence[Policy]) -> tuple[Tensor, Tensor]:
    """Which tokens the cuts leave [R, V], and the mass that the last of them leaves of 1 [R]."""
    device, size = logits_RV.device, logits_RV.shape[-1]
    min_p_R1 = torch.tensor([p.min_p for p in policies], device=device, dtype=logits_RV.dtype)[
        :, None
    ]
    top_k_R1 = torch.tensor([p.top_k or size for p in policies], device=device)[:, None]
    # A sum of rounded numbers may reach 1 too early; without a cut, nothing does.
    limits = [p.top_p if p.top_p < 1 else 2.0 for p in policies]
    top_p_R1 = torch.tensor(limits, device=device, dtype=torch.float64)[:, None]
    sorted_RV, order_RV = logits_RV.softmax(-1).sort(dim=-1, descending=True, stable=True)
    kept_RV = sorted_RV >= min_p_R1 * sorted_RV[:, :1]
    kept_RV &= torch.arange(size, device=device) < top_k_R1
    sorted_RV = _renormalize(sorted_RV * kept_RV)
    mass_before_RV = sorted_RV.double().cumsum(-1) - sorted_RV.double()
    kept_RV &= mass_before_RV < top_p_R1
    head_mass_R = (sorted_RV * kept_RV).double().sum(-1).clamp(max=1.0).to(logits_RV)
    return torch.zeros_like(kept_RV).scatter(-1, order_RV, kept_RV), head_mass_R


def _renormalize(p_RV: Tensor) -> Tensor:
    return p_RV / p_RV.sum(-1, keepdim=True)


def draw_rows(q_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token that each row's uniform number in [0, 1) draws from q, by its inverse CDF: [R]."""
    cumulated_RV = q_RV.double().cumsum(-1)
    points_R1 = uniform_R.to(q_RV.device, torch.float64)[:, None] * cumulated_RV[:, -1:]
    # `right`: the first token whose sum lies above the point, so never one with q = 0.
    ids_R = torch.searchsorted(cumulated_RV, points_R1, right=True).squeeze(-1)
    return ids_R.clamp(max=q_RV.shape[-1] - 1)
