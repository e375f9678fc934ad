# mypy: allow-untyped-defs, allow-incomplete-defs
"""The steering operation as one Triton kernel, for CUDA: a program for each token.

It computes what `SteeringTables.apply` computes, touches persistent buffers only, and needs nothing
from the host, so that full CUDA graphs capture it. A token with slot 0 costs two loads.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from logsteer_server.engines.vllm.tables import SteeringTables

WARPS_ABOVE = 2048
"""Width from which a program gets eight warps instead of four."""


@triton.jit  # type: ignore[untyped-decorator]
def _steer_token(
    hidden_ptr, residual_ptr, slots_ptr, captures_ptr, offsets_ptr, directions_ptr, numbers_ptr,
    ratios_ptr, sums_ptr, residual_counts_ptr, hidden_stride, residual_stride, width,
    HAS_RESIDUAL: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    capture = tl.load(captures_ptr + token).to(tl.int64)
    if slot == 0 and capture == 0:
        return
    d = tl.arange(0, BLOCK)
    inside = d < width
    own_ptr = hidden_ptr + token * hidden_stride + d
    own = tl.load(own_ptr, mask=inside, other=0.0).to(tl.float32)
    residual = tl.zeros([BLOCK], tl.float32)
    if HAS_RESIDUAL:
        at = residual_ptr + token * residual_stride + d
        counts = inside & (tl.load(residual_counts_ptr) != 0)
        residual = tl.load(at, mask=counts, other=0.0).to(tl.float32)
    if slot != 0:
        before = own + residual
        offset = tl.load(offsets_ptr + slot * width + d, mask=inside, other=0.0).to(tl.float32)
        own = (own + offset).to(hidden_ptr.dtype.element_ty).to(tl.float32)
        x = own + residual
        start = x
        for k in tl.static_range(DEPTH):
            place = slot * DEPTH + k
            u = tl.load(directions_ptr + place * width + d, mask=inside, other=0.0)
            number = numbers_ptr + place * 7
            degrees = tl.load(number + 6)
            component = tl.sum(x * u)
            norm = tl.sqrt(tl.sum(x * x))
            wanted = tl.load(number) + tl.load(number + 1) * norm + tl.load(number + 2) * component
            wanted = tl.minimum(tl.maximum(wanted, tl.load(number + 3)), tl.load(number + 4))
            keep = tl.load(number + 5)
            across = x - component * u
            across_norm = tl.sqrt(tl.sum(across * across))
            turns = (degrees != 0.0) & (across_norm > 1e-6 * norm)
            cosine = tl.cos(degrees * 0.017453292519943295)
            sine = tl.sin(degrees * 0.017453292519943295)
            along_u = (degrees > 0.0) & (component >= norm * cosine)
            against_u = (degrees < 0.0) & (component <= -norm * cosine)
            turned = component * cosine + across_norm * sine
            turned = tl.where(along_u, norm, tl.where(against_u, -norm, turned))
            rest = across_norm * cosine - component * sine
            rest = tl.where(along_u | against_u, 0.0, rest)
            wanted = tl.where(turns, turned, wanted)
            keep = tl.where(turns, rest / tl.maximum(across_norm, 1e-30), keep)
            x += (keep - 1.0) * across + (wanted - component) * u
        own = (own + (x - start)).to(hidden_ptr.dtype.element_ty).to(tl.float32)
        change = tl.where(inside, x - before, 0.0)
        scale = tl.sqrt(tl.sum(before * before))
        length = tl.sqrt(tl.sum(change * change))
        tl.store(ratios_ptr + token, tl.where(scale == 0.0, 0.0, length / scale))
        tl.store(own_ptr, own.to(hidden_ptr.dtype.element_ty), mask=inside)
    if capture != 0:
        tl.atomic_add(sums_ptr + capture * width + d, own + residual, mask=inside)


def launch(
    tables: "SteeringTables", hidden_TD: Tensor, residual_TD: Tensor | None, layer: int
) -> None:
    """Steer a layer's output in place, measure, and capture, in one launch."""
    tokens, width = hidden_TD.shape
    second_TD = hidden_TD if residual_TD is None else residual_TD
    _steer_token[(tokens,)](
        hidden_TD, second_TD, tables.slots_T, tables.captures.rows_LT[layer],
        tables.offsets_LSD[layer], tables.directions_LSKD[layer], tables.numbers_LSKP[layer],
        tables.ratios_LT[layer], tables.captures.sums_ND, tables.residual_counts_1,
        hidden_TD.stride(0), second_TD.stride(0), width,
        HAS_RESIDUAL=residual_TD is not None, DEPTH=tables.directions_LSKD.shape[2],
        BLOCK=triton.next_power_of_2(width), num_warps=8 if width > WARPS_ABOVE else 4,
    )  # fmt: skip
