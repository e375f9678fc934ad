"""Probe tables: what each slot reads at each layer, and what its conditions ask of it.

They stand beside the steering tables and belong to the same operation. A slot has up to G probes,
each a direction at one layer; a token of a step whose plan is in the slot has a row of readings.

Axis letters: S slots, G probes, C conditions, P numbers, T tokens of a step, D width, R numbers of
a reading, K operations; lower case r: tokens of a step that are read; n: pairs of token and probe.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logsteer_server.contract.plan import Condition, Probe
from logsteer_server.numerics.probes import (
    CONDITION_NUMBERS,
    READINGS,
    hold,
    pack_conditions,
    read_components,
)

CLOSED, DECIDED = -1, -2
"""In place of the token whose reading decides for another: none, as that stands before the prompt's
end; or one of an earlier step, of which the host knows what was decided."""

GATHERED = 2**22
"""Numbers of activations that are gathered at once."""


def no_places() -> npt.NDArray[np.int64]:
    """Return the places of no token."""
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ReadTokens:
    """The tokens of a step that are read: places in it, and slots.

    `sources_r`: the place of the prompt's last token, whose reading decides where a condition asks
    for that, or CLOSED, or DECIDED: then bit c of `decided_r` says whether condition c holds.
    """

    index_r: npt.NDArray[np.int64] = field(default_factory=no_places)
    slots_r: npt.NDArray[np.int64] = field(default_factory=no_places)
    sources_r: npt.NDArray[np.int64] = field(default_factory=no_places)
    decided_r: npt.NDArray[np.int64] = field(default_factory=no_places)


NONE_READ = ReadTokens()

ReadStream = Callable[[Tensor], Tensor]
"""Returns the residual stream of tokens of a step, by their places: float32."""


class ProbeTables:
    """Hold the probes and conditions of all slots, and read with them.

    `directions_SGD[s, g]` is probe g of slot s, at layer `layers_SG[s, g]`, or -1. A plan in slot 2
    that reads u at layer 5, and a step of four tokens of which the last two have this plan:

        load(2, [Probe(5, "resid_post", u)], [])
        write(ReadTokens([2, 3], [2, 2], ...))
        read(stream, 5, after=False)       readings_TGR[2:4, 0, :2] = (x . u, |x|) of each
        take()                             readings_TGR[2:4]
    """

    def __init__(self, slots: int, probes: int, tokens: int, width: int, like: Tensor) -> None:
        new, float32, int32 = like.new_zeros, torch.float32, torch.int32
        self.directions_SGD = new((slots, probes, width), dtype=float32)
        self.layers_SG = torch.full((slots, probes), -1, dtype=int32, device=like.device)
        self.conditions_SCP = new((slots, probes, CONDITION_NUMBERS), dtype=float32)
        self.slots_T = new((tokens,), dtype=int32)
        self.sources_T = torch.full((tokens,), CLOSED, dtype=int32, device=like.device)
        self.decided_T = new((tokens,), dtype=int32)
        self.readings_TGR = new((tokens, probes, READINGS), dtype=float32)
        self._places: list[dict[int, list[int]]] = [{}] * slots
        self.step = NONE_READ
        self._begin()

    def load(self, slot: int, probes: Sequence[Probe], conditions: Sequence[Condition]) -> None:
        """Put a plan's probes and conditions into a slot, in place of what it held."""
        self.layers_SG[slot] = -1
        self._places[slot] = {}
        for g, probe in enumerate(probes):
            self._places[slot].setdefault(probe.layer, []).append(g)
        if not probes:
            return
        directions_GD = torch.from_numpy(np.stack([probe.direction for probe in probes]))
        self.directions_SGD[slot, : len(probes)] = directions_GD.to(self.directions_SGD)
        layers_G = torch.tensor([probe.layer for probe in probes]).to(self.layers_SG)
        self.layers_SG[slot, : len(probes)] = layers_G
        packed_CP = pack_conditions(conditions).to(self.conditions_SCP)
        self.conditions_SCP[slot, : len(conditions)] = packed_CP

    def write(self, step: ReadTokens) -> None:
        """Store which tokens of the next forward pass are read; the others are not."""
        if step is self.step:
            return
        self.step = step
        if self.slots_T.is_cuda:
            for buffer_T, values_r, other in (
                (self.slots_T, step.slots_r, 0),
                (self.sources_T, step.sources_r, CLOSED),
                (self.decided_T, step.decided_r, 0),
            ):
                host_T = np.full(len(buffer_T), other, dtype=np.int32)
                host_T[step.index_r] = values_r
                buffer_T.copy_(torch.from_numpy(host_T))
        else:
            self.sources_T[step.index_r] = torch.from_numpy(step.sources_r).int()
            self.decided_T[step.index_r] = torch.from_numpy(step.decided_r).int()
        self._begin()

    def _begin(self) -> None:
        used = set(self.step.slots_r.tolist())
        self.layers = frozenset(layer for slot in used for layer in self._places[slot])
        self._pairs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no token of this step is read."""
        return not len(self.step.index_r)

    def read(self, read_stream: ReadStream, layer: int, *, after: bool) -> None:
        """Read the tokens of this step at one layer, before or after that is steered.

        The plain form, for CPUs. Before, what is read counts for after, too.
        """
        if layer not in self._pairs:
            self._pairs[layer] = self._pair(layer)
        index_n, slots_n, probes_n = self._pairs[layer]
        at_once = max(1, GATHERED // self.directions_SGD.shape[2])
        for start in range(0, len(index_n), at_once):
            part = slice(start, start + at_once)
            place, probe = index_n[part], probes_n[part]
            read_n2 = read_components(read_stream(place), self.directions_SGD[slots_n[part], probe])
            self.readings_TGR[place, probe, 2:] = read_n2
            if not after:
                self.readings_TGR[place, probe, :2] = read_n2

    def _pair(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return place, slot and probe of every reading at a layer."""
        step = self.step
        index, slots, probes = [no_places()], [no_places()], [no_places()]
        for slot in np.unique(step.slots_r).tolist():
            own_r = step.index_r[step.slots_r == slot]
            for g in self._places[slot].get(layer, ()):
                index.append(own_r)
                slots.append(np.full(len(own_r), slot))
                probes.append(np.full(len(own_r), g))
        index_n, slots_n, probes_n = (
            torch.from_numpy(np.concatenate(parts)) for parts in (index, slots, probes)
        )
        return index_n, slots_n, probes_n

    def decide(self, index_t: Tensor, slots_t: Tensor, conditions_tK: Tensor) -> Tensor:
        """Return whether each operation of steered tokens acts: bool [t, K].

        `conditions_tK`: the number of its condition in its slot; below 0 it has none. The plain
        form, for CPUs.
        """
        asked_tK = conditions_tK.clamp(min=0).long()
        numbers_tKP = self.conditions_SCP[slots_t[:, None], asked_tK]
        probes_tK = numbers_tKP[..., 0].long()
        sources_t1 = self.sources_T[index_t].long()[:, None]
        of_prompt_tK = numbers_tKP[..., 4] > 0
        place_tK = torch.where(of_prompt_tK, sources_t1.clamp(min=0), index_t[:, None])
        readings_tKR = self.readings_TGR[place_tK, probes_tK]
        holds_tK = hold(
            readings_tKR[..., 0], readings_tKR[..., 1], *numbers_tKP[..., 1:4].unbind(-1)
        )
        decided_tK = (self.decided_T[index_t].long()[:, None] >> asked_tK) & 1
        of_prompt_holds_tK = torch.where(
            sources_t1 == DECIDED, decided_tK.bool(), holds_tK & (sources_t1 != CLOSED)
        )
        return torch.where(of_prompt_tK, of_prompt_holds_tK, holds_tK) | (conditions_tK < 0)

    def take(self) -> npt.NDArray[np.float32]:
        """Return the readings of this step's tokens that are read: float32 [r, G, R]."""
        end = int(self.step.index_r.max(initial=-1)) + 1
        readings: npt.NDArray[np.float32] = self.readings_TGR[:end].cpu().numpy()[self.step.index_r]
        return readings
