"""Sampling: uniform numbers from seeds, the tokens drawn with them, and the tokens' columns.

A token is a function of its row's logits, policy and seed, and of its index in the continuation, so
it is the same on every engine and device, in every batch, and in a repetition. Its columns are
computed from the same logits and distribution. Axis letters: R rows, V vocabulary, W values of a
row; lower case r: rows with the same columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.jobs import NEUTRAL, Adjustments, GenerateJob
from logsteer_server.numerics.adjustments import TokenHistory, adjust_rows
from logsteer_server.numerics.rows import Rows, RowSpec, read_rows
from logsteer_server.numerics.sampling import PolicyRows, is_greedy, pick_rows

CHUNK_LOGITS = {"cpu": 2**18, "cuda": 2**24}
"""Logits processed at once: few enough for a CPU's caches, and enough to keep a GPU busy."""


def mix_bits(state: np.ndarray) -> np.ndarray:
    """Return the output of SplitMix64 at these states, uint64.

    Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014, with the
    constants of Stafford's variant 13, as Java's SplittableRandom has them.
    """
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return result


def find_uniform(seed_R: np.ndarray, index_R: np.ndarray) -> np.ndarray:
    """Return a uniform number for each seed and index in its sequence: float64 in [0, 1 - 2^-52].

    Both are uint64. A seed's sequence starts from the first output of SplitMix64 for that seed, so
    that the sequences of neighbouring seeds are unrelated.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    start_R = mix_bits(seed_R + step)
    bits_R = mix_bits(start_R + (index_R + np.uint64(1)) * step)
    uniform_R: np.ndarray = (bits_R >> np.uint64(12)) * 2.0**-52
    return uniform_R


def draw_rows(q_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return the token that each row's uniform number selects from q [R], by inverse CDF.

    From q = 0.5, 0.2, 0.3 the numbers 0.1, 0.5 and 0.69 select the tokens 0, 1 and 1. A number of
    at most 1 - 2^-52, times the sum of q, rounds to less than the sum; so no token with q = 0 is
    selected. A row with NaN gives any token.
    """
    cumulated_RV = q_RV.cumsum(-1, dtype=torch.float64)
    points_R1 = uniform_R[:, None] * cumulated_RV[:, -1:]
    # `right`: the first token whose cumulated mass exceeds the point, not one that equals it.
    ids_R = torch.searchsorted(cumulated_RV, points_R1, right=True).squeeze(-1)
    return ids_R.clamp(max=q_RV.shape[-1] - 1)


def unpack_bits(words_RN: Tensor, size: int) -> Tensor:
    """Return the first `size` bits of each row of 32-bit words, the lowest first: bool [R, V].

    The word 5 gives True, False, True, False, …
    """
    places = torch.arange(32, dtype=torch.int32, device=words_RN.device)
    bits_RN32 = (words_RN[..., None] >> places) & 1
    return bits_RN32.flatten(1)[:, :size].bool()


def find_best(logits_RV: Tensor) -> Tensor:
    """Return the most probable token of each row [R]; the first of ties."""
    return logits_RV.argmax(-1)


def spec_of_draw(job: GenerateJob, eos_ids: tuple[int, ...]) -> RowSpec:
    """Return the columns to compute with each token of a job; without `logprobs`, no columns."""
    if not job.logprobs:
        return RowSpec((), 0, job.policy, eos_ids, job.double)
    columns = tuple(dict.fromkeys(["logprob", *job.columns]))
    top, listed = 0 if job.listed else job.top, job.listed
    return RowSpec(
        columns, top, job.policy, eos_ids, job.double, alternatives=len(listed), listed=listed
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens of R rows, whether their logits are finite, and the values of each [R, W].

    A row with fewer than W values, in the order of `read_rows`, is padded with 0.
    """

    ids_R: Tensor
    finite_R: Tensor
    values_RW: Tensor


@dataclass(frozen=True, slots=True)
class _DrawnRows:
    """Rows with the same columns, sampled at once.

    `policies` is None for greedy rows without policy columns. Either all rows have `adjustments`
    and `histories`, or both are empty. `listed_K`: the rows' alternatives.
    """

    places: np.ndarray
    rows: Tensor | slice
    spec: RowSpec
    policies: PolicyRows | None
    seeds: np.ndarray
    adjustments: list[Adjustments]
    histories: list[TokenHistory]
    listed_K: Tensor | None


class RowSampler:
    """Draw the next tokens of R rows, each with its own policy and seed, for any number of steps.

    Args:
        specs: the columns of each row's token, and the policy that draws it; None for a row
            without a draw, whose token is 0.
        seeds: the rows' seeds; any integers, taken modulo 2^64.
        argmax: an engine's faster version of `find_best`, if it has one.
        histories: the rows' histories, for policies with adjustments; sampled tokens are added.

    """

    def __init__(
        self,
        specs: Sequence[RowSpec | None],
        seeds: Sequence[int],
        argmax: Callable[[Tensor], Tensor] = find_best,
        histories: Sequence[TokenHistory | None] = (),
    ) -> None:
        self._argmax = argmax
        self._num_rows = len(specs)
        self._histories = histories
        self._seed_R = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
        self._specs = specs
        self._parts: list[_DrawnRows] | None = None
        drawn = [spec for spec in specs if spec is not None]
        self._width = max((spec.width for spec in drawn), default=0)
        is_double = any(spec.double for spec in drawn)
        self._dtype = torch.float64 if is_double else torch.float32

    def draw(
        self, logits_RV: Tensor, index_R: np.ndarray, allowed_RV: Tensor | None = None
    ) -> Drawn:
        """Sample the token of each row; `index_R`: its number of tokens so far.

        With `allowed_RV`, only tokens marked True are sampled; the policy columns are of these, and
        all other columns of the unmasked logits. The logits of all steps have the same vocabulary
        and device.
        """
        if self._parts is None:
            self._parts = self._make_parts(logits_RV.shape[-1], logits_RV.device)
        found = [self._draw_part(part, logits_RV, index_R, allowed_RV) for part in self._parts]
        if len(found) == 1 and len(found[0].ids_R) == self._num_rows:
            return found[0]
        device = logits_RV.device
        drawn = Drawn(
            torch.zeros(self._num_rows, dtype=torch.int64, device=device),
            torch.ones(self._num_rows, dtype=torch.bool, device=device),
            torch.zeros((self._num_rows, self._width), dtype=self._dtype, device=device),
        )
        for part, own in zip(self._parts, found, strict=True):
            drawn.ids_R[part.rows] = own.ids_R
            drawn.finite_R[part.rows] = own.finite_R
            drawn.values_RW[part.rows, : part.spec.width] = own.values_RW.to(self._dtype)
        return drawn

    def _draw_part(
        self,
        part: _DrawnRows,
        logits_RV: Tensor,
        index_R: np.ndarray,
        allowed_RV: Tensor | None,
    ) -> Drawn:
        spec, own_rV = part.spec, logits_RV[part.rows].to(part.spec.dtype)
        drawn_rV = own_rV
        if allowed_RV is not None:
            drawn_rV = own_rV.masked_fill(~allowed_RV[part.rows], -torch.inf)
        counts = index_R[part.places].tolist() if part.histories else []
        if part.histories:
            drawn_rV = adjust_rows(drawn_rV, part.adjustments, part.histories, counts)
        shaped = part.policies.shape(drawn_rV) if part.policies else None
        if shaped is None:
            ids_r = self._argmax(drawn_rV)
            finite_r = own_rV.gather(-1, ids_r[:, None]).squeeze(-1).isfinite()
        else:
            uniform = find_uniform(part.seeds, index_R[part.places].astype(np.uint64))
            uniform_r = torch.from_numpy(uniform).to(own_rV.device, non_blocking=True)
            ids_r = draw_rows(shaped.q_RV, uniform_r)
            finite_r = shaped.pick_logits(ids_r).isfinite()
        for history, count, id_ in zip(part.histories, counts, ids_r, strict=False):
            history.following_N[count] = id_
        if not spec.width:
            return Drawn(ids_r, finite_r, own_rV[:, :0])
        others_rK = None if part.listed_K is None else part.listed_K.expand(len(ids_r), -1)
        rows = Rows(
            own_rV, ids_r, None, spec.policy, spec.eos_ids, spec.double, shaped,
            alternatives_RK=others_rK,
        )  # fmt: skip
        return Drawn(ids_r, finite_r, read_rows(rows, spec))

    def _make_parts(self, size: int, device: torch.device) -> list[_DrawnRows]:
        """Group the rows by columns, and split groups to CHUNK_LOGITS."""
        groups: dict[tuple[RowSpec, bool, bool], list[int]] = {}
        for row, spec in enumerate(self._specs):
            if spec is not None:
                is_shaped = spec.looks_at_policy or not is_greedy(spec.policy)
                kind = replace(spec, policy=NEUTRAL), is_shaped, bool(spec.policy.adjustments)
                groups.setdefault(kind, []).append(row)
        at_once = CHUNK_LOGITS["cuda" if device.type == "cuda" else "cpu"] // size
        parts = []
        for (spec, is_shaped, _), members in groups.items():
            step = max(1, at_once // 2 if spec.double else at_once)
            for start in range(0, len(members), step):
                own = members[start : start + step]
                policies = [row_spec.policy for r in own if (row_spec := self._specs[r])]
                shaped = PolicyRows(policies, size, spec.dtype, device) if is_shaped else None
                adjustments = [one.adjustments for one in policies if one.adjustments]
                histories = [self._histories[r] for r in own] if adjustments else []
                parts.append(
                    _DrawnRows(
                        np.array(own),
                        pick_rows(own, device),
                        spec,
                        shaped,
                        self._seed_R[own],
                        adjustments,
                        [history for history in histories if history is not None],
                        torch.tensor(spec.listed, device=device) if spec.listed else None,
                    )
                )
        return parts
