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
"""Most probable tokens that are looked at before all tokens are sorted."""


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
        """Return log q of one token per row; it does not underflow as q does."""
        own_R = self.logits_RV.gather(-1, ids_R[:, None]).squeeze(-1)
        return own_R - self.logits_RV.logsumexp(-1)


def is_greedy(policy: Policy) -> bool:
    """Return whether the policy draws the most probable token for certain."""
    return policy.temperature < GREEDY_BELOW


def _has_cut(policy: Policy) -> bool:
    return policy.top_k > 0 or policy.top_p < 1 or policy.min_p > 0


def shape_rows(logits_RV: Tensor, policies: Sequence[Policy]) -> ShapedRows:
    """Return q of every token under each row's policy; float32, or float64 for float64.

    The order is vLLM's: softmax at the temperature; without tokens less probable than `min_p`
    times the most probable; the `top_k` most probable; of these, renormalised, the smallest set of
    most probable tokens whose mass reaches `top_p`; renormalised. Of equally probable tokens those
    with smaller ids come first.
    """
    logits_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    device = logits_RV.device
    best_R = logits_RV.argmax(-1)
    greedy = [r for r, policy in enumerate(policies) if is_greedy(policy)]
    cut = [r for r, policy in enumerate(policies) if _has_cut(policy) and not is_greedy(policy)]
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
        support_RV, head_mass_R[rows] = _find_support(logits_RV[rows], [policies[r] for r in cut])
        logits_RV[rows] = logits_RV[rows].masked_fill(~support_RV, -inf)
    return ShapedRows(logits_RV, head_mass_R)


@dataclass(frozen=True, slots=True)
class _Thresholds:
    """Where the distribution of each of R rows is cut."""

    min_p_R1: Tensor
    top_k_R1: Tensor
    top_p_R1: Tensor

    @classmethod
    def of(cls, policies: Sequence[Policy], like: Tensor) -> "_Thresholds":
        """Return the thresholds of policies; those that cut nothing are out of reach.

        `like` has the vocabulary's size, dtype and device.
        """
        device = like.device
        min_p = torch.tensor([p.min_p for p in policies], device=device, dtype=like.dtype)
        top_k = torch.tensor([p.top_k or like.shape[-1] for p in policies], device=device)
        # A sum of rounded numbers may reach 1 too early; without a cut, nothing does.
        top_p = [p.top_p if p.top_p < 1 else 2.0 for p in policies]
        top_p_R = torch.tensor(top_p, device=device, dtype=torch.float64)
        return cls(min_p[:, None], top_k[:, None], top_p_R[:, None])

    def pick(self, rows: Tensor) -> "_Thresholds":
        """Return the thresholds of these rows."""
        return _Thresholds(self.min_p_R1[rows], self.top_k_R1[rows], self.top_p_R1[rows])

    def cut(self, sorted_RN: Tensor, others_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the N most probable tokens can be drawn, and the mass `top_p` leaves [R].

        With min_p 0.2, top_p 0.7 and no top_k, a row is cut like this:

            sorted_RN         0.40  0.30  0.20  0.06  0.04
            min_p             0.40  0.30  0.20               from 0.2 * 0.40 = 0.08 on
            renormalised      0.44  0.33  0.22               over their total of 0.9
            mass in front     0.00  0.44  0.78
            top_p             0.44  0.33                     where the mass in front is below 0.7

        The two most probable tokens can be drawn, and the mass is 0.78.

        `others_R` is the mass of all other tokens. It is part of the total where neither `min_p`
        nor `top_k` cuts among the N; that they cut nothing beyond is for the caller to see.
        """
        support_RN = sorted_RN >= self.min_p_R1 * sorted_RN[:, :1]
        support_RN &= torch.arange(sorted_RN.shape[-1], device=sorted_RN.device) < self.top_k_R1
        total_R = (sorted_RN * support_RN).sum(-1) + torch.where(support_RN[:, -1], others_R, 0.0)
        mass_RN = (sorted_RN * support_RN / total_R[:, None]).double()
        support_RN &= mass_RN.cumsum(-1) - mass_RN < self.top_p_R1
        return support_RN, (mass_RN * support_RN).sum(-1).clamp(max=1.0).to(sorted_RN)


def _find_support(logits_RV: Tensor, policies: Sequence[Policy]) -> tuple[Tensor, Tensor]:
    """Return which tokens can be drawn [R, V], and the mass that `top_p` leaves of 1 [R].

    The HEAD most probable tokens decide that for most rows, and finding them costs less than
    sorting all.
    """
    p_RV = logits_RV.softmax(-1)
    thresholds = _Thresholds.of(policies, logits_RV)
    size = p_RV.shape[-1]
    if size <= HEAD:
        return _sort_and_cut(p_RV, thresholds)
    head_RH = p_RV.topk(HEAD).values
    support_RH, mass_R = thresholds.cut(head_RH, p_RV.sum(-1) - head_RH.sum(-1))
    last_R1 = support_RH.sum(-1, keepdim=True) - 1
    least_R1 = head_RH.gather(-1, last_R1)
    support_RV = p_RV >= least_R1
    # Not decided: where a cut lies beyond the head, or between tokens that are equally probable.
    next_R1 = head_RH.gather(-1, (last_R1 + 1).clamp(max=HEAD - 1))
    min_p_R1, top_k_R1 = thresholds.min_p_R1, thresholds.top_k_R1
    survives_R1 = (head_RH[:, -1:] >= min_p_R1 * head_RH[:, :1]) & (top_k_R1 > HEAD)
    is_cut_R1 = (min_p_R1 > 0) | (top_k_R1 < size)
    is_open_R1 = (next_R1 == least_R1) | (survives_R1 & is_cut_R1)
    rows = is_open_R1.squeeze(-1).nonzero().squeeze(-1)
    if len(rows):
        support_RV[rows], mass_R[rows] = _sort_and_cut(p_RV[rows], thresholds.pick(rows))
    return support_RV, mass_R


def _sort_and_cut(p_RV: Tensor, thresholds: _Thresholds) -> tuple[Tensor, Tensor]:
    """Return what `_find_support` does, for any row, by sorting all tokens."""
    sorted_RV, order_RV = p_RV.sort(dim=-1, descending=True, stable=True)
    support_RV, mass_R = thresholds.cut(sorted_RV, torch.zeros_like(sorted_RV[:, 0]))
    return torch.zeros_like(support_RV).scatter(-1, order_RV, support_RV), mass_R


def draw_rows(q_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return the token that each row's uniform number in [0, 1) draws from q [R]: its inverse CDF.

    From q = 0.5, 0.2, 0.3 the numbers 0.1, 0.5 and 0.69 draw the tokens 0, 1 and 1.
    """
    cumulated_RV = q_RV.double().cumsum(-1)
    points_R1 = uniform_R.to(q_RV.device, torch.float64)[:, None] * cumulated_RV[:, -1:]
    # `right`: the first token whose sum lies above the point, so never one with q = 0.
    ids_R = torch.searchsorted(cumulated_RV, points_R1, right=True).squeeze(-1)
    return ids_R.clamp(max=q_RV.shape[-1] - 1)
