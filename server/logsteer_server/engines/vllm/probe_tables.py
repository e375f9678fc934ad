"""Probe tables: the probes and conditions of each slot, and how a step evaluates them.

They belong to the same operation as the steering tables. A slot has up to G probes, each a
direction at one layer; each token of a step that a slot's probes read has a row of readings.

Axis letters: S slots, G probes, C conditions, P numbers, T tokens of a step, D width, R numbers of
a reading, K operations, E entries; lower case: r tokens of a step that probes read, t steered
tokens, p prompt ends that decide conditions; n: pairs of token and probe.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from logsteer_server.contract.plan import SteeringPlan
from logsteer_server.engines.vllm import staging
from logsteer_server.engines.vllm.captures import Indices
from logsteer_server.engines.vllm.layout import DECIDED, NONE_READ, ReadTokens
from logsteer_server.engines.vllm.stream import read_stream
from logsteer_server.numerics.residual_ops import CONDITION_NUMBERS, READINGS, hold, read_components

GATHERED = 2**22
"""The most float32 products of activations and directions at once."""


class ProbeTables:
    """Hold the probes and conditions of all slots, and evaluate them.

    `directions_SGD[s, g]` is probe g of slot s; `order_SG` lists a slot's probes in order of layer.
    `decided_E`: the bits of conditions decided at prompts' ends, by entry. Example: a plan in slot
    2 has a probe u at layer 5, and reads the last two tokens of a step of four:

        load({2: a plan with Probe(5, "resid_post", u)}, ...)
        write(ReadTokens([2, 3], [2, 2], ...))
        read(hidden_TD, None, 5, after=False)    readings_TGR[2:4, 0, :2] = (x . u, |x|) of each
        gather()                                 readings_TGR[2:4]
    """

    def __init__(self, slots: int, probes: int, tokens: int, width: int, decided_E: Tensor) -> None:
        new, float32 = decided_E.new_zeros, torch.float32
        self.directions_SGD = new((slots, probes, width), dtype=float32)
        self.order_SG = new((slots, probes), dtype=torch.int32)
        self.conditions_SCP = new((slots, probes, CONDITION_NUMBERS), dtype=float32)
        self.readings_TGR = new((tokens, probes, READINGS), dtype=float32)
        self._readings_NR = self.readings_TGR.flatten(0, 1)
        self.decided_E = decided_E
        self._bits_C = 2 ** torch.arange(min(probes, 31), device=decided_E.device).int()
        self._places: list[dict[int, list[int]]] = [{}] * slots
        self.step = NONE_READ
        self.layers: frozenset[int] = frozenset()
        self._parts: dict[int, list[_Part]] = {}
        self._kept_k: Tensor | None = None

    def load(
        self,
        plans: Mapping[int, SteeringPlan],
        probes_at_g: Tensor,
        probes_gD: Tensor,
        order_g: Tensor,
        conditions_at_c: Tensor,
        conditions_cP: Tensor,
    ) -> None:
        """Load the probes and conditions of plans into slots.

        The tensors are the arrays of `pack_plans`, on the device.
        """
        if len(probes_at_g):
            self.directions_SGD.flatten(0, 1).index_copy_(0, probes_at_g, probes_gD)
            self.order_SG.flatten().index_copy_(0, probes_at_g, order_g)
        if len(conditions_at_c):
            self.conditions_SCP.flatten(0, 1).index_copy_(0, conditions_at_c, conditions_cP)
        for slot, plan in plans.items():
            places: dict[int, list[int]] = {}
            for g, probe in enumerate(plan.probes):
                places.setdefault(probe.layer, []).append(g)
            self._places[slot] = places

    def write(self, step: ReadTokens) -> None:
        """Set the tokens that probes read in the next forward pass."""
        self.step = step
        used = set(step.slots_r.tolist())
        self.layers = frozenset(layer for slot in used for layer in self._places[slot])
        self._parts, self._kept_k = {}, None

    def read(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, layer: int, *, after: bool
    ) -> None:
        """Evaluate the probes at one layer for this step's tokens, before or after steering.

        The version for CPUs, without the kernel. Readings before steering also fill those after it,
        for layers that are not steered.
        """
        if layer not in self._parts:
            self._parts[layer] = self._pair(len(hidden_TD), layer)
        all_NR = self._readings_NR
        for part in self._parts[layer]:
            stream_rD = read_stream(hidden_TD, residual_TD, part.index_r)
            read_n2 = read_components(stream_rD[:, None], part.directions_GD).flatten(0, 1)
            if after:
                all_NR[:, 2:].index_copy_(0, part.rows_n, read_n2)
            else:
                all_NR.index_copy_(0, part.rows_n, read_n2.repeat(1, 2))

    def _pair(self, num_tokens: int, layer: int) -> "list[_Part]":
        """Pair tokens with the probes of their slots at a layer."""
        step, (_, most, width), parts = self.step, self.directions_SGD.shape, list[_Part]()
        for slot in np.unique(step.slots_r).tolist():
            probes = self._places[slot].get(layer)
            if probes is None:
                continue
            index_r = step.index_r[step.slots_r == slot]
            at_once = max(1, GATHERED // (width * len(probes)))
            for start in range(0, len(index_r), at_once):
                own_r = index_r[start : start + at_once]
                part = _Part(
                    None if len(own_r) == num_tokens else torch.from_numpy(own_r),
                    self.directions_SGD[slot, probes],
                    torch.from_numpy((own_r[:, None] * most + probes).ravel()),
                )
                parts.append(part)
        return parts

    def find_gate(
        self, places_t: Indices, slots_t: Tensor, step: ReadTokens, conditions_tK: Tensor
    ) -> "Gate | None":
        """Return the conditions of steered tokens' operations; None if all are unconditional.

        `conditions_tK`: the index of each operation's condition in its slot; below 0 for none. The
        version for CPUs, without the kernel.
        """
        if not bool((conditions_tK >= 0).any()):
            return None
        rows_t = np.searchsorted(step.index_r, places_t).clip(max=len(step.index_r) - 1)
        sources_t1 = torch.from_numpy(step.sources_r[rows_t])[:, None]
        asked_tK = conditions_tK.clamp(min=0).long()
        numbers_tKP = self.conditions_SCP[slots_t[:, None], asked_tK]
        of_prompt_tK = numbers_tKP[..., 4] > 0
        place_tK = torch.where(
            of_prompt_tK, sources_t1.clamp(min=0), torch.from_numpy(places_t)[:, None]
        )
        read_tK = place_tK * self.readings_TGR.shape[1] + numbers_tKP[..., 0].long()
        decided_t1 = self.decided_E[torch.from_numpy(step.entries_r[rows_t])][:, None]
        decided_tK = ((decided_t1 >> asked_tK) & 1).bool()
        fixed_tK = (conditions_tK < 0) | (of_prompt_tK & (sources_t1 < 0))
        value_tK = torch.where(conditions_tK < 0, True, decided_tK & (sources_t1 == DECIDED))
        above_tK, below_tK, relative_tK = numbers_tKP[..., 1:4].unbind(-1)
        return Gate(
            self._readings_NR,
            read_tK,
            above_tK.contiguous(),
            below_tK.contiguous(),
            relative_tK.contiguous(),
            fixed_tK if bool(fixed_tK.any()) else None,
            value_tK,
        )

    def decide_prompts(self) -> None:
        """Store, by entry, the conditions decided by prompts that ended in this step.

        Call it after the forward pass. It does not wait for the device.
        """
        ends_p = np.flatnonzero(self.step.is_end_r)
        if not len(ends_p):
            return
        step = self.step
        chosen = np.stack([step.index_r[ends_p], step.slots_r[ends_p], step.entries_r[ends_p]])
        places_p, slots_p, entries_p = staging.send(chosen, self.decided_E).unbind()
        numbers_pCP = self.conditions_SCP[slots_p, : len(self._bits_C)]
        read_pCR = self.readings_TGR[places_p[:, None], numbers_pCP[..., 0].long()]
        holds_pC = hold(read_pCR[..., 0], read_pCR[..., 1], *numbers_pCP[..., 1:4].unbind(-1))
        bits_p = (holds_pC * self._bits_C).sum(-1, dtype=torch.int32)
        self.decided_E.index_copy_(0, entries_p, bits_p)

    def gather(self) -> Tensor | None:
        """Return the readings of this step's kept tokens on the device: [k, G, R], or None.

        It is a copy, which later steps do not change.
        """
        if self._kept_k is None:
            kept_k = self.step.index_r[self.step.is_kept_r]
            if not len(kept_k):
                return None
            self._kept_k = staging.send(kept_k, self.readings_TGR)
        return self.readings_TGR.index_select(0, self._kept_k)


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """The conditions of steered tokens' operations at a layer.

    `rows_tK`: the row of the deciding reading among all readings. `fixed_tK`: whether no reading of
    this step decides, so that `value_tK` does.
    """

    readings_NR: Tensor
    rows_tK: Tensor
    above_tK: Tensor
    below_tK: Tensor
    relative_tK: Tensor
    fixed_tK: Tensor | None
    value_tK: Tensor

    def decide(self) -> Tensor:
        """Return whether each operation acts: bool [t, K]."""
        read_tKR = self.readings_NR[self.rows_tK]
        bounds = self.above_tK, self.below_tK, self.relative_tK
        holds_tK = hold(read_tKR[..., 0], read_tKR[..., 1], *bounds)
        if self.fixed_tK is None:
            return holds_tK
        return torch.where(self.fixed_tK, self.value_tK, holds_tK)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Tokens that the same probes read at a layer: their indices in the step, None for all tokens;
    the probes' directions; and the rows of the readings, token by token.
    """

    index_r: Tensor | None
    directions_GD: Tensor
    rows_n: Tensor
