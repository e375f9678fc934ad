"""Steering tables: what each slot does at each layer, and the operation that does it.

The operation `logsteer::steer` stands at every activation that the model's `hooks` name, and always
runs, so that compiled graphs and CUDA graphs contain it. What is called a layer here is one such
activation, by its number (`points.SiteNumbers`): with resid_post alone, the layer that it leaves.
The operation works by data: each token of a step has a slot, and slot 0 changes nothing. It also
measures its changes, evaluates probes (`probe_tables`), and captures activations (`captures`).

Axis letters: L layers, S slots, T tokens of a step, D width, K operations, M marked tokens, F
fields of a mark, W what a layer has of a plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logsteer_server.contract.plan import SteeringPlan
from logsteer_server.engines.vllm import staging
from logsteer_server.engines.vllm.captures import CaptureBuffer, Indices
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.layout import Mark, Step, TableShape, Work, pack_marks, pack_plans
from logsteer_server.engines.vllm.probe_tables import Gate, ProbeTables
from logsteer_server.engines.vllm.stream import StreamForm, read_stream
from logsteer_server.numerics.residual_ops import (
    UNCHANGED,
    OpForm,
    change_stream,
    find_forms,
)


class TraceSums:
    """Assign entries to requests, and sum up each one's changed tokens and their ratios.

    `sums_EL3[e, l]`: both numbers of a request at a layer, and the ratio of its first token,
    float64; `decided_E[e]`: the bits of its conditions, as its prompt's last token decided them.
    Entry 0 is nobody's. The buffers never
    move, because captured graphs hold them. A ratio has 24 binary digits and a sum 53, so the order
    of adding up shows only where ratios that differ by a factor of 2^29 / tokens meet.

        sums = TraceSums(entries=8, layers=2, like=...)
        entry = sums.take()                                            1
        sums.add(1, np.array([entry, entry]), tensor([[0.1, 0.0]]), np.array([True, False]))
        sums.fetch([entry])                                            [[[0, 0, 0], [1, 0.1, 0.1]]]
    """

    def __init__(self, entries: int, layers: int, like: Tensor) -> None:
        shape = (entries + 1, layers, 3)
        if like.is_cuda:
            self.sums_EL3 = like.new_zeros(shape, dtype=torch.float64)
        else:  # of numpy's zeros only those that are written to take memory
            self.sums_EL3 = torch.from_numpy(np.zeros(shape))
        self.decided_E = like.new_zeros((entries + 1,), dtype=torch.int32)
        self._unused = list(range(entries, 0, -1))
        self._used: list[int] = []
        self._kept: _KeptSums | None = None

    def take(self) -> int:
        """Return an entry whose sums are 0. Errors: RuntimeError where none is left.

        Released entries are set to 0 together, once no other is left.
        """
        if not self._unused:
            if not self._used:
                room = len(self.decided_E) - 1
                raise RuntimeError(
                    f"more requests are steered or read at once than there is room for, {room}: "
                    "raise max_num_batched_tokens, of which that is twice as many"
                )
            index_e = staging.send(np.array(self._used), self.sums_EL3)
            self.sums_EL3.index_fill_(0, index_e, 0)
            self.decided_E.index_fill_(0, index_e, 0)
            self._unused, self._used = self._used[::-1], []
        return self._unused.pop()

    def release(self, entry: int) -> None:
        """Release an entry."""
        self._used.append(entry)

    def add(
        self, layer: int, entries_n: Indices, ratios_Sn: Tensor, is_first_n: npt.NDArray[np.bool_]
    ) -> None:
        """Add the ratios of tokens in steps alike to the sums of their entries.

        The plain form, for CPUs. A ratio that is not finite counts as changed.
        """
        ratios = ratios_Sn.double().numpy()
        first = np.where(is_first_n, ratios, 0)
        all_n3 = np.stack([(ratios != 0).sum(0), ratios.sum(0), first.sum(0)], axis=1)
        np.add.at(self.sums_EL3[:, layer].numpy(), entries_n, all_n3)

    def keep(self, entries_t: Indices) -> None:
        """Keep the sums of some entries as they are before a step that adds to them."""
        kept = self._kept
        if kept is None or kept.entries_t is not entries_t:
            entries_e = np.unique(entries_t)
            kept = _KeptSums(entries_t, entries_e, staging.send(entries_e, self.sums_EL3))
            self._kept = kept
        kept.sums_eL3 = self.sums_EL3.index_select(0, kept.index_e)

    def fetch(self, entries: list[int], before: Sequence[int] = ()) -> npt.NDArray[np.float64]:
        """Return the sums of some entries: float64 [E, L, 3], as `sums_EL3`.

        Those that are in `before`, too, are as they were when they were kept.
        """
        index_E = staging.send(np.array(entries), self.sums_EL3)
        found_EL3: npt.NDArray[np.float64] = staging.fetch(self.sums_EL3.index_select(0, index_E))
        if before:
            assert self._kept is not None, "the step that is left out was marked"
            kept_eL3 = staging.fetch(self._kept.sums_eL3)
            for entry in before:
                place = self._kept.entries_e.searchsorted(entry)
                found_EL3[entries.index(entry)] = kept_eL3[place]
        return found_EL3


@dataclass(slots=True, eq=False)
class _KeptSums:
    """Sums [e, L, 3] of the entries of a step's steered tokens t, as they were before the step."""

    entries_t: Indices
    entries_e: Indices
    index_e: Tensor
    sums_eL3: Tensor = field(init=False)


MAX_STEPS = 64
"""Steps alike whose measurements the plain form adds up together."""


class LayerTables(NamedTuple):
    """Views of the tables at one layer, made once: the kernel is launched with them."""

    work_SW: Tensor
    offsets_SD: Tensor
    directions_SKD: Tensor
    numbers_SKP: Tensor
    capture_rows_T: Tensor


class SteeringTables:
    """Hold the persistent buffers of one model on one rank, and steer with them.

    `offsets_LSD[l, s]` is what slot s adds at layer l; `directions_LSKD` and `numbers_LSKP` are the
    operations that follow; `work_LSW` says how much of this counts. A plan in slot 2 that adds v at
    layer 5, and a step of four tokens of which the last two are steered by it, for a request whose
    sums are in entry 3:

        load({2: a plan of Site(5, "resid_post", v)})  offsets_LSD[5, 2] = v
        write(Step(SteeredTokens([2, 3], [2, 2], [3, 3], [True, True], [True, False])))
        apply(hidden_TD, residual_TD, 5)               hidden_TD[2:4] += v
        take_sums([3])       [0, 5] is [2, |v| / |x_2| + |v| / |x_3|, |v| / |x_2|]
    """

    def __init__(
        self, size: SteeringSize, layers: int, tokens: int, width: int, like: Tensor
    ) -> None:
        new, float32 = like.new_zeros, torch.float32
        slots, rows = size.slots + 1, size.count_rows(layers, width)
        layers *= len(size.hooks)
        self._shape = TableShape(layers, slots, size.depth, size.probes, width)
        self.offsets_LSD = new((layers, slots, width))
        self.offset_norms_LS = new((layers, slots), dtype=float32)
        self.directions_LSKD = new((layers, slots, size.depth, width), dtype=float32)
        unchanged = torch.tensor(UNCHANGED, device=like.device)
        self.numbers_LSKP = unchanged.repeat(layers, slots, size.depth, 1)
        self.work_LSW = new((layers, slots, len(Work)), dtype=torch.int32)
        self.marks_MF = new((1 + tokens, len(Mark)), dtype=torch.int32)
        # A request has an entry from when it begins until it ends, while it is preempted, too.
        self.sums = TraceSums(2 * tokens, layers, like)
        self.captures = CaptureBuffer(rows, layers, tokens, width, like)
        self.probes = ProbeTables(slots, size.probes, tokens, width, self.sums.decided_E)
        self.layers = [
            LayerTables(*views)
            for views in zip(
                self.work_LSW, self.offsets_LSD, self.directions_LSKD, self.numbers_LSKP,
                self.captures.rows_LT, strict=True,
            )
        ]  # fmt: skip
        self.serves = False
        """Whether a step of requests has been marked: graphs have been captured by then."""
        self.residual_counts_1 = torch.ones(1, dtype=torch.int32, device=like.device)
        self._residual_counts = True
        self._site_layers: list[set[int]] = [set()] * slots
        self.by_kernel = like.is_cuda
        self.step = Step()
        self._changes: dict[int, _Change | None] = {}
        self._steered_layers: set[int] = set()

    def set_form(self, form: StreamForm) -> None:
        """Set where the residual stream is in the layers' outputs."""
        self._residual_counts = form == "sum"
        self.residual_counts_1.fill_(self._residual_counts)

    def load(self, plans: Mapping[int, SteeringPlan]) -> None:
        """Load the sites, probes and conditions of plans into slots, replacing their last plans.

        One copy moves them all to the device. Rows that this plan does not use keep their old
        numbers, and `work_LSW` leaves them out. Errors: ValueError for more operations than fit.
        """
        slots_s, work_LsW, offsets_at_n, offsets_nD, ops_at_m, directions_mD, numbers_mP, *read = (
            staging.send_all(pack_plans(plans, self._shape), self.work_LSW)
        )
        self.work_LSW.index_copy_(1, slots_s, work_LsW)
        if len(offsets_at_n):
            rounded_nD = offsets_nD.to(self.offsets_LSD.dtype)
            self.offsets_LSD.flatten(0, 1).index_copy_(0, offsets_at_n, rounded_nD)
            norms_n = rounded_nD.float().norm(dim=-1)
            self.offset_norms_LS.flatten().index_copy_(0, offsets_at_n, norms_n)
        if len(ops_at_m):
            self.directions_LSKD.flatten(0, 2).index_copy_(0, ops_at_m, directions_mD)
            self.numbers_LSKP.flatten(0, 2).index_copy_(0, ops_at_m, numbers_mP)
        self.probes.load(plans, *read)
        for slot, plan in plans.items():
            self._site_layers[slot] = {site.layer for site in plan.sites}

    def write(self, step: Step) -> None:
        """Write the marks of the next forward pass's tokens; other tokens are left alone.

        Call it between two passes, because captured graphs read these buffers.
        """
        if step.is_same(self.step):
            return
        self.add_up()
        self.step = step
        self.captures.mark(step.captured)
        if self.by_kernel:
            self.fill_marks()
        else:
            self._changes = {}
            used = set(step.steered.slots_t.tolist())
            self._steered_layers = set[int]().union(*(self._site_layers[slot] for slot in used))
        self.probes.write(step.read)

    def fill_marks(self) -> None:
        """Write the step's marked tokens where the kernel reads them."""
        staging.write(self.marks_MF, pack_marks(self.step))

    @property
    def is_idle(self) -> bool:
        """Whether no token of this step is marked."""
        return self.step.is_idle

    def add_up(self) -> None:
        """Add the plain form's measurements to the sums of the tokens' requests."""
        steered = self.step.steered
        for layer, change in self._changes.items():
            if change is not None and change.sizes:
                norms_St = torch.stack(change.norms)
                ratios_St = torch.stack(change.sizes) / norms_St
                ratios_St.masked_fill_(norms_St == 0, 0.0)
                is_new_t = steered.is_new_t[change.rows_t]
                new_n = change.rows_t[is_new_t]
                ratios_Sn = ratios_St[:, torch.from_numpy(is_new_t)]
                self.sums.add(layer, steered.entries_t[new_n], ratios_Sn, steered.is_first_t[new_n])
                change.sizes.clear()
                change.norms.clear()

    def keep_sums(self) -> None:
        """Keep the sums of this step's requests as they are before it runs."""
        self.add_up()
        self.sums.keep(self.step.steered.entries_t)

    def take_sums(self, entries: list[int], before: Sequence[int] = ()) -> np.ndarray:
        """Return the sums of some entries, as `TraceSums.fetch` does."""
        self.add_up()
        return self.sums.fetch(entries, before)

    def apply(self, hidden_TD: Tensor, residual_TD: Tensor | None, layer: int) -> None:
        """Steer the tokens of this step at one layer, in place; measure, and capture.

        The plain form, for CPUs, which reads the marked tokens only.
        """
        if not self._residual_counts:
            residual_TD = None
        is_read, is_steered = layer in self.probes.layers, layer in self._steered_layers
        self.captures.store(hidden_TD, residual_TD, layer, before=True)
        if is_read:
            self.probes.read(hidden_TD, residual_TD, layer, after=False)
        if is_steered:
            self._steer(hidden_TD, residual_TD, layer)
        if is_read and is_steered and self.step.read.reads_after:
            self.probes.read(hidden_TD, residual_TD, layer, after=True)
        self.captures.store(hidden_TD, residual_TD, layer, before=False)

    def _steer(self, hidden_TD: Tensor, residual_TD: Tensor | None, layer: int) -> None:
        if layer not in self._changes:
            self._changes[layer] = self._gather(len(hidden_TD), layer)
        change = self._changes[layer]
        if change is None:
            return
        index_t = change.index_t
        stream_tD = read_stream(hidden_TD, residual_TD, index_t)
        norms_t = torch.linalg.vector_norm(stream_tD, dim=-1)
        size_t = change.offset_norms_t
        if not change.forms:
            _add(hidden_TD, index_t, change.offsets_tD)
        else:
            if change.adds:
                if stream_tD is hidden_TD:
                    stream_tD = stream_tD.clone()
                _add(hidden_TD, index_t, change.offsets_tD)
            offset_tD = read_stream(hidden_TD, residual_TD, index_t) if change.adds else stream_tD
            open_tK = change.gate.decide() if change.gate is not None else None
            change_tD = change_stream(
                offset_tD, change.directions_tKD, change.numbers_tKP, open_tK, change.forms
            )
            size_t = torch.linalg.vector_norm(offset_tD + change_tD - stream_tD, dim=-1)
            if index_t is None:
                hidden_TD.add_(change_tD)
            else:
                hidden_TD[index_t] = (hidden_TD[index_t].float() + change_tD).to(hidden_TD.dtype)
        change.sizes.append(size_t)
        change.norms.append(norms_t)
        if len(change.sizes) == MAX_STEPS:
            self.add_up()

    def _gather(self, num_tokens: int, layer: int) -> "_Change | None":
        """Gather from the slots' tables the changes of this step's tokens at a layer.

        None where no token is changed.
        """
        steered = self.step.steered
        work_tW = self.work_LSW[layer, torch.from_numpy(steered.slots_t)].numpy()
        depths_t, adds_t = work_tW[:, Work.DEPTH], work_tW[:, Work.HAS_OFFSET] != 0
        rows_t = np.flatnonzero(adds_t | (depths_t > 0))
        if not len(rows_t):
            return None
        places_t, slots_t = steered.index_t[rows_t], steered.slots_t[rows_t]
        is_one, is_all = bool((slots_t == slots_t[0]).all()), len(places_t) == num_tokens
        own_t = rows_t[:1] if is_one else rows_t  # one row for all where all have the same plan
        own_slots_t = torch.from_numpy(steered.slots_t[own_t])
        depth = int(depths_t[own_t].max())
        numbers_tKP = self.numbers_LSKP[layer, own_slots_t, :depth]
        behind_tK = torch.from_numpy(np.arange(depth) >= depths_t[own_t, None])
        numbers_tKP[behind_tK] = torch.tensor(UNCHANGED)
        offsets_tD = self.offsets_LSD[layer, own_slots_t]
        norms_t = self.offset_norms_LS[layer, own_slots_t]
        stays_t = torch.from_numpy(~adds_t[own_t])
        offsets_tD[stays_t], norms_t[stays_t] = 0, 0
        conditions_tK = numbers_tKP[..., -1].expand(len(places_t), -1)
        return _Change(
            rows_t,
            None if is_all else torch.from_numpy(places_t),
            offsets_tD,
            norms_t,
            bool(adds_t[own_t].any()),
            self.directions_LSKD[layer, own_slots_t, :depth],
            numbers_tKP,
            find_forms(numbers_tKP),
            self.probes.find_gate(
                places_t, torch.from_numpy(slots_t), self.step.read, conditions_tK
            ),
        )


@dataclass(frozen=True, slots=True)
class _Change:
    """The changes of some of a step's steered tokens at a layer: rows of `SteeredTokens`.

    Without an index every token is changed; tensors of one row apply to all tokens. `sizes`,
    `norms`: |change| and |activation| of the tokens in each step so far, not added up yet.
    """

    rows_t: Indices
    index_t: Tensor | None
    offsets_tD: Tensor
    offset_norms_t: Tensor
    adds: bool
    directions_tKD: Tensor
    numbers_tKP: Tensor
    forms: tuple[OpForm, ...]
    gate: Gate | None
    sizes: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)


def _add(hidden_TD: Tensor, index_t: Tensor | None, values_tD: Tensor) -> None:
    """Add values to some tokens, or to all, in place."""
    if index_t is None:
        hidden_TD += values_tD
    else:
        hidden_TD.index_add_(0, index_t, values_tD.expand(len(index_t), -1))
