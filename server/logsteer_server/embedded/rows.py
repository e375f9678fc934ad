"""Rows whose columns carry the graph of their logits.

Axis letters: R rows, V vocabulary, F features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from logsteer_server.contract.jobs import Policy
from logsteer_server.numerics.rows import (
    COLUMNS,
    NEUTRAL,
    POLICY_COLUMNS,
    PUBLIC_COLUMNS,
    Rows,
)
from logsteer_server.numerics.sampling import ShapedRows, is_greedy, shape_rows

FEATURES = (
    "surprisal", "rb_entropy", "top1_prob", "margin", "head_mass", "log_effective_support",
    "position",
)  # fmt: skip
"""What `baseline_features` are, in their order."""


class _GraphRows(Rows):
    """Rows whose columns have finite derivatives, also where a probability is 0.

    Derivatives are those with the set of tokens that the policy draws held fixed: it changes in
    jumps.
    """

    @cached_property
    def shaped(self) -> ShapedRows:
        """What the policy draws from."""
        kept_RV = self._find_support(self._policy)
        before_RV = kept_RV
        if self._policy.top_p < 1:
            before_RV = self._find_support(replace(self._policy, top_p=1.0))
        scaled_RV = self.logits_RV / self._policy.temperature
        kept_RV, before_RV = (
            scaled_RV.masked_fill(~mask_RV, -torch.inf) for mask_RV in (kept_RV, before_RV)
        )
        # The mass that is kept, of what top_p was given.
        head_mass_R = (kept_RV.logsumexp(-1) - before_RV.logsumexp(-1)).exp()
        return ShapedRows(kept_RV, head_mass_R)

    @torch.no_grad()
    def _find_support(self, policy: Policy) -> Tensor:
        logits_RV = self.logits_RV.detach()
        return shape_rows(logits_RV, [policy] * len(logits_RV)).logits_RV > -torch.inf

    @cached_property
    def sampling_entropy_R(self) -> Tensor:
        """-sum q log q per row, in nats."""
        return _find_entropy(self.shaped.logits_RV.log_softmax(-1))


def _find_entropy(log_p_RV: Tensor) -> Tensor:
    # A token with p = 0 adds nothing, and its derivative is 0, too; minus infinity gives neither.
    finite_RV = log_p_RV.masked_fill(log_p_RV == -torch.inf, 0.0)
    return -(log_p_RV.exp() * finite_RV).sum(-1)


def _entropy(rows: Rows) -> Tensor:
    return _find_entropy(rows.log_probs_RV)


def _two_point_entropy(rows: Rows) -> Tensor:
    top_R = rows.two_largest_R2[:, 0]
    both_R2 = torch.stack([top_R, (1 - top_R).clamp(min=0)], dim=-1)
    # 1 where it is 0, whose logarithm has a derivative.
    return -(both_R2 * both_R2.where(both_R2 > 0, 1.0).log()).sum(-1)


_OF_GRAPH = COLUMNS | {"entropy": _entropy, "two_point_entropy": _two_point_entropy}


@dataclass(eq=False)
class DifferentiableRows:
    """The logits [R, V] that predict the R tokens of one target, and numbers computed from them.

    Float32, or float64 where the model is. All of it carries the graph of the parameters.
    `eos_ids` are the tokens that end a sequence.
    """

    logits_RV: Tensor
    targets_R: Tensor
    eos_ids: tuple[int, ...] = ()
    _rows: dict[Policy, _GraphRows] = field(default_factory=dict, init=False)

    def columns(self, names: Sequence[str], policy: Policy = NEUTRAL) -> dict[str, Tensor]:
        """Return columns [R] by name, those of `PUBLIC_COLUMNS`; ranks carry no graph.

        Errors: ValueError for an unknown name, and for a column of a greedy policy, which has no
        derivative.
        """
        if unknown := [name for name in names if name not in PUBLIC_COLUMNS]:
            raise ValueError(f"unknown columns {unknown}; known are {', '.join(PUBLIC_COLUMNS)}")
        if not POLICY_COLUMNS.keys().isdisjoint(names):
            _check_derivative(policy)
        rows = self._read(policy)
        return {name: _OF_GRAPH[name](rows).to(self.logits_RV.dtype) for name in names}

    def log_q_RV(self, policy: Policy) -> Tensor:
        """Return log q of every token, q what the policy draws from; -inf where it draws nothing.

        Errors: ValueError for a greedy policy, which has no derivative.
        """
        _check_derivative(policy)
        return self._read(policy).shaped.logits_RV.log_softmax(-1)

    def _read(self, policy: Policy) -> _GraphRows:
        if policy not in self._rows:
            double = self.logits_RV.dtype == torch.float64
            self._rows[policy] = _GraphRows(
                self.logits_RV, self.targets_R, None, policy, self.eos_ids, double
            )
        return self._rows[policy]


def _check_derivative(policy: Policy) -> None:
    if is_greedy(policy):
        raise ValueError("temperature 0 draws one token for certain: there is no derivative")


FEATURE_COLUMNS = ("logprob", *FEATURES[1:5], "effective_support")


def baseline_features(columns: Mapping[str, Tensor], max_tokens: int | None = None) -> Tensor:
    """Return FEATURES [R, F] of a sequence's R steps, from FEATURE_COLUMNS of its rows.

    They are known before the step's token is drawn, so that a baseline that is computed from them
    leaves a policy's gradient unbiased: `surprisal` is -log p of the token drawn the step before, 0
    at the first. `position` is the step's number over `max_tokens`, from 0 on; None: over R, which
    is unbiased only where no sequence ends early. `log_effective_support` is log exp(rb_entropy),
    which is `rb_entropy` again: a regression needs a ridge, or the least norm.
    """
    surprisal_R = -columns["logprob"].detach()
    count = len(surprisal_R)
    steps_R = torch.arange(count, device=surprisal_R.device, dtype=surprisal_R.dtype)
    found = [
        torch.cat([torch.zeros_like(surprisal_R[:1]), surprisal_R[:-1]]),
        *(columns[name].detach() for name in FEATURES[1:5]),
        columns["effective_support"].detach().log(),
        steps_R / (max_tokens or count),
    ]
    return torch.stack(found, dim=-1)
