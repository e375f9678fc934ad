"""Slots of running jobs for plans, adapters and captures, and the workers' measurements.

The tables are in the workers. A call of a worker runs on every rank, after the steps begun before.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from logsteer_server.contract.captures import CapturedActivations
from logsteer_server.contract.engine import HOOKS, EngineInfo
from logsteer_server.contract.jobs import Job, JobFailure
from logsteer_server.contract.plan import Probe, Readings, Site, SteeringPlan, SteeringTrace
from logsteer_server.engines.vllm.captures import CaptureWish, Indices, RowPool
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import CAPTURE, describe_steering
from logsteer_server.engines.vllm.points import SiteNumbers
from logsteer_server.engines.vllm.steering import MeasureWish, StageMeasurements
from logsteer_server.numerics.sinks import average_changes, finish_capture

PLANS_AT_ONCE = 16
"""Plans copied to a device together: 40 MiB with an offset at each of 80 layers of width 8,192."""


class SlotPool:
    """Assign slots 1 to `count` to keys, and count the users of each slot.

    All users of a key share its slot. A slot without users keeps its content until another key
    needs it.

        pool = SlotPool(1)
        pool.acquire(b"a")    (1, True): fill slot 1
        pool.acquire(b"a")    (1, False): it is filled; two users
        pool.acquire(b"b")    None: wait
    """

    def __init__(self, count: int) -> None:
        self._users = [0] * (count + 1)
        self._keys: dict[int, bytes] = {}
        self._slots: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count + 1))

    def acquire(self, key: bytes) -> tuple[int, bool] | None:
        """Return a slot for one more user of a key and whether to fill it; None if none is free."""
        assigned = self._slots.get(key)
        if assigned is not None:
            self._idle.pop(assigned, None)
            self._users[assigned] += 1
            return assigned, False
        if not self._idle:
            return None
        slot, _ = self._idle.popitem(last=False)
        if (old := self._keys.pop(slot, None)) is not None:
            del self._slots[old]
        self._keys[slot] = key
        self._slots[key] = slot
        self._users[slot] = 1
        return slot, True

    @property
    def num_used(self) -> int:
        """Slots that have a user."""
        return len(self._users) - 1 - len(self._idle)

    def invalidate(self, slot: int) -> None:
        """Remove the key of a slot that could not be filled; its users still hold the slot."""
        del self._slots[self._keys.pop(slot)]

    def release(self, slot: int) -> None:
        """Remove one user of a slot."""
        self._users[slot] -= 1
        if not self._users[slot]:
            self._idle[slot] = None


def _comes_after(probe: Probe, site: Site) -> bool:
    """Return whether a probe's activation comes after a site in the forward pass."""
    return (probe.layer, HOOKS.index(probe.hook)) > (site.layer, HOOKS.index(site.hook))


CallWorkers = Callable[..., list[Any]]
"""Calls a method of every worker, by name and arguments; returns the results by rank."""
Stages = Sequence[StageMeasurements | None]
"""One request's measurements by rank; each pipeline stage measures its own layers, and all ranks of
a stage except the first give None."""


@dataclass(frozen=True, slots=True)
class SteeringSlot:
    """One job's share of the tables: a slot for each part of its plan, rows of the capture buffer.

    `extra_args` tell the workers of both. An unsteered job has no plan, one without captures no
    rows.
    """

    numbers: tuple[int, ...] = ()
    plan: SteeringPlan | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)
    rows: range | None = None


class Asked(NamedTuple):
    """A job and its slot; what to measure are its tokens before `end`.

    `start`: tokens before it were reported. `is_last`: whether this is the job's last output.
    """

    job: Any
    slot: SteeringSlot
    start: int
    end: int
    is_last: bool


class SteeringSlots:
    """Assign slots of the steering tables to jobs; read their measurements and captures.

    Jobs with equal plans share a slot. Each job that captures has rows of its own.
    """

    def __init__(self, call_workers: CallWorkers, size: SteeringSize, info: EngineInfo) -> None:
        self._call_workers = call_workers
        self._size = size
        self._info = info
        self._numbers = SiteNumbers(size.hooks, info.num_layers)
        self._layers_of_rank: list[frozenset[int]] = call_workers("find_stage")
        self._plans = SlotPool(size.slots)
        self._unloaded: dict[int, SteeringPlan] = {}
        self._rows = RowPool(info.capture_rows or 0)

    def count(self) -> tuple[int, int]:
        """Return the number of slots for plans, and of slots in use."""
        return self._size.slots, self._plans.num_used

    def refuse(self, job: Job) -> JobFailure | None:
        """Return why a job cannot run: a hook or room in the tables is missing; else None."""
        plan, used = job.plan, [job.capture.hook] if job.capture else []
        if plan is not None:
            used += [site.hook for site in plan.all_sites] + [probe.hook for probe in plan.probes]
        for hook in used:
            if hook not in self._info.hooks:
                return JobFailure("unsupported_by_engine", self._info.explain_hook(hook))
        return None if plan is None else self._refuse_plan(plan)

    def _refuse_plan(self, plan: SteeringPlan) -> JobFailure | None:
        deepest = max((len(site.ops) for site in plan.all_sites), default=0)
        detail = None
        if deepest > self._size.depth:
            detail = (
                f"{deepest} operations at one layer, this model has room for {self._size.depth} "
                "beside unconditional additions: use fewer, or raise steering_depth"
            )
        elif len(plan.parts) > self._size.slots:
            detail = (
                f"vectors at different positions take {len(plan.parts)} slots in this request, "
                f"this model has {self._size.slots}: use fewer, or raise steering_slots"
            )
        elif max(len(plan.probes), len(plan.conditions)) > self._size.probes:
            detail = (
                f"{len(plan.probes)} probes (each layer of each, those of conditions included) and "
                f"{len(plan.conditions)} conditions, this model has room for {self._size.probes} "
                "of either in a request: use fewer, or raise steering_probes"
            )
        elif (pair := self._find_pair(plan, self._are_apart)) is not None:
            detail = (
                f"a condition at layer {pair[0].layer} cannot decide for layer {pair[1].layer}, "
                "which is in another pipeline stage of this model: read and steer within one stage"
            )
        elif (pair := self._find_pair(plan, _comes_after)) is not None:
            probe, site = pair
            detail = (
                f"a condition that is read at layer {probe.layer}, {probe.hook}, cannot decide for "
                f"layer {site.layer}, {site.hook}, which comes before it: read it there or before"
            )
            return JobFailure("invalid_request", detail)
        return JobFailure("unsupported_by_engine", detail) if detail else None

    def _find_pair(
        self, plan: SteeringPlan, is_wrong: Callable[[Probe, Site], bool]
    ) -> tuple[Probe, Site] | None:
        """Return the first probe and site of a condition for which `is_wrong` holds, or None."""
        for site in plan.all_sites:
            for op in site.ops:
                if op.condition is not None:
                    probe = plan.probes[plan.conditions[op.condition].probe]
                    if is_wrong(probe, site):
                        return probe, site
        return None

    def _are_apart(self, probe: Probe, site: Site) -> bool:
        return self._find_rank(probe.layer) != self._find_rank(site.layer)

    def _find_rank(self, layer: int) -> int:
        """Return the first rank that has a layer; its measurements of the layer are used."""
        return next(i for i, layers in enumerate(self._layers_of_rank) if layer in layers)

    def acquire(self, job: Job) -> SteeringSlot | None:
        """Return slots for a job's plan and rows for its captures; None while too few are free.

        The next `load_plans` fills the slots.
        """
        slot, places = self._acquire_plan(job), job.places
        if slot is None or job.capture is None or not len(places):
            return slot
        rows = self._rows.take(job.num_captured)
        if rows is None:
            self.release(slot)
            return None
        hook, before = job.capture.hook, job.capture.before
        layers = tuple(self._numbers.number(hook, layer) for layer in job.capture.layers)
        wish = CaptureWish(rows.start, layers, places, before)
        return replace(slot, extra_args=slot.extra_args | {CAPTURE: wish}, rows=rows)

    def _acquire_plan(self, job: Job) -> SteeringSlot | None:
        if job.plan is None:
            return SteeringSlot()
        numbers: list[int] = []
        for part in job.plan.parts:
            acquired = self._plans.acquire(part.content_digest)
            if acquired is None:
                self._release(numbers)
                return None
            number, is_new = acquired
            numbers.append(number)
            if is_new:
                self._unloaded[number] = self._numbers.rewrite(part)
        return SteeringSlot(tuple(numbers), job.plan, describe_steering(job, numbers))

    def load_plans(self) -> None:
        """Have the workers load the plans of the slots acquired since the last call.

        Errors: whatever a worker raises; the slots are then invalid.
        """
        unloaded, self._unloaded = self._unloaded, {}
        numbers = list(unloaded)
        try:
            for first in range(0, len(numbers), PLANS_AT_ONCE):
                some = numbers[first : first + PLANS_AT_ONCE]
                self._call_workers("load_plans", {number: unloaded[number] for number in some})
        except Exception:
            for number in numbers:
                self._plans.invalidate(number)
            raise

    def _release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._plans.release(number)

    def release(self, slot: SteeringSlot) -> None:
        """Release a job's slots and rows."""
        if slot.rows is not None:
            self._rows.release(slot.rows)
        self._release(slot.numbers)

    def measure(self, asked: Mapping[str, Asked]) -> dict[str, dict[str, Any]]:
        """Return, by request, the `trace`, `readings` and `activations` that its output has.

        One call of the workers reads all of them.
        """
        found: dict[str, dict[str, Any]] = {request_id: {} for request_id in asked}
        wishes, places = dict[str, MeasureWish](), dict[str, Indices]()
        for request_id, (job, slot, start, end, is_last) in asked.items():
            capture, rows = job.capture, None
            if capture is not None and (is_last or capture.read == "each"):
                places[request_id], rows = _find_rows(job, slot, start, end)
            traces = is_last and bool(slot.plan and slot.plan.sites)
            reads = slot.plan is not None and slot.plan.kept != "none"
            if traces or reads or rows:
                wishes[request_id] = MeasureWish(end, traces, reads, rows)
        by_rank = self._call_workers("measure", wishes) if wishes else []
        for request_id, fields in found.items():
            own, wish = asked[request_id], wishes.get(request_id)
            stages = [measured.get(request_id) for measured in by_rank]
            if wish and wish.traces:
                fields["trace"] = self._join_traces(own, stages)
            if wish and wish.reads:
                fields["readings"] = self._join_readings(own.job.plan, stages)
            if request_id in places:
                fields["activations"] = self._join_captures(own.job, places[request_id], stages)
        return found

    def _find_stage(self, stages: Stages, layer: int) -> StageMeasurements:
        """Return the measurements of the pipeline stage with a layer."""
        stage = stages[self._find_rank(layer)]
        assert stage is not None, "the first rank of each stage answers"
        return stage

    def _join_traces(self, own: Asked, stages: Stages) -> SteeringTrace:
        plan, prompt_len = own.job.plan, own.job.prompt_len
        sites = {}
        for site in plan.all_sites:
            number = self._numbers.number(site.hook, site.layer)
            sums = self._find_stage(stages, site.layer).sums.get(number, (0, 0.0, 0.0))
            sites[site.name] = (sums[0], average_changes(*sums))
        passed = tuple(
            self._find_stage(stages, plan.probes[condition.probe].layer).passed[number]
            for number, condition in enumerate(plan.conditions)
        )
        tokens = tuple(part.positions.count(own.end, prompt_len) for part in plan.parts)
        return SteeringTrace(tokens, sites, passed)

    def _join_readings(self, plan: SteeringPlan, stages: Stages) -> Readings | None:
        parts = [self._find_stage(stages, probe.layer).readings for probe in plan.probes]
        values = [part.values_TGR[:, g] for g, part in enumerate(parts) if part is not None]
        return Readings(parts[0].first, np.stack(values, axis=1)) if parts[0] else None

    def _join_captures(self, job: Job, places: Indices, stages: Stages) -> CapturedActivations:
        capture = job.capture
        assert capture is not None
        shape = len(places), len(capture.layers), self._info.hidden_size
        values_LTD = np.zeros((shape[1], shape[0], shape[2]), np.float32)
        for number, layer in enumerate(capture.layers if len(places) else ()):
            own_ND = self._find_stage(stages, layer).captured_ND
            assert own_ND is not None
            values_LTD[number] = own_ND.reshape(shape)[:, number]
        return finish_capture(capture, places, values_LTD)


def _find_rows(job: Job, slot: SteeringSlot, start: int, end: int) -> tuple[Indices, range | None]:
    """Return the captured positions of an output's tokens, and their rows; None without tokens."""
    assert job.capture is not None
    places, read, count = job.places, job.capture.read, len(job.capture.layers)
    first, last = np.searchsorted(places, (start if read == "each" else 0, end)).tolist()
    if read == "last":
        first = max(0, last - 1)
    rows = slot.rows and slot.rows[first * count : last * count]
    return places[first:last], rows or None
