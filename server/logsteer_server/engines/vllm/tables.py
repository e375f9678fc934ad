"""Steering tables: the plan of each slot at each layer, and how a step is steered with them.

The operation `logsteer::steer` follows every activation that the model's `hooks` name, and always
runs, so that compiled graphs and CUDA graphs contain it. "Layer" here means one such activation,
numbered by `points.SiteNumbers`: with resid_post alone, the number of the decoder layer. The
operation is driven by data: each token of a step has a slot, and slot 0 changes nothing. It also
measures its changes, evaluates probes (`probe_tables`), and captures activations (`captures`).

Axis letters: L layers, S slots, T tokens of a step, D width, K operations, M marked tokens, F
fields of a mark, W fields of a layer's work; lower case: t steered tokens, n tokens to be counted.
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
    """Assign entries to requests, and add up each request's measurements.

    `sums_EL3[e, l]`, float64: a request's number of changed tokens at a layer, the sum of their
    ratios |change| / |activation|, and the ratio of its first token. `decided_E[e]`: a bit per
    condition, decided at the prompt's last token. Entry 0 is unused. The buffers never move,
    because captured graphs hold their addresses. A ratio has 24 significant bits and a sum 53, so
    the order of the sum matters only for ratios that differ by a factor of 2^29 / tokens.

        sums = TraceSums(entries=8, layers=2, like=...)
        entry = sums.acquire()                                            1
        sums.add(1, np.array([entry, entry]), tensor([[0.1, 0.0]]), np.array([True, False]))
        sums.fetch([entry])                                            [[[0, 0, 0], [1, 0.1, 0.1]]]
    """

    def __init__(self, entries: int, layers: int, like: Tensor) -> None:
        shape = (entries + 1, layers, 3)
        if like.is_cuda:
            self.sums_EL3 = like.new_zeros(shape, dtype=torch.float64)
        else:  # numpy's zeros take memory only once written
            self.sums_EL3 = torch.from_numpy(np.zeros(shape))
        self.decided_E = like.new_zeros((entries + 1,), dtype=torch.int32)
        self._unused = list(range(entries, 0, -1))
        self._before_step: _SumsSnapshot | None = None

    def acquire(self) -> int:
        """Return an entry whose sums are 0."""
        entry = self._unused.pop()
        self.sums_EL3[entry].zero_()
        self.decided_E[entry].zero_()
        return entry

    def release(self, entry: int) -> None:
        """Return an entry to the pool."""
        self._unused.append(entry)

    def add(
        self, layer: int, entries_n: Indices, ratios_Sn: Tensor, is_first_n: npt.NDArray[np.bool_]
    ) -> None:
        """Add ratios [S, n] of n tokens in S repeats of a step to the sums of their entries.

        The version for CPUs, without the kernel. A non-finite ratio counts as changed.
        """
        ratios = ratios_Sn.double().numpy()
        first = np.where(is_first_n, ratios, 0)
        all_n3 = np.stack([(ratios != 0).sum(0), ratios.sum(0), first.sum(0)], axis=1)
        np.add.at(self.sums_EL3[:, layer].numpy(), entries_n, all_n3)

    def snapshot(self, entries_t: Indices) -> None:
        """Copy the sums of some entries before a step that adds to them."""
        before = self._before_step
        if before is None or before.entries_t is not entries_t:
            entries_e = np.unique(entries_t)
            before = _SumsSnapshot(entries_t, entries_e, staging.send(entries_e, self.sums_EL3))
            self._before_step = before
        before.sums_eL3 = self.sums_EL3.index_select(0, before.index_e)

    def fetch(self, entries: list[int], before: Sequence[int] = ()) -> npt.NDArray[np.float64]:
        """Return the sums of some entries, float64 [E, L, 3].

        For entries that are also in `before`, return the sums of the latest snapshot.
        """
        index_E = staging.send(np.array(entries), self.sums_EL3)
        sums_EL3: npt.NDArray[np.float64] = staging.fetch(self.sums_EL3.index_select(0, index_E))
        if before:
            assert self._before_step is not None, "the step that is left out was marked"
            before_eL3 = staging.fetch(self._before_step.sums_eL3)
            for entry in before:
                place = self._before_step.entries_e.searchsorted(entry)
                sums_EL3[entries.index(entry)] = before_eL3[place]
        return sums_EL3


@dataclass(slots=True, eq=False)
class _SumsSnapshot:
    """The sums [e, L, 3] before a step, of the e entries of its steered tokens t."""

    entries_t: Indices
    entries_e: Indices
    index_e: Tensor
    sums_eL3: Tensor = field(init=False)


MAX_STEPS = 64
"""Repeats of a step whose measurements the version for CPUs adds up together."""


class LayerTables(NamedTuple):
    """Views of the tables at one layer, made once, for the kernel's launches."""

    work_SW: Tensor
    offsets_SD: Tensor
    directions_SKD: Tensor
    numbers_SKP: Tensor
    capture_rows_T: Tensor


class SteeringTables:
    """Hold the persistent buffers of one model on one rank, and steer with them.

    Slot s adds `offsets_LSD[l, s]` at layer l, then applies the operations `directions_LSKD` and
    `numbers_LSKP`; `work_LSW` has their number and whether there is an offset. Example: a plan in
    slot 2 adds v at layer 5; it steers the last two tokens of a step of four, for the request with
    entry 3:

        load({2: a plan of Site(5, "resid_post", v)})  offsets_LSD[5, 2] = v
        write(Step(SteeredTokens([2, 3], [2, 2], [3, 3], [True, True], [True, False])))
        apply(hidden_TD, residual_TD, 5)               hidden_TD[2:4] += v
        fetch_sums([3])      [0, 5] is [2, |v| / |x_2| + |v| / |x_3|, |v| / |x_2|]
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
        # A request holds its entry until it ends, while it is preempted, too.
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
        """Whether a step of requests has been marked, which happens after graphs are captured."""
        self.residual_counts_1 = torch.ones(1, dtype=torch.int32, device=like.device)
        self._residual_counts = True
        self._site_layers: list[set[int]] = [set()] * slots
        self.by_kernel = like.is_cuda
        self.step = Step()
        self._changes: dict[int, _Change | None] = {}
        self._steered_layers: set[int] = set()

    def set_form(self, form: StreamForm) -> None:
        """Set which parts of the layers' outputs make up the residual stream."""
        self._residual_counts = form == "sum"
        self.residual_counts_1.fill_(self._residual_counts)

    def load(self, plans: Mapping[int, SteeringPlan]) -> None:
        """Load the sites, probes and conditions of plans into slots, replacing older plans.

        One copy moves them all to the device. Unused rows keep their old numbers, and `work_LSW`
        excludes them. Errors: ValueError for more operations than fit.
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
        """Write the marks of the next step's tokens; unmarked tokens are not steered.

        Call it between two forward passes, because captured graphs read these buffers.
        """
        if step is self.step or (step.is_idle and self.is_idle):
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
        """Copy the step's marks into the kernel's buffer."""
        staging.write(self.marks_MF, pack_marks(self.step))

    @property
    def is_idle(self) -> bool:
        """Whether no token of this step is marked."""
        return self.step.is_idle

    def add_up(self) -> None:
        """Add the measurements of `apply` so far to the sums of the tokens' requests."""
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

    def snapshot_sums(self) -> None:
        """Copy the sums of this step's requests before it runs."""
        self.add_up()
        self.sums.snapshot(self.step.steered.entries_t)

    def fetch_sums(self, entries: list[int], before: Sequence[int] = ()) -> np.ndarray:
        """Return the sums of some entries, as `TraceSums.fetch` does."""
        self.add_up()
        return self.sums.fetch(entries, before)

    def apply(self, hidden_TD: Tensor, residual_TD: Tensor | None, layer: int) -> None:
        """Steer this step's tokens at one layer, in place; measure, evaluate probes, and capture.

        The version for CPUs, without the kernel. It reads the marked tokens only.
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
        """Gather the changes of this step's tokens at a layer from the tables, or return None."""
        steered = self.step.steered
        work_tW = self.work_LSW[layer, torch.from_numpy(steered.slots_t)].numpy()
        depths_t, adds_t = work_tW[:, Work.DEPTH], work_tW[:, Work.HAS_OFFSET] != 0
        rows_t = np.flatnonzero(adds_t | (depths_t > 0))
        if not len(rows_t):
            return None
        places_t, slots_t = steered.index_t[rows_t], steered.slots_t[rows_t]
        is_one, is_all = bool((slots_t == slots_t[0]).all()), len(places_t) == num_tokens
        own_t = rows_t[:1] if is_one else rows_t  # tokens of the same plan share one row
        own_slots_t = torch.from_numpy(steered.slots_t[own_t])
        depth = int(depths_t[own_t].max())
        numbers_tKP = self.numbers_LSKP[layer, own_slots_t, :depth]
        unused_tK = torch.from_numpy(np.arange(depth) >= depths_t[own_t, None])
        numbers_tKP[unused_tK] = torch.tensor(UNCHANGED)
        offsets_tD = self.offsets_LSD[layer, own_slots_t]
        norms_t = self.offset_norms_LS[layer, own_slots_t]
        no_offset_t = torch.from_numpy(~adds_t[own_t])
        offsets_tD[no_offset_t], norms_t[no_offset_t] = 0, 0
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
    """The changes of a step's steered tokens at a layer.

    `rows_t`: rows of `SteeredTokens`. `index_t`: indices in the step; None for all tokens. Tensors
    with one row apply to all tokens. `sizes`, `norms`: |change| and |activation| of the tokens, a
    tensor per repeat of the step, until `SteeringTables.add_up` empties them.
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
