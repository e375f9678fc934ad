# mypy: allow-untyped-defs, allow-incomplete-defs
"""A Triton kernel that reads rows on CUDA: one pass over the logits, four numbers a row.

A program reads a row, of any dtype and stride, in blocks. It keeps the largest logit m so far and,
for each position in a block, the sums of e = exp(z - m) and of (z - m) e, which it rescales when m
grows ("online softmax", Milakov and Gimelshein 2018, arXiv:1805.02867). With S and W the row's
sums, log sum exp z = m + log S, and the entropy is log S - W / S.
"""

from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from logsteer_server.numerics.rows import Rows

BLOCK = 4096
"""Logits that a program loads at a time."""
NUMBERS = 4
"""Numbers that the kernel writes per row: m, log S, entropy, and the logits above the target's."""


@triton.jit  # type: ignore[untyped-decorator]
def _read_row(logits_ptr, targets_ptr, numbers_ptr, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    own = tl.load(row_ptr + tl.load(targets_ptr + row)).to(tl.float32)
    lowest = float("-inf")
    largest = tl.full([], lowest, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    larger = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + v, mask=v < size, other=lowest).to(tl.float32)
        highest = tl.maximum(largest, tl.max(z, axis=0))
        # While all logits so far are minus infinity, sums are 0, and differences would be NaN.
        level = tl.where(highest == lowest, 0.0, highest)
        moved = tl.where(largest == lowest, 0.0, largest - level)
        scale = tl.exp(moved)
        above = z - level
        e = tl.exp(above)
        sums *= scale
        weighted = weighted * scale + sums * moved + tl.where(e > 0.0, e * above, 0.0)
        sums += e
        larger += (z > own).to(tl.int32)
        largest = highest
    total = tl.sum(sums, axis=0)
    log_sum = tl.log(total)
    number_ptr = numbers_ptr + row * 4
    tl.store(number_ptr, largest)
    tl.store(number_ptr + 1, log_sum)
    tl.store(number_ptr + 2, log_sum - tl.sum(weighted, axis=0) / total)
    tl.store(number_ptr + 3, tl.sum(larger, axis=0).to(tl.float32))


class FusedRows(Rows):
    """Rows whose log p, rank, entropy and finiteness come from the kernel.

    `Rows` computes all other columns. The kernel computes in float32, without gradients.
    """

    @cached_property
    def _numbers_4R(self) -> Tensor:
        logits_RV = self._given_RV
        if logits_RV.stride(-1) != 1:
            logits_RV = logits_RV.contiguous()
        rows, size = logits_RV.shape
        numbers_R4 = torch.empty((rows, NUMBERS), dtype=torch.float32, device=logits_RV.device)
        block = min(BLOCK, triton.next_power_of_2(size))
        _read_row[(rows,)](
            logits_RV, self.targets_R, numbers_R4, logits_RV.stride(0), size, BLOCK=block,
            num_warps=8 if block == BLOCK else 4,
        )  # fmt: skip
        return numbers_R4.T

    @property
    def finite_R(self) -> Tensor:
        """Whether each row's softmax is one."""
        # NaN or infinite where a logit is NaN or plus infinity, and where all are minus infinity.
        return self._numbers_4R[:2].isfinite().all(0)

    def log_probs_at(self, ids_RK: Tensor) -> Tensor:
        """Return log p of K tokens of each row [R, K], in nats."""
        largest_R1, log_sum_R1 = self._numbers_4R[0][:, None], self._numbers_4R[1][:, None]
        own_RK: Tensor = self._given_RV.gather(-1, ids_RK).float()
        return (own_RK - largest_R1) - log_sum_R1

    @property
    def entropy_R(self) -> Tensor:
        """-sum p log p per row, in nats."""
        return self._numbers_4R[2]

    @property
    def larger_R(self) -> Tensor:
        """How many tokens have a strictly larger logit than the target, per row."""
        return self._numbers_4R[3]
