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
from logsteer_server.engines.vllm.steering import StageTrace
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


class CapturedRows(NamedTuple):
    """A job, its rows of the capture buffer, and the tokens [start, end) to read from them."""

    job: Any
    rows: range | None
    start: int
    end: int


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

    def read_traces(
        self, ended: Mapping[str, tuple[SteeringPlan, int]]
    ) -> dict[str, SteeringTrace]:
        """Return the steering traces of requests that have ended, given their plans and lengths.

        A length counts the tokens that the model computed, without one computed after the end.
        """
        if not ended:
            return {}
        ends = {request_id: length for request_id, (_, length) in ended.items()}
        by_rank: list[dict[str, StageTrace]] = self._call_workers("take_traces", ends)
        return {
            request_id: self._join_traces(plan, [found.get(request_id) for found in by_rank])
            for request_id, (plan, _) in ended.items()
        }

    def _join_traces(
        self, plan: SteeringPlan, by_rank: Sequence[StageTrace | None]
    ) -> SteeringTrace:
        """Merge the traces of all pipeline stages, each of which measured its own layers."""

        def trace_of(layer: int) -> StageTrace:
            trace = by_rank[self._find_rank(layer)]
            assert trace is not None, "the first rank of each stage answers"
            return trace

        sites = {}
        for site in plan.all_sites:
            number = self._numbers.number(site.hook, site.layer)
            sums = trace_of(site.layer)[1].get(number, (0, 0.0, 0.0))
            sites[site.name] = (sums[0], average_changes(*sums))
        passed = tuple(
            trace_of(plan.probes[condition.probe].layer)[2][number]
            for number, condition in enumerate(plan.conditions)
        )
        return SteeringTrace(trace_of(plan.sites[0].layer)[0], sites, passed)

    def read_readings(self, plans: Mapping[str, SteeringPlan]) -> dict[str, Readings]:
        """Return the probe readings of requests since the last call, given their plans."""
        if not plans:
            return {}
        by_rank: list[dict[str, Readings]] = self._call_workers("take_readings", list(plans))
        joined = {}
        for request_id, plan in plans.items():
            of_ranks = [readings.get(request_id) for readings in by_rank]
            of_probes = [of_ranks[self._find_rank(probe.layer)] for probe in plan.probes]
            parts = [(g, part) for g, part in enumerate(of_probes) if part is not None]
            if parts:
                values = [part.values_TGR[:, g] for g, part in parts]
                joined[request_id] = Readings(parts[0][1].first, np.stack(values, axis=1))
        return joined

    def read_captures(self, asked: Mapping[str, CapturedRows]) -> dict[str, CapturedActivations]:
        """Return the captured activations of each request's tokens [start, end)."""
        places: dict[str, Indices] = {}
        rows: dict[str, range] = {}
        for request_id, (job, own, start, length) in asked.items():
            first, end = np.searchsorted(job.places, (start, length)).tolist()
            if job.capture.read == "last":
                first = max(0, end - 1)
            places[request_id] = job.places[first:end]
            if own is not None and first < end:
                count = len(job.capture.layers)
                rows[request_id] = own[first * count : end * count]
        by_rank: list[dict[str, Any]] = self._call_workers("take_captures", rows) if rows else []
        found = {}
        for request_id, (job, *_) in asked.items():
            capture = job.capture
            shape = len(places[request_id]), len(capture.layers), self._info.hidden_size
            values_LTD = np.zeros((shape[1], shape[0], shape[2]), np.float32)
            for number, layer in enumerate(capture.layers if request_id in rows else ()):
                own_ND = by_rank[self._find_rank(layer)][request_id]
                values_LTD[number] = own_ND.reshape(shape)[:, number]
            found[request_id] = finish_capture(capture, places[request_id], values_LTD)
        return found
