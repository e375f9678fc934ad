# mypy: allow-untyped-defs, allow-incomplete-defs
"""The steering operation as two Triton kernels, for CUDA, each with a program for each token.

They compute what `SteeringTables.apply` computes, touch persistent buffers only, and need nothing
from the host, so that full CUDA graphs capture them. The first reads what probes ask for, so that
the second finds the readings of all tokens, those that decide for others among them. A token with
slot 0 costs two loads.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from logsteer_server.engines.vllm.probe_tables import CLOSED, DECIDED
from logsteer_server.numerics.probes import CONDITION_NUMBERS, READINGS
from logsteer_server.numerics.residual_ops import UNCHANGED

if TYPE_CHECKING:
    from logsteer_server.engines.vllm.tables import SteeringTables

OP_NUMBERS = tl.constexpr(len(UNCHANGED))
CONDITION_AT = tl.constexpr(len(UNCHANGED) - 1)
CONDITION_SIZE = tl.constexpr(CONDITION_NUMBERS)
READING_SIZE = tl.constexpr(READINGS)
IS_CLOSED, IS_DECIDED = tl.constexpr(CLOSED), tl.constexpr(DECIDED)

WARPS_ABOVE = 2048
"""Width from which a program gets eight warps instead of four."""


@triton.jit  # type: ignore[untyped-decorator]
def _load_stream(
    hidden_ptr, residual_ptr, residual_counts_ptr, hidden_stride, residual_stride, token, width,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    inside = d < width
    own = tl.load(hidden_ptr + token * hidden_stride + d, mask=inside, other=0.0).to(tl.float32)
    residual = tl.zeros([BLOCK], tl.float32)
    if HAS_RESIDUAL:
        counts = inside & (tl.load(residual_counts_ptr) != 0)
        at = residual_ptr + token * residual_stride + d
        residual = tl.load(at, mask=counts, other=0.0).to(tl.float32)
    return own, residual


@triton.jit  # type: ignore[untyped-decorator]
def _read_into(
    readings_ptr, directions_ptr, layers_ptr, stream, token, slot, layer, width,
    IS_AFTER: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    norm = tl.sqrt(tl.sum(stream * stream))
    for g in range(PROBES):
        place = slot * PROBES + g
        if tl.load(layers_ptr + place) == layer:
            u = tl.load(directions_ptr + place * width + d, mask=d < width, other=0.0)
            component = tl.sum(stream * u)
            reading_ptr = readings_ptr + (token * PROBES + g) * READING_SIZE
            if not IS_AFTER:
                tl.store(reading_ptr, component)
                tl.store(reading_ptr + 1, norm)
            tl.store(reading_ptr + 2, component)
            tl.store(reading_ptr + 3, norm)


@triton.jit  # type: ignore[untyped-decorator]
def _read_token(
    hidden_ptr, residual_ptr, residual_counts_ptr, read_slots_ptr, probe_layers_ptr,
    probe_directions_ptr, readings_ptr, hidden_stride, residual_stride, layer, width,
    HAS_RESIDUAL: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(read_slots_ptr + token).to(tl.int64)
    if slot == 0:
        return
    is_read = False
    for g in range(PROBES):
        is_read = is_read | (tl.load(probe_layers_ptr + slot * PROBES + g) == layer)
    if is_read:
        own, residual = _load_stream(
            hidden_ptr, residual_ptr, residual_counts_ptr, hidden_stride, residual_stride, token,
            width, HAS_RESIDUAL, BLOCK,
        )  # fmt: skip
        _read_into(
            readings_ptr, probe_directions_ptr, probe_layers_ptr, own + residual, token, slot,
            layer, width, False, PROBES, BLOCK,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _is_open(
    condition, slot, token, conditions_ptr, sources_ptr, decided_ptr, readings_ptr,
    PROBES: tl.constexpr,
):  # fmt: skip
    asked = tl.maximum(condition, 0)
    numbers_ptr = conditions_ptr + (slot * PROBES + asked) * CONDITION_SIZE
    probe = tl.load(numbers_ptr).to(tl.int32)
    of_prompt = tl.load(numbers_ptr + 4) != 0.0
    source = tl.load(sources_ptr + token)
    place = tl.where(of_prompt, tl.maximum(source, 0).to(tl.int64), token)
    reading_ptr = readings_ptr + (place * PROBES + probe) * READING_SIZE
    component = tl.load(reading_ptr)
    relative = tl.load(numbers_ptr + 3)
    scale = relative * tl.load(reading_ptr + 1) + (1.0 - relative)
    above, below = tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
    holds = (component > above * scale) & (component < below * scale)
    is_decided = ((tl.load(decided_ptr + token) >> asked) & 1) != 0
    holds = tl.where(of_prompt & (source == IS_DECIDED), is_decided, holds)
    return (condition < 0) | (holds & ~(of_prompt & (source == IS_CLOSED)))


@triton.jit
def _change_once(x, u, number):
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
    return (keep - 1.0) * across + (wanted - component) * u


@triton.jit  # type: ignore[untyped-decorator]
def _steer_token(
    hidden_ptr, residual_ptr, residual_counts_ptr, slots_ptr, captures_ptr, offsets_ptr,
    directions_ptr, numbers_ptr, ratios_ptr, sums_ptr, read_slots_ptr, probe_layers_ptr,
    probe_directions_ptr, conditions_ptr, sources_ptr, decided_ptr, readings_ptr,
    hidden_stride, residual_stride, layer, width,
    HAS_RESIDUAL: tl.constexpr, DEPTH: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    capture = tl.load(captures_ptr + token).to(tl.int64)
    if slot == 0 and capture == 0:
        return
    d = tl.arange(0, BLOCK)
    inside = d < width
    own, residual = _load_stream(
        hidden_ptr, residual_ptr, residual_counts_ptr, hidden_stride, residual_stride, token,
        width, HAS_RESIDUAL, BLOCK,
    )  # fmt: skip
    if slot != 0:
        before = own + residual
        offset = tl.load(offsets_ptr + slot * width + d, mask=inside, other=0.0).to(tl.float32)
        own = (own + offset).to(hidden_ptr.dtype.element_ty).to(tl.float32)
        x = own + residual
        start = x
        for k in tl.static_range(DEPTH):
            place = slot * DEPTH + k
            u = tl.load(directions_ptr + place * width + d, mask=inside, other=0.0)
            number = numbers_ptr + place * OP_NUMBERS
            change = _change_once(x, u, number)
            condition = tl.load(number + CONDITION_AT).to(tl.int32)
            acts = _is_open(
                condition, slot, token, conditions_ptr, sources_ptr, decided_ptr, readings_ptr,
                PROBES,
            )  # fmt: skip
            x += tl.where(acts, change, 0.0)
        own = (own + (x - start)).to(hidden_ptr.dtype.element_ty).to(tl.float32)
        change = tl.where(inside, x - before, 0.0)
        scale = tl.sqrt(tl.sum(before * before))
        length = tl.sqrt(tl.sum(change * change))
        tl.store(ratios_ptr + token, tl.where(scale == 0.0, 0.0, length / scale))
        own_ptr = hidden_ptr + token * hidden_stride + d
        tl.store(own_ptr, own.to(hidden_ptr.dtype.element_ty), mask=inside)
        read_slot = tl.load(read_slots_ptr + token).to(tl.int64)
        if read_slot != 0:
            _read_into(
                readings_ptr, probe_directions_ptr, probe_layers_ptr, own + residual, token,
                read_slot, layer, width, True, PROBES, BLOCK,
            )  # fmt: skip
    if capture != 0:
        tl.atomic_add(sums_ptr + capture * width + d, own + residual, mask=inside)


def launch(
    tables: "SteeringTables", hidden_TD: Tensor, residual_TD: Tensor | None, layer: int
) -> None:
    """Read, steer a layer's output in place, measure, and capture, in two launches."""
    tokens, width = hidden_TD.shape
    second_TD = hidden_TD if residual_TD is None else residual_TD
    probes = tables.probes
    stream = (hidden_TD, second_TD, tables.residual_counts_1)
    read = (probes.slots_T, probes.layers_SG, probes.directions_SGD)
    sizes = (hidden_TD.stride(0), second_TD.stride(0), layer, width)
    options = {
        "HAS_RESIDUAL": residual_TD is not None,
        "PROBES": probes.directions_SGD.shape[1],
        "BLOCK": triton.next_power_of_2(width),
        "num_warps": 8 if width > WARPS_ABOVE else 4,
    }
    _read_token[(tokens,)](*stream, *read, probes.readings_TGR, *sizes, **options)
    _steer_token[(tokens,)](
        *stream, tables.slots_T, tables.captures.rows_LT[layer], tables.offsets_LSD[layer],
        tables.directions_LSKD[layer], tables.numbers_LSKP[layer], tables.ratios_LT[layer],
        tables.captures.sums_ND, *read, probes.conditions_SCP, probes.sources_T, probes.decided_T,
        probes.readings_TGR, *sizes, DEPTH=tables.directions_LSKD.shape[2], **options,
    )  # fmt: skip
