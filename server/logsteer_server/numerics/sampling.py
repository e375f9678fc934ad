"""Sampling policies: the distribution that a policy draws from.

Generation and the policy columns of scoring use the same functions; `drawing` samples from the
distribution. Axis letters: R rows, V vocabulary, N most probable tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from logsteer_server.contract.jobs import Policy

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: a division by them would leave the largest logit alone."""

LEAST = -1e18
"""Stands for minus infinity where a probability of 0 is its factor, in a gradient, too."""

HEAD = 128
"""Most probable tokens among which a cut is searched first."""
GROWTH = 8
"""Factor by which the search grows if the cut is beyond them."""


def log_softmax(logits_RV: Tensor) -> Tensor:
    """Return log p of every token, per row, in nats.

    On a CPU torch's own sums a row term by term, so that a long peaked row loses small terms:
    1.5e-5 nats at 49,152 tokens. Its `logsumexp` sums pairwise, and is off by 1.3e-6 at any length.
    """
    return logits_RV - logits_RV.logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class ShapedRows:
    """The distribution q of R rows under their policies, the softmax of `logits_RV`.

    `logits_RV`: logits at the row's temperature; minus infinity for tokens that are cut.
    `head_mass_R`: the mass that the cut at `top_p` keeps of 1.
    """

    logits_RV: Tensor
    head_mass_R: Tensor

    @cached_property
    def q_RV(self) -> Tensor:
        """The probability of every token, per row."""
        return (self.logits_RV - self.log_sum_exp_R[:, None]).exp()

    @cached_property
    def log_sum_exp_R(self) -> Tensor:
        """The log-sum-exp of each row: see `log_softmax`."""
        return self.logits_RV.logsumexp(-1)

    @cached_property
    def entropy_R(self) -> Tensor:
        """-sum q log q per row, in nats.

        With log q = s - l, for a row's logits s and their log-sum-exp l, this is l - sum q s.
        """
        # For cut tokens, minus infinity times q = 0 would be NaN.
        return self.log_sum_exp_R - (self.q_RV * self.logits_RV.clamp(min=LEAST)).sum(-1)

    def pick_logits(self, ids_R: Tensor) -> Tensor:
        """Return the logit of one token per row [R]; NaN in a row with NaN."""
        return self.logits_RV.gather(-1, ids_R[:, None]).squeeze(-1)

    def log_q(self, ids_R: Tensor) -> Tensor:
        """Return log q of one token per row; it does not underflow as q does."""
        return self.log_q_at(ids_R[:, None]).squeeze(-1)

    def log_q_at(self, ids_RK: Tensor) -> Tensor:
        """Return log q of K tokens of each row [R, K], in nats."""
        return self.logits_RV.gather(-1, ids_RK) - self.log_sum_exp_R[:, None]


def is_greedy(policy: Policy) -> bool:
    """Return whether the policy always selects the most probable token."""
    return policy.temperature < GREEDY_BELOW


def _has_cut(policy: Policy) -> bool:
    return policy.top_k > 0 or policy.top_p < 1 or policy.min_p > 0


def shape_rows(logits_RV: Tensor, policies: Sequence[Policy]) -> ShapedRows:
    """Return each row's distribution under its policy; float32, or float64 for float64 logits.

    The steps are: softmax at the temperature; cut tokens less probable than `min_p` times the most
    probable; keep the `top_k` most probable; renormalise; keep the smallest set of most probable
    tokens whose mass reaches `top_p`; renormalise. Of equally probable tokens, those with smaller
    ids come first.
    """
    dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    return PolicyRows(policies, logits_RV.shape[-1], dtype, logits_RV.device).shape(logits_RV)


class PolicyRows:
    """The policies of R rows as tensors, for the logits of any number of steps."""

    def __init__(
        self, policies: Sequence[Policy], size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        temperatures = [1.0 if is_greedy(p) else p.temperature for p in policies]
        self._temperature_R1 = torch.tensor(temperatures, dtype=dtype, device=device)[:, None]
        greedy = [r for r, policy in enumerate(policies) if is_greedy(policy)]
        cut = [r for r, policy in enumerate(policies) if _has_cut(policy) and not is_greedy(policy)]
        self._greedy = pick_rows(greedy, device) if greedy else None
        self._cut = pick_rows(cut, device) if cut else None
        self._cuts = Cuts.of([policies[r] for r in cut], size, dtype, device)

    def shape(self, logits_RV: Tensor) -> ShapedRows:
        """Return each row's distribution."""
        given_RV = logits_RV.to(self._temperature_R1.dtype)
        # The largest logit is subtracted first, so that a small temperature cannot overflow.
        shaped_RV = given_RV - given_RV.amax(-1, keepdim=True)
        shaped_RV /= self._temperature_R1
        head_mass_R = torch.ones_like(self._temperature_R1[:, 0])
        if self._greedy is not None:
            own_RV = shaped_RV[self._greedy]
            best_R1 = given_RV[self._greedy].argmax(-1, keepdim=True)
            alone_RV = torch.full_like(own_RV, -inf).scatter(
                -1, best_R1, own_RV.gather(-1, best_R1)
            )
            shaped_RV[self._greedy] = alone_RV
        if self._cut is not None:
            own_RV = shaped_RV[self._cut]
            head_mass_R[self._cut] = self._cuts.apply(own_RV)
            if not isinstance(self._cut, slice):  # of which `own_RV` is a copy
                shaped_RV[self._cut] = own_RV
        return ShapedRows(shaped_RV, head_mass_R)


def pick_rows(rows: Sequence[int], device: torch.device) -> Tensor | slice:
    """Return an index of these rows: a slice, which copies nothing, if they are contiguous."""
    first, last = rows[0], rows[-1]
    is_whole = last - first == len(rows) - 1
    return slice(first, last + 1) if is_whole else torch.tensor(rows, device=device)


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts of R rows over `size` tokens.

    `head`: the number of most probable tokens among which cuts are searched first.
    """

    size: int
    head: int
    min_p_R1: Tensor
    top_k_R1: Tensor
    top_p_R1: Tensor

    @classmethod
    def of(
        cls, policies: Sequence[Policy], size: int, dtype: torch.dtype, device: torch.device
    ) -> "Cuts":
        """Return the cuts of policies; a limit without effect is set out of reach."""
        top_k = [min(p.top_k or size, size) for p in policies]
        # One more than `top_k`, to see whether it ties with the last kept token.
        head = max(top_k) + 1 if policies and all(p.top_k for p in policies) else HEAD
        # A sum of rounded numbers may reach 1 too early; 2 is never reached.
        top_p = [p.top_p if p.top_p < 1 else 2.0 for p in policies]
        return cls(
            size,
            min(head, size),
            torch.tensor([p.min_p for p in policies], device=device, dtype=dtype)[:, None],
            torch.tensor(top_k, device=device)[:, None],
            torch.tensor(top_p, device=device, dtype=torch.float64)[:, None],
        )

    @property
    def limits(self) -> tuple[Tensor, Tensor, Tensor]:
        """`min_p`, `top_k` and `top_p` of each row, [R, 1] each."""
        return self.min_p_R1, self.top_k_R1, self.top_p_R1

    def _grow(self, rows: Tensor) -> "Cuts":
        """Return the cuts of these rows, with a larger head."""
        head = min(GROWTH * self.head, self.size)
        return Cuts(self.size, head, *(limit_R1[rows] for limit_R1 in self.limits))

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Set cut tokens to minus infinity, in place; return the mass that `top_p` keeps [R]."""
        p_RV = logits_RV.softmax(-1)
        if p_RV.is_cuda and p_RV.dtype == torch.float32 and not p_RV.requires_grad:
            from logsteer_server.numerics.cut_kernel import cut_rows  # a CPU may have no Triton

            return cut_rows(p_RV, self.limits, logits_RV)
        support_RV, mass_R = self.find_support(p_RV)
        logits_RV.masked_fill_(~support_RV, -inf)
        return mass_R

    def find_support(self, p_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens the cuts keep [R, V], and the mass that `top_p` keeps of 1 [R].

        For most rows the cut is among the `head` most probable tokens, and finding these costs less
        than a sort.
        """
        sorted_RN = p_RV.topk(self.head).values
        is_whole = self.head == self.size
        support_RN, mass_R = self._cut(sorted_RN, p_RV.sum(-1, keepdim=True, dtype=torch.float64))
        count_R1 = support_RN.sum(-1, keepdim=True)
        # A row with NaN keeps no token.
        least_R1 = sorted_RN.gather(-1, (count_R1 - 1).clamp(min=0))
        support_RV = p_RV >= least_R1
        next_R1 = sorted_RN.gather(-1, count_R1.clamp(max=self.head - 1))
        goes_on_R1 = count_R1 == self.head
        is_tied_R1 = (next_R1 == least_R1) & ~goes_on_R1
        is_open_R1 = (goes_on_R1 | self._is_open(sorted_RN)) & (not is_whole)
        # One array, because each copy from a GPU waits for it.
        flags = (is_tied_R1 + 2 * is_open_R1).squeeze(-1).tolist()
        if tied := [r for r, flag in enumerate(flags) if flag == 1]:
            rows = torch.tensor(tied, device=p_RV.device)
            kept_R1 = (support_RN[rows] & (sorted_RN[rows] == least_R1[rows])).sum(-1, keepdim=True)
            support_RV[rows] = _keep_first(p_RV[rows], least_R1[rows], kept_R1)
        if undecided := [r for r, flag in enumerate(flags) if flag > 1]:
            rows = torch.tensor(undecided, device=p_RV.device)
            support_RV[rows], mass_R[rows] = self._grow(rows).find_support(p_RV[rows])
        return support_RV, mass_R

    def _is_open(self, sorted_RN: Tensor) -> Tensor:
        """Return whether `min_p` or `top_k` may cut beyond the N most probable tokens [R, 1]."""
        survives_R1 = sorted_RN[:, -1:] >= self.min_p_R1 * sorted_RN[:, :1]
        survives_R1 &= self.top_k_R1 > self.head
        return survives_R1 & ((self.min_p_R1 > 0) | (self.top_k_R1 < self.size))

    def _cut(self, sorted_RN: Tensor, whole_R1: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the N most probable tokens the cuts keep, and the mass of `top_p` [R].

        With min_p 0.2, top_p 0.7 and no top_k, a row is cut like this:

            sorted_RN         0.40  0.30  0.20  0.06  0.04
            min_p             0.40  0.30  0.20               from 0.2 * 0.40 = 0.08 on
            mass before       0.00  0.40  0.70               of a total of 0.9
            top_p             0.40  0.30                     where it is below 0.7 * 0.9 = 0.63

        The two most probable tokens are kept, and the mass is 0.7 / 0.9 = 0.78.

        `whole_R1`: the mass of all tokens, in float64. It is the total if neither `min_p` nor
        `top_k` cuts among the N or right after them; the caller checks that they do not cut beyond.
        """
        support_RN = sorted_RN >= self.min_p_R1 * sorted_RN[:, :1]
        support_RN &= torch.arange(self.head, device=sorted_RN.device) < self.top_k_R1
        goes_on_R1 = support_RN[:, -1:] & (self.top_k_R1 > self.head)
        mass_RN = (sorted_RN * support_RN).double()
        total_R1 = torch.where(goes_on_R1, whole_R1, mass_RN.sum(-1, keepdim=True))
        # Not in place: a gradient of the mass uses what is there.
        support_RN = support_RN & (mass_RN.cumsum(-1) - mass_RN < self.top_p_R1 * total_R1)
        mass_R1 = (mass_RN * support_RN).sum(-1, keepdim=True) / total_R1
        return support_RN, mass_R1.squeeze(-1).clamp(max=1.0).to(sorted_RN)


def _keep_first(p_RV: Tensor, least_R1: Tensor, kept_R1: Tensor) -> Tensor:
    """Return which tokens exceed `least`, or are among the first `kept` that tie with it."""
    is_least_RV = p_RV == least_R1
    return (p_RV > least_R1) | (is_least_RV & (is_least_RV.cumsum(-1) <= kept_R1))
