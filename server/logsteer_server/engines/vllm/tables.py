"""Steering tables: what each slot does at each layer, and the operation that does it.

The operation `logsteer::steer` stands behind every decoder layer and always runs, so that compiled
graphs and CUDA graphs contain it. What it does is data: each token of a step has a slot, and slot 0
changes nothing. It also measures what it changed, reads what probes ask for (`probe_tables`), and
captures activations that are wanted (`captures`).

Axis letters: L layers, S slots, T tokens of a step, D width, K operations.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logsteer_server.contract.plan import SteeringPlan
from logsteer_server.engines.vllm.captures import CaptureBuffer, Captured
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.probe_tables import (
    NONE_READ,
    ProbeTables,
    ReadTokens,
    no_places,
)
from logsteer_server.engines.vllm.stream import StreamForm
from logsteer_server.numerics.residual_ops import UNCHANGED, change_stream, pack_ops


@dataclass(frozen=True, slots=True)
class Step:
    """What the tokens of one step are for: places and slots of those steered; captured; read."""

    steered_t: npt.NDArray[np.int64] = field(default_factory=no_places)
    steered_slots_t: npt.NDArray[np.int64] = field(default_factory=no_places)
    captured: Captured = field(default_factory=dict)
    read: ReadTokens = NONE_READ

    def is_same(self, other: "Step") -> bool:
        """Return whether both steer and read the very same arrays of tokens, and capture none."""
        return (
            self.steered_t is other.steered_t
            and self.read is other.read
            and not self.captured
            and not other.captured
        )


class SteeringTables:
    """Hold the persistent buffers of one model on one rank, and steer with them.

    `offsets_LSD[l, s]` is what slot s adds at layer l; `directions_LSKD` and `numbers_LSKP` are the
    operations that follow. A plan in slot 2 that adds v at layer 5, and a step of four tokens of
    which the last two are steered by it:

        load(2, a plan of Site(5, "resid_post", v))    offsets_LSD[5, 2] = v
        write(Step([2, 3], [2, 2]))                    a CUDA device's slots_T = [0, 0, 2, 2]
        apply(hidden_TD, residual_TD, 5)               hidden_TD[2:4] += v
        read_ratios()                                  {5: [|v| / |x| of token 2, of token 3]}
    """

    def __init__(
        self, size: SteeringSize, layers: int, tokens: int, width: int, like: Tensor
    ) -> None:
        new, float32 = like.new_zeros, torch.float32
        slots = size.slots + 1
        self.offsets_LSD = new((layers, slots, width))
        self.offset_norms_LS = new((layers, slots), dtype=float32)
        self.directions_LSKD = new((layers, slots, size.depth, width), dtype=float32)
        unchanged = torch.tensor(UNCHANGED, device=like.device)
        self.numbers_LSKP = unchanged.repeat(layers, slots, size.depth, 1)
        self.slots_T = new((tokens,), dtype=torch.int32)
        self.ratios_LT = new((layers, tokens), dtype=float32)
        rows = size.count_rows(layers, width)
        self.captures = CaptureBuffer(rows, layers, tokens, width, like)
        self.probes = ProbeTables(slots, size.probes, tokens, width, like)
        self.residual_counts_1 = torch.ones(1, dtype=torch.int32, device=like.device)
        self._residual_counts = True
        self._layers_of_slot: list[frozenset[int]] = [frozenset()] * slots
        self._depths: list[dict[int, int]] = [{}] * slots
        self.step = Step()
        self._begin(self.step)

    def set_form(self, form: StreamForm) -> None:
        """Say where the residual stream is in what the model's layers return."""
        self._residual_counts = form == "sum"
        self.residual_counts_1.fill_(self._residual_counts)

    def load(self, slot: int, plan: SteeringPlan) -> None:
        """Put a plan's sites, probes and conditions into a slot, in place of what it held."""
        sites = plan.sites
        self.probes.load(slot, plan.probes, plan.conditions)
        for layer in self._layers_of_slot[slot]:
            self.offsets_LSD[layer, slot] = 0
            self.offset_norms_LS[layer, slot] = 0
            self.directions_LSKD[layer, slot] = 0
            self.numbers_LSKP[layer, slot] = torch.tensor(UNCHANGED)
        depth, width = self.directions_LSKD.shape[2:]
        for site in sites:
            if site.offset is not None:
                offset_D = torch.tensor(site.offset).to(self.offsets_LSD)
                self.offsets_LSD[site.layer, slot] = offset_D
                self.offset_norms_LS[site.layer, slot] = offset_D.float().norm()
            if site.ops:
                directions_KD, numbers_KP = pack_ops(site.ops, depth, width)
                self.directions_LSKD[site.layer, slot] = directions_KD.to(self.directions_LSKD)
                self.numbers_LSKP[site.layer, slot] = numbers_KP.to(self.numbers_LSKP)
        self._layers_of_slot[slot] = frozenset(site.layer for site in sites)
        self._depths[slot] = {site.layer: len(site.ops) for site in sites if site.ops}

    def write(self, step: Step) -> None:
        """Store what the tokens of the next forward pass are for; tokens not named are for nothing.

        Call it between two passes, because captured graphs read these buffers.
        """
        if step.is_same(self.step):
            return
        self.probes.write(step.read)
        if self.slots_T.is_cuda:
            host_T = np.zeros(len(self.slots_T), dtype=np.int32)
            host_T[step.steered_t] = step.steered_slots_t
            self.slots_T.copy_(torch.from_numpy(host_T))
        self._begin(step)

    def _begin(self, step: Step) -> None:
        self.step = step
        self.captures.mark(step.captured)
        used = set(step.steered_slots_t.tolist())
        self.steered_layers: frozenset[int] = frozenset().union(
            *(self._layers_of_slot[slot] for slot in used)
        )
        self._changes: dict[int, _Change] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no token of this step is marked."""
        marked = (self.step.steered_t, self.step.captured, self.step.read.index_r)
        return not any(map(len, marked))

    def read_ratios(self) -> dict[int, npt.NDArray[np.float32]]:
        """Return |change| / |activation| of this step's steered tokens, by steered layer.

        Nothing is relative to an activation of 0: there it is 0. One that is not finite is NaN or
        infinite.
        """
        if self.slots_T.is_cuda:
            ratios_LT = self.ratios_LT[:, : int(self.step.steered_t.max(initial=-1)) + 1].cpu()
        else:
            ratios_LT = self.ratios_LT
        host_LT = ratios_LT.numpy()
        return {layer: host_LT[layer, self.step.steered_t] for layer in self.steered_layers}

    def apply(self, hidden_TD: Tensor, residual_TD: Tensor | None, layer: int) -> None:
        """Steer the tokens of this step at one layer, in place; measure, and capture.

        The plain form, which looks at the marked tokens alone: for CPUs.
        """
        if not self._residual_counts:
            residual_TD = None
        is_read, is_steered = layer in self.probes.layers, layer in self.steered_layers
        read_stream = partial(_read_stream, hidden_TD, residual_TD)
        if is_read:
            self.probes.read(read_stream, layer, after=False)
        if is_steered:
            self._steer(hidden_TD, residual_TD, layer)
        if is_read and is_steered:
            self.probes.read(read_stream, layer, after=True)
        if (captured := self.captures.find(layer)) is not None:
            index_t, rows_t = captured
            self.captures.sums_ND.index_add_(0, rows_t, read_stream(index_t))

    def _steer(self, hidden_TD: Tensor, residual_TD: Tensor | None, layer: int) -> None:
        change = self._changes.get(layer)
        if change is None:
            change = self._changes[layer] = self._gather(len(hidden_TD), layer)
        index_t = change.index_t
        stream_tD = _read_stream(hidden_TD, residual_TD, index_t)
        norms_t = stream_tD.norm(dim=-1)
        if index_t is None:
            hidden_TD += change.offsets_tD
        else:
            hidden_TD.index_add_(0, index_t, change.offsets_tD)
        size_t = change.offset_norms_t
        if change.directions_tKD is not None and change.numbers_tKP is not None:
            offset_tD = _read_stream(hidden_TD, residual_TD, index_t)
            open_tK = None
            if change.conditions_tK is not None:
                places_t = torch.from_numpy(self.step.steered_t)
                slots_t = torch.from_numpy(self.step.steered_slots_t)
                open_tK = self.probes.decide(places_t, slots_t, change.conditions_tK)
            change_tD = change_stream(offset_tD, change.directions_tKD, change.numbers_tKP, open_tK)
            if index_t is None:
                hidden_TD.copy_(hidden_TD.float() + change_tD)
            else:
                hidden_TD[index_t] = (hidden_TD[index_t].float() + change_tD).to(hidden_TD.dtype)
            size_t = (offset_tD + change_tD - stream_tD).norm(dim=-1)
        ratios_t = (size_t / norms_t).masked_fill_(norms_t == 0, 0.0)
        if index_t is None:
            self.ratios_LT[layer, : len(ratios_t)] = ratios_t
        else:
            self.ratios_LT[layer].index_copy_(0, index_t, ratios_t)

    def _gather(self, num_tokens: int, layer: int) -> "_Change":
        """Gather what is done to the tokens of this step at a layer, out of the slots' tables."""
        index_t: Tensor | None = torch.from_numpy(self.step.steered_t)
        if np.array_equal(self.step.steered_t, np.arange(num_tokens)):
            index_t = None
        slots_t = torch.from_numpy(self.step.steered_slots_t)
        used = set(self.step.steered_slots_t.tolist())
        depth = max(self._depths[slot].get(layer, 0) for slot in used)
        numbers_tKP = self.numbers_LSKP[layer, slots_t, :depth]
        has_conditions = bool((numbers_tKP[..., -1] >= 0).any())
        return _Change(
            index_t,
            self.offsets_LSD[layer, slots_t],
            self.offset_norms_LS[layer, slots_t],
            self.directions_LSKD[layer, slots_t, :depth] if depth else None,
            numbers_tKP if depth else None,
            numbers_tKP[..., -1] if has_conditions else None,
        )


@dataclass(frozen=True, slots=True)
class _Change:
    """What is done to the steered tokens t of a step at a layer; without index, to every token."""

    index_t: Tensor | None
    offsets_tD: Tensor
    offset_norms_t: Tensor
    directions_tKD: Tensor | None
    numbers_tKP: Tensor | None
    conditions_tK: Tensor | None


def _read_stream(hidden_TD: Tensor, residual_TD: Tensor | None, index_t: Tensor | None) -> Tensor:
    """Return the residual stream of some tokens, float32, which may lie in two parts."""
    if index_t is None:
        if residual_TD is None:
            return hidden_TD.to(torch.float32, copy=True)
        return hidden_TD.float() + residual_TD.float()
    stream_tD = hidden_TD[index_t].float()
    return stream_tD if residual_TD is None else stream_tD + residual_TD[index_t].float()
