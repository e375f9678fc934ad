# mypy: allow-untyped-defs, allow-incomplete-defs
"""A Triton kernel for the cuts of a policy (min_p, top_k, top_p): no sort, no wait on the host.

A cut keeps the tokens above some probability, and the first of the tokens at it. Non-negative
float32 numbers have the same order as their bits read as integers; so a threshold is an integer of
at most 0x3F800000, the bits of 1. A pass over the row sums the tokens above each of 8 thresholds,
which narrows the interval to a ninth. Ten passes leave one value, as 9^10 is more than 2^30, or
fewer if a single token is left. Masses are integers in units of 2^-61, so their sums are exact.

A pass reads 4 bytes a probability: one pass for the largest and the total, at most ten for `top_p`,
and 8 bytes to apply it, 52 in all. `min_p` adds 2 passes, `top_k` 12, a cut between ties 1. The
rest of a policy column moves about 100: z - max (12), / temperature (8), a softmax (16, as a long
row is read three times), the log-sum-exp (24), q (16), the entropy (24). So 2,048 rows of 128,256
tokens move 40 GB, which takes 9.3 ms at an H200's 4.3 TB/s; their product with a head of width
4,096 took 4.3 ms (bench/gpu-check.md). A pass is 48 instructions a probability on sm_90, by
nvdisasm: at full issue 0.43 ms for these rows, 0.25 ms for their bytes. No GPU has run it yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 8
"""Probabilities that a program loads at a time, and its warps."""
SPLITS = tl.constexpr(8)
UNSIGNED, NO_NUMBER = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)
"""All bits except the sign, and the bits of infinity, above which are NaNs."""


@triton.jit
def _to_units(p):
    return (p * 2305843009213693952.0).to(tl.int64)  # 2^61


@triton.jit  # type: ignore[untyped-decorator]
def _measure(row_ptr, size, threshold_S, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    total_SN = tl.zeros([SPLITS, BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        v = start + tl.arange(0, BLOCK)[None, :]  # two axes, so that all tensors have one layout
        p = tl.load(row_ptr + v, mask=v < size, other=-1.0)
        each = _to_units(p) if BY_MASS else 1
        is_above_SN = p.to(tl.int32, bitcast=True) >= threshold_S[:, None]
        total_SN += tl.where(is_above_SN, each, 0).to(tl.int64)
    return tl.sum(total_SN, axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _find_cut(
    row_ptr, size, low, high, kept, whole, limit, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the threshold, how many tokens at it are kept, whether any at it are cut, the total.

    `whole`: the total from `low` on; `kept`: the part of it that earlier cuts keep, which reaches
    the limit. A token is kept if the total before it does not reach the limit.
    """
    beyond = tl.full([], 0, tl.int64)
    each = _to_units(low.to(tl.float32, bitcast=True)) if BY_MASS else tl.full([], 1, tl.int64)
    # Less mass than two tokens at `low` have is one token.
    while (high - low > 1) & (whole - beyond >= 2 * each):
        step = (high - low + SPLITS) // (SPLITS + 1)
        threshold_S = tl.minimum(low + (1 + tl.arange(0, SPLITS)) * step, high)
        total_S = _measure(row_ptr, size, threshold_S, BY_MASS, BLOCK)
        reaches_S = total_S >= limit
        low = tl.max(tl.where(reaches_S, threshold_S, low), axis=0)
        high = tl.min(tl.where(reaches_S, high, threshold_S), axis=0)
        whole = tl.min(tl.where(reaches_S, total_S, whole), axis=0)
        beyond = tl.max(tl.where(reaches_S, beyond, total_S), axis=0)
        each = _to_units(low.to(tl.float32, bitcast=True)) if BY_MASS else each
    each = tl.maximum(each, 1)
    kept = tl.minimum(kept, whole)
    first = tl.minimum((limit - beyond + each - 1) // each, (kept - beyond) // each)
    is_tied = first < (whole - beyond) // each
    return low, first, is_tied, tl.where(is_tied, beyond + first * each, whole)


@triton.jit(do_not_specialize=["size"])  # type: ignore[untyped-decorator]
def _cut_row(
    p_ptr, out_ptr, min_p_ptr, top_k_ptr, top_p_ptr, head_mass_ptr, out_stride, out_step, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = p_ptr + row * size
    largest_N, mass_N = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        p = tl.load(row_ptr + v, mask=v < size, other=0.0)
        largest_N = tl.maximum(largest_N, p.to(tl.int32, bitcast=True) & UNSIGNED)
        mass_N += _to_units(p)
    largest, whole = tl.max(largest_N, axis=0), tl.sum(mass_N, axis=0)
    least = tl.load(min_p_ptr + row) * largest.to(tl.float32, bitcast=True)
    low, is_number = least.to(tl.int32, bitcast=True), largest < NO_NUMBER
    splits_S, first = tl.arange(0, SPLITS), tl.full([], 0, tl.int64)
    is_tied = first > 0
    kept, top_k = whole, tl.load(top_k_ptr + row)
    if is_number & ((low > 0) | (top_k < size)):
        kept = tl.max(_measure(row_ptr, size, low + 0 * splits_S, False, BLOCK), axis=0)
        if kept > top_k:
            low, first, is_tied, kept = _find_cut(
                row_ptr, size, low, largest + 1, kept, kept, top_k, False, BLOCK
            )
        mass_S = _measure(row_ptr, size, low + tl.minimum(splits_S, 1), True, BLOCK)
        whole = tl.max(mass_S, axis=0)
        each = _to_units(low.to(tl.float32, bitcast=True))
        kept = tl.where(is_tied, tl.min(mass_S, axis=0) + first * each, whole)
    total = kept
    limit = tl.ceil(tl.load(top_p_ptr + row) * total.to(tl.float64)).to(tl.int64)
    if is_number & (total >= limit):
        low, first, is_tied, kept = _find_cut(
            row_ptr, size, low, largest + 1, total, whole, limit, True, BLOCK
        )
    share = tl.minimum(kept.to(tl.float64) / total.to(tl.float64), 1.0)
    tl.store(head_mass_ptr + row, tl.where(is_number, share, float("nan")).to(tl.float32))
    last = tl.full([], 0, tl.int32) + size
    if is_tied:
        seen = tl.full([], 0, tl.int32)
        for start in range(0, size, BLOCK):
            v = start + tl.arange(0, BLOCK)
            bits = tl.load(row_ptr + v, mask=v < size, other=-1.0).to(tl.int32, bitcast=True)
            at_low = (bits == low).to(tl.int32)
            is_last = (at_low > 0) & (seen + tl.cumsum(at_low, axis=0) == first)
            last = tl.minimum(last, tl.min(tl.where(is_last, v, size), axis=0))
            seen += tl.sum(at_low, axis=0)
    for start in range(0, size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        bits = tl.load(row_ptr + v, mask=v < size, other=0.0).to(tl.int32, bitcast=True)
        is_cut = (bits < low) | ((bits == low) & (v > last)) | ~is_number
        own_ptr = out_ptr + row * out_stride + v.to(tl.int64) * out_step
        tl.store(own_ptr, float("-inf"), mask=(v < size) & is_cut)


def cut_rows(p_RV: Tensor, limits: tuple[Tensor, Tensor, Tensor], out_RV: Tensor) -> Tensor:
    """Set tokens that the cuts remove to minus infinity in `out_RV`, given float32 probabilities.

    `limits`: each row's `min_p`, `top_k` (int64) and `top_p` (float64), [R, 1] each. Return the
    mass that `top_p` keeps of 1 [R].
    """
    rows, size = p_RV.shape
    head_mass_R = torch.empty(rows, dtype=torch.float32, device=p_RV.device)
    _cut_row[(rows,)](
        p_RV.contiguous(), out_RV, *limits, head_mass_R,
        *out_RV.stride(), size, BLOCK=min(BLOCK, triton.next_power_of_2(size)), num_warps=WARPS,
    )  # fmt: skip
    return head_mass_R
