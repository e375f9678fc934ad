"""Slots of running jobs for plans, adapters and captures, and the workers' measurements.

The tables are in the workers, which are called on every rank after the steps that were begun.
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
"""Plans that are copied to a device together: with an offset at each of 80 layers of width 8,192
they take 40 MiB."""


class SlotPool:
    """Give out slots 1 to `count`, the same one to all users of a key.

    A slot without users has its content until another key needs it.

        pool = SlotPool(1)
        pool.take(b"a")    (1, True): fill slot 1
        pool.take(b"a")    (1, False): it is filled; two users
        pool.take(b"b")    None: wait
    """

    def __init__(self, count: int) -> None:
        self._users = [0] * (count + 1)
        self._keys: dict[int, bytes] = {}
        self._slots: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count + 1))

    def take(self, key: bytes) -> tuple[int, bool] | None:
        """Return a slot for one more user of a key and whether to fill it; None if none is free."""
        known = self._slots.get(key)
        if known is not None:
            self._idle.pop(known, None)
            self._users[known] += 1
            return known, False
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

    def forget(self, slot: int) -> None:
        """Forget the key of a slot that could not be filled; its users keep it."""
        del self._slots[self._keys.pop(slot)]

    def release(self, slot: int) -> None:
        """Count one user fewer."""
        self._users[slot] -= 1
        if not self._users[slot]:
            self._idle[slot] = None


def _comes_after(probe: Probe, site: Site) -> bool:
    """Return whether an activation comes after another one in a forward pass."""
    return (probe.layer, HOOKS.index(probe.hook)) > (site.layer, HOOKS.index(site.hook))


CallWorkers = Callable[..., list[Any]]
"""Calls a method of every worker by name, with arguments; returns the results by rank."""


@dataclass(frozen=True, slots=True)
class SteeringSlot:
    """What one job has of the tables: a slot for each part of its plan, and the extra arguments
    that tell the workers so.

    A job that is not steered has no plan. One that captures has `rows` of the capture buffer, too.
    """

    numbers: tuple[int, ...] = ()
    plan: SteeringPlan | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)
    rows: range | None = None


class CapturedRows(NamedTuple):
    """A job's rows of the capture buffer, and which tokens of its sequence: [start, end)."""

    job: Any
    rows: range | None
    start: int
    end: int


class SteeringSlots:
    """Give jobs slots of the steering tables; read what the tables measured and captured.

    Jobs with equal plans share a slot; one that captures has its rows to itself.
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
        """Return how many slots there are for plans, and how many of them have a job."""
        return self._size.slots, self._plans.num_used

    def refuse(self, job: Job) -> JobFailure | None:
        """Return why a job cannot run, for want of hooks or of room; None where it can."""
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
        """Return a condition's activation and a site that comes before it, if there are such."""
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
        """Return the first rank that has a layer, which answers for it."""
        return next(i for i, layers in enumerate(self._layers_of_rank) if layer in layers)

    def take(self, job: Job) -> SteeringSlot | None:
        """Return the slots of a job's plan and rows for what it captures; None where the job has to
        wait for them.

        The slots have the plan after the next `load_plans`.
        """
        slot, places = self._take_plan(job), job.places
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

    def _take_plan(self, job: Job) -> SteeringSlot | None:
        if job.plan is None:
            return SteeringSlot()
        numbers: list[int] = []
        for part in job.plan.parts:
            found = self._plans.take(part.content_digest)
            if found is None:
                self._release(numbers)
                return None
            number, is_new = found
            numbers.append(number)
            if is_new:
                self._unloaded[number] = self._numbers.rewrite(part)
        return SteeringSlot(tuple(numbers), job.plan, describe_steering(job, numbers))

    def load_plans(self) -> None:
        """Have the workers load the plans of slots that were taken since the last call.

        Errors: whatever a worker raises; none of these slots then has a plan.
        """
        unloaded, self._unloaded = self._unloaded, {}
        numbers = list(unloaded)
        try:
            for first in range(0, len(numbers), PLANS_AT_ONCE):
                some = numbers[first : first + PLANS_AT_ONCE]
                self._call_workers("load_plans", {number: unloaded[number] for number in some})
        except Exception:
            for number in numbers:
                self._plans.forget(number)
            raise

    def _release(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._plans.release(number)

    def release(self, slot: SteeringSlot) -> None:
        """Free a slot for other jobs."""
        if slot.rows is not None:
            self._rows.release(slot.rows)
        self._release(slot.numbers)

    def read_traces(
        self, ended: Mapping[str, tuple[SteeringPlan, int]]
    ) -> dict[str, SteeringTrace]:
        """Return what was measured of requests that have ended, by their plans and lengths.

        A length counts the tokens that the model has read, but for one that was read too much.
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
        """Make one trace of those of all pipeline stages: each has measured its own layers."""

        def measured(layer: int) -> StageTrace:
            trace = by_rank[self._find_rank(layer)]
            assert trace is not None, "the first rank of each stage answers"
            return trace

        sites = {}
        for site in plan.all_sites:
            number = self._numbers.number(site.hook, site.layer)
            sums = measured(site.layer)[1].get(number, (0, 0.0, 0.0))
            sites[site.name] = (sums[0], average_changes(*sums))
        passed = tuple(
            measured(plan.probes[condition.probe].layer)[2][number]
            for number, condition in enumerate(plan.conditions)
        )
        return SteeringTrace(measured(plan.sites[0].layer)[0], sites, passed)

    def read_readings(self, plans: Mapping[str, SteeringPlan]) -> dict[str, Readings]:
        """Return the readings since the last call of the requests with these plans."""
        if not plans:
            return {}
        by_rank: list[dict[str, Readings]] = self._call_workers("take_readings", list(plans))
        joined = {}
        for request_id, plan in plans.items():
            found = [readings.get(request_id) for readings in by_rank]
            parts = [found[self._find_rank(probe.layer)] for probe in plan.probes]
            read = [(g, part) for g, part in enumerate(parts) if part is not None]
            if read:
                values = [part.values_TGR[:, g] for g, part in read]
                joined[request_id] = Readings(read[0][1].first, np.stack(values, axis=1))
        return joined

    def read_captures(self, asked: Mapping[str, CapturedRows]) -> dict[str, CapturedActivations]:
        """Return the activations of some tokens of each request."""
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
