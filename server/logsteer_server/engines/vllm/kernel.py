# mypy: allow-untyped-defs, allow-incomplete-defs
"""The steering operation as two Triton kernels, for CUDA.

They compute the same as `SteeringTables.apply`, use persistent buffers only, and need nothing from
the host, so that full CUDA graphs capture them. The first evaluates the probes, so that the second
has the readings of all tokens, also of the tokens that decide for others.

A launch has a fixed number of programs, which share the marked tokens of the step. The buffer of
marks has their number, because a captured graph is replayed with padding after the tokens. A token
whose slot does nothing at a layer costs the loads of its mark and of its slot's work.

A program keeps vectors of a token's width in registers. A multiprocessor has 65,536 registers and a
thread at most 255: room for four float32 vectors at a width of 16,384, with 8 or 16 warps, and for
eight at 8,192. So the loop over operations keeps only x and one direction, and each operation
reduces over the width twice; the parts of the stream are loaded again after the loop, from a cache.
For compute capability 9.0 and bfloat16, ptxas reports per thread 95 registers at 2,048 (4 warps),
116 at 4,096 (8) and 8,192 (16), and at 16,384 all 128 that 16 warps can have, with 16 bytes
spilled.
"""

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from logsteer_server.engines.vllm.layout import CLOSED, DECIDED, Mark, Work
from logsteer_server.numerics.residual_ops import CONDITION_NUMBERS, READINGS, UNCHANGED

if TYPE_CHECKING:
    from logsteer_server.engines.vllm.tables import SteeringTables

OP_NUMBERS = tl.constexpr(len(UNCHANGED))
CONDITION_AT = tl.constexpr(len(UNCHANGED) - 1)
CONDITION_SIZE = tl.constexpr(CONDITION_NUMBERS)
READING_SIZE = tl.constexpr(READINGS)
IS_CLOSED, IS_DECIDED = tl.constexpr(CLOSED), tl.constexpr(DECIDED)
MARK_SIZE, WORK_SIZE = tl.constexpr(len(Mark)), tl.constexpr(len(Work))
PLACE, SLOT, READ_SLOT = (tl.constexpr(int(x)) for x in (Mark.PLACE, Mark.SLOT, Mark.READ_SLOT))
ENTRY, COUNTED = tl.constexpr(int(Mark.ENTRY)), tl.constexpr(int(Mark.COUNTED))
SOURCE, CAPTURED = tl.constexpr(int(Mark.SOURCE)), tl.constexpr(int(Mark.CAPTURED))
DEPTH, HAS_OFFSET = tl.constexpr(int(Work.DEPTH)), tl.constexpr(int(Work.HAS_OFFSET))
FIRST_PROBE, PROBE_COUNT = tl.constexpr(int(Work.FIRST_PROBE)), tl.constexpr(int(Work.PROBE_COUNT))

WARPS_UP_TO = {2048: 4, 4096: 8}
"""Largest width -> warps of a program."""
MOST_WARPS = 16
"""Warps of a program beyond these widths, and of all programs on a multiprocessor together."""
INTERPRETED = 1
"""Multiprocessors in Triton's interpreter: few, so that each program gets many tokens."""


@triton.jit
def _load_part(part_ptr, d, inside):
    return tl.load(part_ptr + d, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _load_again(part_ptr, d, inside, MODIFIER: tl.constexpr):
    # The cache modifier keeps the compiler from holding the first load in registers.
    return tl.load(part_ptr + d, mask=inside, other=0.0, cache_modifier=MODIFIER).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _read_into(
    readings_ptr, directions_ptr, order_ptr, stream, place, slot, first, count, width,
    IS_AFTER: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    norm = tl.sqrt(tl.sum(stream * stream))
    for n in range(first, first + count):
        probe = tl.load(order_ptr + slot * PROBES + n).to(tl.int64)
        u = _load_part(directions_ptr + (slot * PROBES + probe) * width, d, d < width)
        component = tl.sum(stream * u)
        reading_ptr = readings_ptr + (place * PROBES + probe) * READING_SIZE
        if not IS_AFTER:
            tl.store(reading_ptr, component)
            tl.store(reading_ptr + 1, norm)
        tl.store(reading_ptr + 2, component)
        tl.store(reading_ptr + 3, norm)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _read_tokens(
    hidden_ptr, residual_ptr, residual_counts_ptr, marks_ptr, work_ptr, order_ptr,
    probe_directions_ptr, readings_ptr, hidden_stride, residual_stride, tokens, width,
    HAS_RESIDUAL: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    inside = d < width
    for number in range(tl.program_id(0), tl.load(marks_ptr), tl.num_programs(0)):
        mark_ptr = marks_ptr + (1 + number) * MARK_SIZE
        slot = tl.load(mark_ptr + READ_SLOT).to(tl.int64)
        place = tl.load(mark_ptr + PLACE).to(tl.int64)
        count = tl.load(work_ptr + slot * WORK_SIZE + PROBE_COUNT)
        if (count > 0) & (place < tokens):
            first = tl.load(work_ptr + slot * WORK_SIZE + FIRST_PROBE)
            stream = _load_part(hidden_ptr + place * hidden_stride, d, inside)
            if HAS_RESIDUAL:
                counts = inside & (tl.load(residual_counts_ptr) != 0)
                stream += _load_part(residual_ptr + place * residual_stride, d, counts)
            _read_into(
                readings_ptr, probe_directions_ptr, order_ptr, stream, place, slot, first, count,
                width, False, PROBES, BLOCK,
            )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _is_open(
    condition, slot, mark_ptr, place, conditions_ptr, decided_ptr, readings_ptr,
    PROBES: tl.constexpr,
):  # fmt: skip
    asked = tl.maximum(condition, 0)
    numbers_ptr = conditions_ptr + (slot * PROBES + asked) * CONDITION_SIZE
    probe = tl.load(numbers_ptr).to(tl.int32)
    of_prompt = tl.load(numbers_ptr + 4) != 0.0
    source = tl.load(mark_ptr + SOURCE)
    read = tl.where(of_prompt, tl.maximum(source, 0).to(tl.int64), place)
    reading_ptr = readings_ptr + (read * PROBES + probe) * READING_SIZE
    component = tl.load(reading_ptr)
    relative = tl.load(numbers_ptr + 3)
    scale = relative * tl.load(reading_ptr + 1) + (1.0 - relative)
    above, below = tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
    holds = (component > above * scale) & (component < below * scale)
    decided = tl.load(decided_ptr + tl.load(mark_ptr + ENTRY))
    holds = tl.where(of_prompt & (source == IS_DECIDED), ((decided >> asked) & 1) != 0, holds)
    return (condition < 0) | (holds & ~(of_prompt & (source == IS_CLOSED)))


@triton.jit
def _change_once(x, u, number_ptr, acts):
    degrees = tl.load(number_ptr + 6)
    component = tl.sum(x * u)
    norm = tl.sqrt(tl.sum(x * x))
    wanted = tl.load(number_ptr) + tl.load(number_ptr + 1) * norm
    wanted += tl.load(number_ptr + 2) * component
    wanted = tl.minimum(tl.maximum(wanted, tl.load(number_ptr + 3)), tl.load(number_ptr + 4))
    keep = tl.load(number_ptr + 5)
    if degrees != 0.0:
        across = x - component * u
        across_norm = tl.sqrt(tl.sum(across * across))
        cosine = tl.cos(degrees * 0.017453292519943295)
        sine = tl.sin(degrees * 0.017453292519943295)
        along_u = (degrees > 0.0) & (component >= norm * cosine)
        against_u = (degrees < 0.0) & (component <= -norm * cosine)
        turned = component * cosine + across_norm * sine
        turned = tl.where(along_u, norm, tl.where(against_u, -norm, turned))
        rest = across_norm * cosine - component * sine
        rest = tl.where(along_u | against_u, 0.0, rest)
        turns = across_norm > 1e-6 * norm
        wanted = tl.where(turns, turned, wanted)
        keep = tl.where(turns, rest / tl.maximum(across_norm, 1e-30), keep)
    change = (keep - 1.0) * (x - component * u) + (wanted - component) * u
    return x + tl.where(acts, change, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _operate(
    x, mark_ptr, place, slot, depth, directions_ptr, numbers_ptr, conditions_ptr, decided_ptr,
    readings_ptr, width, MAX_DEPTH: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    for k in range(depth):
        op = slot * MAX_DEPTH + k
        number_ptr = numbers_ptr + op * OP_NUMBERS
        condition = tl.load(number_ptr + CONDITION_AT).to(tl.int32)
        acts = _is_open(
            condition, slot, mark_ptr, place, conditions_ptr, decided_ptr, readings_ptr, PROBES
        )
        u = _load_part(directions_ptr + op * width, d, d < width)
        x = _change_once(x, u, number_ptr, acts)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _store_moved(
    x, scale, own_ptr, beside_ptr, offset_ptr, sum_ptr, counts, moved, counted, width,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    inside = d < width
    stream = _load_again(own_ptr, d, inside, ".ca")
    if HAS_RESIDUAL:
        stream += _load_again(beside_ptr, d, counts, ".ca")
    moved_by = tl.where(inside, x - stream, 0.0)
    length = tl.sqrt(tl.sum(moved_by * moved_by))
    own = _load_again(own_ptr, d, inside, ".cg")
    own = (own + _load_again(offset_ptr, d, moved, ".cg")).to(own_ptr.dtype.element_ty)
    own = own.to(tl.float32)
    if HAS_RESIDUAL:
        own += x - (own + _load_again(beside_ptr, d, counts, ".cg"))
    else:
        own += x - own
    tl.store(own_ptr + d, own.to(own_ptr.dtype.element_ty), mask=inside)
    if counted != 0:
        ratio = tl.where(scale == 0.0, 0.0, length / scale).to(tl.float64)
        tl.atomic_add(sum_ptr, tl.where(ratio != 0.0, 1.0, 0.0).to(tl.float64))
        tl.atomic_add(sum_ptr + 1, ratio)
        tl.atomic_add(sum_ptr + 2, tl.where(counted == 2, ratio, 0.0))
    return own.to(own_ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "layer"])  # type: ignore[untyped-decorator]
def _steer_tokens(
    hidden_ptr, residual_ptr, residual_counts_ptr, marks_ptr, work_ptr, order_ptr,
    probe_directions_ptr, readings_ptr, captures_ptr, offsets_ptr, directions_ptr, numbers_ptr,
    sums_ptr, rows_ptr, conditions_ptr, decided_ptr, hidden_stride, residual_stride, tokens, layer,
    layers, width, HAS_RESIDUAL: tl.constexpr, MAX_DEPTH: tl.constexpr, PROBES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    inside = d < width
    for number in range(tl.program_id(0), tl.load(marks_ptr), tl.num_programs(0)):
        mark_ptr = marks_ptr + (1 + number) * MARK_SIZE
        place, slot = tl.load(mark_ptr + PLACE).to(tl.int64), tl.load(mark_ptr + SLOT).to(tl.int64)
        slot = tl.where(place < tokens, slot, 0)  # slot 0 has nothing at any layer
        depth = tl.load(work_ptr + slot * WORK_SIZE + DEPTH)
        is_moved = tl.load(work_ptr + slot * WORK_SIZE + HAS_OFFSET) != 0
        captured = tl.load(mark_ptr + CAPTURED)
        row = tl.load(captures_ptr + place, mask=(captured != 0) & (place < tokens), other=0)
        own_ptr = hidden_ptr + place * hidden_stride
        beside_ptr = residual_ptr + place * residual_stride
        row_ptr = rows_ptr + row.to(tl.int64) * width + d
        counts = inside
        if HAS_RESIDUAL:
            counts = inside & (tl.load(residual_counts_ptr) != 0)
        if is_moved | (depth > 0):
            moved, offset_ptr = inside & is_moved, offsets_ptr + slot * width
            x = _load_part(own_ptr, d, inside)
            before = x
            if HAS_RESIDUAL:
                before += _load_part(beside_ptr, d, counts)
            tl.store(row_ptr, before, mask=inside & (row != 0) & (captured == 2))
            scale = tl.sqrt(tl.sum(before * before))
            x = (x + _load_part(offset_ptr, d, moved)).to(own_ptr.dtype.element_ty).to(tl.float32)
            if HAS_RESIDUAL:
                x += _load_part(beside_ptr, d, counts)
            x = _operate(
                x, mark_ptr, place, slot, depth, directions_ptr, numbers_ptr, conditions_ptr,
                decided_ptr, readings_ptr, width, MAX_DEPTH, PROBES, BLOCK,
            )  # fmt: skip
            sum_ptr = sums_ptr + (tl.load(mark_ptr + ENTRY).to(tl.int64) * layers + layer) * 3
            stream = _store_moved(
                x, scale, own_ptr, beside_ptr, offset_ptr, sum_ptr, counts, moved,
                tl.load(mark_ptr + COUNTED), width, HAS_RESIDUAL, BLOCK,
            )  # fmt: skip
            read_slot = tl.load(mark_ptr + READ_SLOT).to(tl.int64)
            count = tl.load(work_ptr + read_slot * WORK_SIZE + PROBE_COUNT)
            if (count > 0) | (row != 0):
                if HAS_RESIDUAL:
                    stream += _load_again(beside_ptr, d, counts, ".ca")
                first = tl.load(work_ptr + read_slot * WORK_SIZE + FIRST_PROBE)
                _read_into(
                    readings_ptr, probe_directions_ptr, order_ptr, stream, place, read_slot, first,
                    count, width, True, PROBES, BLOCK,
                )  # fmt: skip
                tl.store(row_ptr, stream, mask=inside & (row != 0) & (captured == 1))
        elif row != 0:
            stream = _load_part(own_ptr, d, inside)
            if HAS_RESIDUAL:
                stream += _load_part(beside_ptr, d, counts)
            tl.store(row_ptr, stream, mask=inside)


@cache
def _count_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def count_warps(width: int) -> int:
    """Return the warps of a program for a width."""
    return next((warps for limit, warps in WARPS_UP_TO.items() if width <= limit), MOST_WARPS)


def launch(
    tables: "SteeringTables", hidden_TD: Tensor, residual_TD: Tensor | None, layer: int
) -> None:
    """Evaluate probes, steer a layer's output in place, measure, and capture, in two launches.

    If requests are being served and no token is marked, nothing is launched, unless a graph is
    being captured, which later steps replay.
    """
    captures = hidden_TD.is_cuda and torch.cuda.is_current_stream_capturing()
    if tables.serves and tables.is_idle and not captures:
        return
    tokens, width = hidden_TD.shape
    own = tables.layers[layer]
    second_TD = hidden_TD if residual_TD is None else residual_TD
    probes, warps = tables.probes, count_warps(width)
    programs = _count_multiprocessors(hidden_TD.device) * (MOST_WARPS // warps)
    common = (
        hidden_TD, second_TD, tables.residual_counts_1, tables.marks_MF, own.work_SW,
        probes.order_SG, probes.directions_SGD, probes.readings_TGR,
    )  # fmt: skip
    sizes = (hidden_TD.stride(0), second_TD.stride(0), tokens)
    options = {
        "HAS_RESIDUAL": residual_TD is not None,
        "PROBES": probes.directions_SGD.shape[1],
        "BLOCK": triton.next_power_of_2(width),
        "num_warps": warps,
    }
    grid = (min(tokens, programs),)
    _read_tokens[grid](*common, *sizes, width, **options)
    _steer_tokens[grid](
        *common, own.capture_rows_T, own.offsets_SD, own.directions_SKD, own.numbers_SKP,
        tables.sums.sums_EL3, tables.captures.stored_ND, probes.conditions_SCP, probes.decided_E,
        *sizes, layer,
        tables.sums.sums_EL3.shape[1], width, MAX_DEPTH=tables.directions_LSKD.shape[2], **options,
    )  # fmt: skip
