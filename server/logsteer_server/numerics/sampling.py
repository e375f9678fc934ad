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

from logsteer_server.contract.jobs import Policy

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them leaves nothing but the largest logit."""

HEAD = 512
"""Most probable tokens that are looked at before all of them are put in order."""


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


@dataclass(frozen=True, slots=True)
class _Limits:
    """What each of R rows is cut at."""

    min_p_R1: Tensor
    top_k_R1: Tensor
    top_p_R1: Tensor

    @classmethod
    def of(cls, policies: Sequence[Policy], like: Tensor) -> "_Limits":
        """The limits of policies over a vocabulary; those that cut nothing are out of reach."""
        device = like.device
        min_p = torch.tensor([p.min_p for p in policies], device=device, dtype=like.dtype)
        top_k = torch.tensor([p.top_k or like.shape[-1] for p in policies], device=device)
        # A sum of rounded numbers may reach 1 too early; without a cut, nothing does.
        top_p = [p.top_p if p.top_p < 1 else 2.0 for p in policies]
        top_p_R = torch.tensor(top_p, device=device, dtype=torch.float64)
        return cls(min_p[:, None], top_k[:, None], top_p_R[:, None])

    def pick(self, rows: Tensor) -> "_Limits":
        """The limits of these rows."""
        return _Limits(self.min_p_R1[rows], self.top_k_R1[rows], self.top_p_R1[rows])

    def cut(self, sorted_RN: Tensor, rest_R: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the N most probable tokens are kept, and the mass `top_p` leaves of 1 [R].

        `rest_R` is the mass of all other tokens; it counts where neither `min_p` nor `top_k` cuts
        among the N, and is assumed to survive both then.
        """
        kept_RN = sorted_RN >= self.min_p_R1 * sorted_RN[:, :1]
        kept_RN &= torch.arange(sorted_RN.shape[-1], device=sorted_RN.device) < self.top_k_R1
        total_R = (sorted_RN * kept_RN).sum(-1) + torch.where(kept_RN[:, -1], rest_R, 0.0)
        mass_RN = (sorted_RN * kept_RN / total_R[:, None]).double()
        kept_RN &= mass_RN.cumsum(-1) - mass_RN < self.top_p_R1
        return kept_RN, (mass_RN * kept_RN).sum(-1).clamp(max=1.0).to(sorted_RN)


def _find_kept(logits_RV: Tensor, policies: Sequence[Policy]) -> tuple[Tensor, Tensor]:
    """Which tokens the cuts leave [R, V], and the mass that the last of them leaves of 1 [R].

    Of most rows the HEAD most probable tokens decide it, and finding these costs less than putting
    all in order.
    """
    p_RV = logits_RV.softmax(-1)
    limits = _Limits.of(policies, logits_RV)
    size = p_RV.shape[-1]
    if size <= HEAD:
        return _cut_in_order(p_RV, limits)
    head_RH = p_RV.topk(HEAD).values
    kept_RH, mass_R = limits.cut(head_RH, p_RV.sum(-1) - head_RH.sum(-1))
    last_R1 = kept_RH.sum(-1, keepdim=True) - 1
    least_R1 = head_RH.gather(-1, last_R1)
    kept_RV = p_RV >= least_R1
    # Not decided: where a cut lies beyond the head, or between tokens that are equally probable.
    next_R1 = head_RH.gather(-1, (last_R1 + 1).clamp(max=HEAD - 1))
    survives_R1 = (head_RH[:, -1:] >= limits.min_p_R1 * head_RH[:, :1]) & (limits.top_k_R1 > HEAD)
    is_cut_R1 = (limits.min_p_R1 > 0) | (limits.top_k_R1 < size)
    is_open_R1 = (next_R1 == least_R1) | (survives_R1 & is_cut_R1)
    rows = is_open_R1.squeeze(-1).nonzero().squeeze(-1)
    if len(rows):
        kept_RV[rows], mass_R[rows] = _cut_in_order(p_RV[rows], limits.pick(rows))
    return kept_RV, mass_R


def _cut_in_order(p_RV: Tensor, limits: _Limits) -> tuple[Tensor, Tensor]:
    """As `_find_kept`, for any row: all tokens are put in order."""
    sorted_RV, order_RV = p_RV.sort(dim=-1, descending=True, stable=True)
    kept_RV, mass_R = limits.cut(sorted_RV, torch.zeros_like(sorted_RV[:, 0]))
    return torch.zeros_like(kept_RV).scatter(-1, order_RV, kept_RV), mass_R


def draw_rows(q_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token that each row's uniform number in [0, 1) draws from q, by its inverse CDF: [R]."""
    cumulated_RV = q_RV.double().cumsum(-1)
    points_R1 = uniform_R.to(q_RV.device, torch.float64)[:, None] * cumulated_RV[:, -1:]
    # `right`: the first token whose sum lies above the point, so never one with q = 0.
    ids_R = torch.searchsorted(cumulated_RV, points_R1, right=True).squeeze(-1)
    return ids_R.clamp(max=q_RV.shape[-1] - 1)
