"""Sampling policies: the distribution that a policy draws from, and the draw.

The engine that samples and whoever wants to know what it sampled from use the same functions.
Axis letters: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them leaves nothing but the largest logit."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How one row is sampled; temperature 0 is greedy, the other defaults cut nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is certain."""
        return self.temperature < GREEDY_BELOW

    @property
    def cuts(self) -> bool:
        """Whether tokens are excluded."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def shape_rows(logits_RV: Tensor, policies: Sequence[Policy]) -> Tensor:
    """q of every token under each row's policy: float32 [R, V], each row's sum 1.

    The order is vLLM's: softmax at the temperature; without tokens less probable than `min_p`
    times the most probable; the `top_k` most probable; of these, renormalised, the smallest set of
    most probable tokens whose mass reaches `top_p`; renormalised. Of equally probable tokens those
    with smaller ids come first.
    """
    logits_RV = logits_RV.float()
    device = logits_RV.device
    best_R = logits_RV.argmax(-1)
    temperature_R = torch.tensor([1.0 if p.is_greedy else p.temperature for p in policies])
    # The largest logit is taken off first, so that a small temperature cannot overflow.
    shifted_RV = logits_RV - logits_RV.gather(-1, best_R[:, None])
    q_RV = (shifted_RV / temperature_R.to(device)[:, None]).softmax(-1)
    greedy = [r for r, policy in enumerate(policies) if policy.is_greedy]
    if greedy:
        rows = torch.tensor(greedy, device=device)
        q_RV[rows] = torch.nn.functional.one_hot(best_R[rows], q_RV.shape[-1]).float()
    cut = [r for r, policy in enumerate(policies) if policy.cuts and not policy.is_greedy]
    if cut:
        rows = torch.tensor(cut, device=device)
        q_RV[rows] = _cut_rows(q_RV[rows], [policies[r] for r in cut])
    return q_RV


def _cut_rows(p_RV: Tensor, policies: Sequence[Policy]) -> Tensor:
    device, size = p_RV.device, p_RV.shape[-1]
    min_p_R1 = torch.tensor([p.min_p for p in policies], device=device)[:, None]
    top_k_R1 = torch.tensor([p.top_k or size for p in policies], device=device)[:, None]
    # A sum of rounded numbers may reach 1 too early; without a cut, nothing does.
    limits = [p.top_p if p.top_p < 1 else 2.0 for p in policies]
    top_p_R1 = torch.tensor(limits, device=device, dtype=torch.float64)[:, None]
    sorted_RV, order_RV = p_RV.sort(dim=-1, descending=True, stable=True)
    kept_RV = sorted_RV >= min_p_R1 * sorted_RV[:, :1]
    kept_RV &= torch.arange(size, device=device) < top_k_R1
    sorted_RV = _renormalize(sorted_RV * kept_RV)
    mass_before_RV = sorted_RV.double().cumsum(-1) - sorted_RV.double()
    sorted_RV = _renormalize(sorted_RV * (mass_before_RV < top_p_R1))
    return torch.zeros_like(p_RV).scatter(-1, order_RV, sorted_RV)


def _renormalize(p_RV: Tensor) -> Tensor:
    return p_RV / p_RV.sum(-1, keepdim=True)


def draw_rows(q_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token that each row's uniform number in [0, 1) draws from q, by its inverse CDF: [R]."""
    cumulated_RV = q_RV.double().cumsum(-1)
    points_R1 = uniform_R.to(q_RV.device, torch.float64)[:, None] * cumulated_RV[:, -1:]
    # `right`: the first token whose sum lies above the point, so never one with q = 0.
    ids_R = torch.searchsorted(cumulated_RV, points_R1, right=True).squeeze(-1)
    return ids_R.clamp(max=q_RV.shape[-1] - 1)
