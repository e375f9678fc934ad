"""Columns read from rows of logits. Every engine reads its rows here, so they agree.

A row is the logits z over the vocabulary that a model puts out after one token; the token that
follows it in the text is the row's target x. Axis letters: R rows, V vocabulary, K alternatives.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.jobs import (
    ALTERNATIVES,
    ALTERNATIVES_TAIL,
    NEUTRAL,
    TOP_IDS,
    TOP_LOGPROBS,
    TOP_TAIL,
    Policy,
    ScoreJob,
)
from logsteer_server.numerics.adjustments import TokenHistory, adjust_rows
from logsteer_server.numerics.sampling import LEAST, ShapedRows, log_softmax, shape_rows


class ReferenceFile:
    """Pass rows of `width` numbers from one job to another, on disk: float32 [R, width].

    They are log-probabilities over V tokens, or hidden states.

    The file has its final size before rows are written. It is read and written, not mapped, so that
    a failing disk raises an error instead of ending the process.
    """

    def __init__(self, path: str, width: int) -> None:
        self._path = path
        self._width = width
        self.error: OSError | None = None
        """The error of a failed write."""

    def write(self, first: int, rows_rW: Tensor) -> None:
        """Store rows from `first` on; keep an OSError in `error`."""
        written_rW = rows_rW.to("cpu", torch.float32).contiguous().numpy()
        try:
            with Path(self._path).open("r+b") as file:
                file.seek(4 * self._width * first)
                file.write(written_rW.data)
        except OSError as error:
            self.error = error

    def read(self, first: int, count: int, device: torch.device) -> Tensor:
        """Load rows [first, first + count) to a device. Errors: OSError."""
        size = count * self._width
        rows = np.fromfile(self._path, np.float32, size, offset=4 * self._width * first)
        if len(rows) < size:
            raise OSError(f"{self._path} ends before row {first + count}")
        return torch.from_numpy(rows.reshape(count, self._width)).to(device)


@dataclass(frozen=True, slots=True)
class RowFiles:
    """The files that a job's rows are written to and read from; `first`: index of the first row.

    `are_hidden`: they hold hidden states, which go through the head again when read.
    """

    export: ReferenceFile | None = None
    reference: ReferenceFile | None = None
    first: int = 0
    are_hidden: bool = False

    @classmethod
    def open(
        cls,
        export: str | None,
        reference: str | None,
        exchange: str,
        sizes: tuple[int, int],
        first: int = 0,
    ) -> "RowFiles":
        """Return the files of a job, whose `sizes` are V and D."""
        are_hidden = exchange == "hidden"
        width = sizes[are_hidden]
        return cls(
            None if export is None else ReferenceFile(export, width),
            None if reference is None else ReferenceFile(reference, width),
            first,
            are_hidden,
        )


class Rows:
    """Hold R rows of logits z and their targets x; compute once what several columns need.

    Columns of the model's distribution or the policy's can be differentiated, with the set of
    tokens that the policy draws held fixed: it changes in jumps.

    Args:
        logits_RV: logits of any floating dtype, read in float32 or, with `double`, float64.
        targets_R: int64, the token that follows each row.
        reference_RV: float32 log-probabilities of another model at the same rows, for the columns
            that compare with it.
        policy: the policy that draws from q.
        eos_ids: tokens that end a sequence.
        shaped: the policy's distribution, if it is already computed.
        before: for a policy with adjustments, the history of each row's sequence, and the number of
            its tokens between prompt and target.
        alternatives_RK: int64, further tokens of each row whose log-probability is computed.
        beta: weight of this model, not the other, in the mixture of `jsd`.

    """

    def __init__(
        self,
        logits_RV: Tensor,
        targets_R: Tensor,
        reference_RV: Tensor | None = None,
        policy: Policy = NEUTRAL,
        eos_ids: Sequence[int] = (),
        double: bool = False,
        shaped: ShapedRows | None = None,
        before: Sequence[tuple[TokenHistory, int]] = (),
        alternatives_RK: Tensor | None = None,
        beta: float = 0.5,
    ) -> None:
        self.alternatives_RK = alternatives_RK
        self.beta = beta
        self._given_RV = logits_RV
        self._double = double
        self.targets_R = targets_R
        self._reference_RV = reference_RV
        self._policy = policy
        self._shaped = shaped
        self._before = before
        self.eos_ids = eos_ids

    @property
    def size(self) -> int:
        """Tokens of the vocabulary."""
        return self._given_RV.shape[-1]

    @cached_property
    def logits_RV(self) -> Tensor:
        """The logits in float32, or float64 with `double`."""
        return self._given_RV.double() if self._double else self._given_RV.float()

    @cached_property
    def _log_sums_R1(self) -> Tensor:
        """log sum exp z, per row: see `log_softmax`."""
        return self.logits_RV.logsumexp(-1, keepdim=True)

    @cached_property
    def log_probs_RV(self) -> Tensor:
        """log p of every token, per row."""
        return self.logits_RV - self._log_sums_R1

    def log_probs_at(self, ids_RK: Tensor) -> Tensor:
        """Return log p of K tokens of each row [R, K], in nats."""
        return self.logits_RV.gather(-1, ids_RK) - self._log_sums_R1

    @property
    def larger_R(self) -> Tensor:
        """How many tokens have a strictly larger logit than the target, per row."""
        logits_RV = self.logits_RV.detach()
        # Counted in the dtype of the logits, float32 being exact up to 2^24: a CPU adds floats
        # up many times as fast as booleans.
        is_larger_RV = torch.empty_like(logits_RV)
        torch.gt(logits_RV, self.target_logits_R.detach()[:, None], out=is_larger_RV)
        return is_larger_RV.sum(-1)

    @property
    def entropy_R(self) -> Tensor:
        """-sum p log p per row, in nats."""
        # A token with p = 0 adds nothing, and has a derivative of 0: its log p is made finite.
        log_p_RV = self.logits_RV - self._log_sums_R1
        log_p_RV.clamp_(min=LEAST)
        return -(log_p_RV.exp() * log_p_RV).sum(-1)

    @property
    def finite_R(self) -> Tensor:
        """Whether each row's softmax is defined: no NaN, no plus infinity, not all minus infinity.

        Otherwise ranks and sums of such a row would look valid.
        """
        if "_log_sums_R1" in vars(self):  # no further pass over the row
            return self._log_sums_R1[:, 0].isfinite()
        return self.logits_RV.amax(-1).isfinite()

    @property
    def reference_RV(self) -> Tensor:
        """The other model's log-probabilities. Errors: ValueError without a reference."""
        if self._reference_RV is None:
            raise ValueError("this column compares with another model's log-probabilities")
        return self._reference_RV

    @cached_property
    def compared_RV(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the model and of the other, both at the policy's temperature."""
        if (temperature := self._policy.temperature) == 1:
            return self.log_probs_RV, self.reference_RV
        own_RV = log_softmax(self.logits_RV / temperature)
        return own_RV, log_softmax(self.reference_RV.to(own_RV) / temperature)

    @cached_property
    def target_logits_R(self) -> Tensor:
        """The logit of each row's target."""
        return self.logits_RV.gather(-1, self.targets_R[:, None]).squeeze(-1)

    @cached_property
    def shaped(self) -> ShapedRows:
        """The distribution that the policy draws from."""
        if self._shaped is not None:
            return self._shaped
        logits_RV, policies = self.logits_RV, [self._policy] * len(self.targets_R)
        if (own := self._policy.adjustments) is not None:
            histories, counts = zip(*self._before, strict=True)
            logits_RV = adjust_rows(logits_RV, [own] * len(policies), histories, counts)
        return shape_rows(logits_RV, policies)

    @cached_property
    def two_largest_R2(self) -> Tensor:
        """The two largest q of each row; 0 for the second where there is one token alone."""
        q_RV = self.shaped.q_RV
        if q_RV.shape[-1] == 1:
            return torch.cat([q_RV, torch.zeros_like(q_RV)], dim=-1)
        return q_RV.topk(2, dim=-1).values

    @cached_property
    def squared_mass_R(self) -> Tensor:
        """sum q^2 per row."""
        return self.shaped.q_RV.square().sum(-1)


def logprob(rows: Rows) -> Tensor:
    """Return log p(x) per row, in nats, with p = softmax(z)."""
    return rows.log_probs_at(rows.targets_R[:, None]).squeeze(-1)


def rank(rows: Rows) -> Tensor:
    """Return 1 + the number of tokens with a strictly larger logit than x, per row."""
    return 1 + rows.larger_R


def entropy(rows: Rows) -> Tensor:
    """Return -sum p log p per row, in nats."""
    return rows.entropy_R


def kl(rows: Rows) -> Tensor:
    """Return KL(reference || model) = sum p_ref (log p_ref - log p) per row, in nats."""
    return _expect(rows.reference_RV, rows.reference_RV - rows.log_probs_RV)


def forward_kl(rows: Rows) -> Tensor:
    """Return KL(model || reference) per row, in nats, at the policy's temperature."""
    own_RV, other_RV = rows.compared_RV
    return _expect(own_RV, own_RV - other_RV)


def reverse_kl(rows: Rows) -> Tensor:
    """Return KL(reference || model) per row, in nats, at the policy's temperature."""
    own_RV, other_RV = rows.compared_RV
    return _expect(other_RV, other_RV - own_RV)


def jsd(rows: Rows) -> Tensor:
    """Return beta KL(model || m) + (1 - beta) KL(reference || m) per row, in nats.

    m = beta model + (1 - beta) reference; both at the policy's temperature. Agarwal et al.,
    On-Policy Distillation of Language Models (2024), call it generalized Jensen-Shannon divergence.
    """
    own_RV, other_RV = rows.compared_RV
    beta = rows.beta
    mixed_RV = torch.logaddexp(own_RV + math.log(beta), other_RV + math.log1p(-beta))
    own_R, other_R = (_expect(log_p_RV, log_p_RV - mixed_RV) for log_p_RV in rows.compared_RV)
    return beta * own_R + (1 - beta) * other_R


def top1_agrees(rows: Rows) -> Tensor:
    """Return 1 where the most probable token is also the reference's, else 0."""
    return rows.logits_RV.argmax(-1) == rows.reference_RV.argmax(-1)


def log_q(rows: Rows) -> Tensor:
    """Return log q(x) per row, in nats; minus infinity where the policy cannot draw x."""
    return rows.shaped.log_q(rows.targets_R)


def rb_entropy(rows: Rows) -> Tensor:
    """Return -sum q log q per row, in nats: the mean of -log q(x) over draws x, without drawing."""
    return rows.shaped.entropy_R


def head_mass(rows: Rows) -> Tensor:
    """Return the mass that `top_p` keeps of what temperature, `min_p` and `top_k` left, per row."""
    return rows.shaped.head_mass_R


def tail_mass(rows: Rows) -> Tensor:
    """Return 1 - `head_mass`: the mass that `top_p` cuts off, per row."""
    return 1 - rows.shaped.head_mass_R


def top1_prob(rows: Rows) -> Tensor:
    """Return the largest q per row."""
    return rows.two_largest_R2[:, 0]


def margin(rows: Rows) -> Tensor:
    """Return the largest q less the second largest, per row."""
    return rows.two_largest_R2[:, 0] - rows.two_largest_R2[:, 1]


def two_point_entropy(rows: Rows) -> Tensor:
    """Return -t log t - (1 - t) log(1 - t) per row, with t the largest q, in nats."""
    top_R = rows.two_largest_R2[:, 0]
    both_R2 = torch.stack([top_R, (1 - top_R).clamp(min=0)], dim=-1)
    # The logarithm of 1 in place of that of 0, which has no derivative.
    return -(both_R2 * both_R2.where(both_R2 > 0, 1.0).log()).sum(-1)


def collision(rows: Rows) -> Tensor:
    """Return sum q^2 per row: the chance that two draws are the same token."""
    return rows.squared_mass_R


def renyi2(rows: Rows) -> Tensor:
    """Return -log sum q^2 per row: the Renyi entropy of order 2, in nats."""
    return -rows.squared_mass_R.log()


def effective_support(rows: Rows) -> Tensor:
    """Return exp(-sum q log q) per row: so many equally likely tokens have the same entropy."""
    return rows.shaped.entropy_R.exp()


def logit_mean(rows: Rows) -> Tensor:
    """Return the mean of z over the vocabulary, per row."""
    return rows.logits_RV.mean(-1)


def logit_std(rows: Rows) -> Tensor:
    """Return the standard deviation of z over the vocabulary (population), per row."""
    # Several times as fast as torch's `std`, which is not vectorised over a row.
    return (rows.logits_RV - rows.logits_RV.mean(-1, keepdim=True)).square().mean(-1).sqrt()


def eos_prob(rows: Rows) -> Tensor:
    """Return q of the tokens that end a sequence, summed, per row."""
    q_RV = rows.shaped.q_RV
    return q_RV[:, list(rows.eos_ids)].sum(-1)


def _expect(log_p_RV: Tensor, values_RV: Tensor) -> Tensor:
    """Return sum p v per row; a token with p = 0 adds nothing, whatever its v."""
    return (log_p_RV.exp() * values_RV).nan_to_num_(nan=0.0).sum(-1)


POLICY_COLUMNS: dict[str, Callable[[Rows], Tensor]] = {
    function.__name__: function
    for function in (
        log_q, rb_entropy, head_mass, tail_mass, top1_prob, margin, two_point_entropy, collision,
        renyi2, effective_support, eos_prob,
    )
}  # fmt: skip
"""Columns that depend on the sampling policy."""

DIVERGENCES: dict[str, Callable[[Rows], Tensor]] = {
    function.__name__: function for function in (forward_kl, reverse_kl, jsd)
}
"""Columns of `/divergence`, at the policy's temperature."""

COLUMNS: dict[str, Callable[[Rows], Tensor]] = {
    "logprob": logprob,
    "rank": rank,
    "entropy": entropy,
    "kl": kl,
    "top1_agrees": top1_agrees,
    "logit_mean": logit_mean,
    "logit_std": logit_std,
    **POLICY_COLUMNS,
    **DIVERGENCES,
}
COMPARED = ("kl", "top1_agrees", *DIVERGENCES)
"""The columns that compare two models."""
PUBLIC_COLUMNS = tuple(name for name in COLUMNS if name not in COMPARED)
"""The columns that every request may name."""

FUSED_COLUMNS = frozenset(("logprob", "rank", "entropy"))
"""The columns that the kernel for CUDA reads."""

BYTES_PER_LOGIT = 16
"""Peak bytes per logit while columns are read: logits in float32 and up to three temporaries."""
BYTES_PER_SHAPED_LOGIT = 72
"""The same with a policy, which may sort: values, indices, sums in float64."""
BYTES_PER_CUT_LOGIT = BYTES_PER_LOGIT + 8
"""The same with the CUDA kernel for cuts: shaped logits and q, beside temporaries."""
BYTES_PER_ADJUSTED_LOGIT = 24
"""Additional bytes for adjustments: counts of tokens, factors, adjusted logits."""
BYTES_PER_COMPARED_LOGIT = 16
"""Additional bytes for divergences: both models' log-probabilities at a temperature, and their
mixture."""
BYTES_PER_TAIL_LOGIT = 8
"""Additional bytes for the tail mass: probabilities, and one temporary."""


@dataclass(frozen=True, slots=True)
class RowSpec:
    """The values of each row: columns by name, the `top` most probable tokens, a number of the
    caller's `alternatives`, and with `tail` the mass of all other tokens.

    `is_listed_by_policy`: listed tokens and tails are of the policy's distribution, not the
    model's.
    """

    columns: tuple[str, ...] = ("logprob",)
    top: int = 0
    policy: Policy = NEUTRAL
    eos_ids: tuple[int, ...] = ()
    double: bool = False
    alternatives: int = 0
    tail: bool = False
    is_listed_by_policy: bool = False
    beta: float = 0.5
    listed: tuple[int, ...] = ()
    """The alternatives if all rows have the same ones, as in generation."""

    @classmethod
    def of(cls, job: ScoreJob, eos_ids: tuple[int, ...]) -> "RowSpec":
        """Return the spec of a job, for a model with these end tokens."""
        others = 0 if job.alternatives is None else job.alternatives.shape[1]
        is_listed = bool(job.top or others) and job.policy != NEUTRAL
        read = job.columns, job.top, job.policy, eos_ids, job.double
        return cls(*read, others, job.tail, is_listed, job.beta)

    @property
    def lists(self) -> tuple[tuple[str, int | None], ...]:
        """The values after the columns: names, and how many each has; None for one number a row."""
        found: list[tuple[str, int | None]] = []
        if self.top:
            found += [(TOP_IDS, self.top), (TOP_LOGPROBS, self.top)]
            found += [(TOP_TAIL, None)] * self.tail
        if self.alternatives:
            found += [(ALTERNATIVES, self.alternatives)]
            found += [(ALTERNATIVES_TAIL, None)] * self.tail
        return tuple(found)

    @property
    def width(self) -> int:
        """Numbers per row."""
        return len(self.columns) + sum(1 if count is None else count for _, count in self.lists)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all computations."""
        return torch.float64 if self.double else torch.float32

    @property
    def is_fused(self) -> bool:
        """Whether the CUDA kernel computes all values, without temporaries."""
        return FUSED_COLUMNS.issuperset(self.columns) and not self.lists and not self.double

    @property
    def looks_at_policy(self) -> bool:
        """Whether any value depends on the sampling policy."""
        return self.is_listed_by_policy or not POLICY_COLUMNS.keys().isdisjoint(self.columns)

    def bytes_per_logit(self, device: torch.device) -> int:
        """Return the peak bytes per logit on a device."""
        size = BYTES_PER_SHAPED_LOGIT if self.looks_at_policy else BYTES_PER_LOGIT
        if self.looks_at_policy and device.type == "cuda" and not self.double:
            size = BYTES_PER_CUT_LOGIT
        if self.policy.adjustments is not None:
            size += BYTES_PER_ADJUSTED_LOGIT
        if self.tail:
            size += BYTES_PER_TAIL_LOGIT
        if not DIVERGENCES.keys().isdisjoint(self.columns):
            size += BYTES_PER_COMPARED_LOGIT
        return 2 * size if self.double else size


def read_rows(rows: Rows, spec: RowSpec) -> Tensor:
    """Compute the values that `spec` names [R, width]: columns, then `lists`.

    Ids and ranks are exact in float32 up to 2^24.
    """
    parts = [COLUMNS[name](rows).to(spec.dtype)[:, None] for name in spec.columns]
    by_policy = spec.is_listed_by_policy
    logits_RV = rows.shaped.logits_RV if by_policy and spec.lists else rows.logits_RV
    log_p_of = rows.shaped.log_q_at if by_policy else rows.log_probs_at
    if spec.top:
        ids_RK = logits_RV.topk(min(spec.top, rows.size), dim=-1).indices
        parts += [ids_RK.to(spec.dtype), log_p_of(ids_RK)]
        if spec.tail:
            parts.append(_sum_others(logits_RV, ids_RK).to(spec.dtype))
    if spec.alternatives:
        assert rows.alternatives_RK is not None
        parts.append(log_p_of(rows.alternatives_RK))
        if spec.tail:
            parts.append(_sum_others(logits_RV, rows.alternatives_RK).to(spec.dtype))
    return torch.cat(parts, dim=-1)


def _sum_others(logits_RV: Tensor, ids_RK: Tensor) -> Tensor:
    """Return the mass of all tokens except these, per row [R, 1], summed in float64.

    It sums the others, because 1 minus the listed mass would lose all digits if that is nearly 1.
    """
    p_RV = log_softmax(logits_RV).exp_()
    return p_RV.scatter_(-1, ids_RK, 0.0).sum(-1, keepdim=True, dtype=torch.float64)


def unpack(values_RW: np.ndarray, spec: RowSpec) -> dict[str, np.ndarray]:
    """Split the values of `read_rows` by name, with ranks and ids as int32.

    Ranks and ids of a non-finite row are 0.
    """
    columns = {
        name: _round(values_RW[:, i]) if name == "rank" else values_RW[:, i]
        for i, name in enumerate(spec.columns)
    }
    start = len(columns)
    for name, count in spec.lists:
        own = values_RW[:, start] if count is None else values_RW[:, start : start + count]
        columns[name] = _round(own) if name == TOP_IDS else own
        start += count or 1
    return columns


def _round(values: np.ndarray) -> np.ndarray:
    """Return whole numbers as int32, NaN as 0."""
    rounded: np.ndarray = np.nan_to_num(values).astype(np.int32)
    return rounded
