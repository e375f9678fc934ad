"""Slots of the steering tables for the plans and captures of running jobs, and what is read back.

The tables are in the workers, which are called on every rank in between two steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from logsteer_server.contract.captures import CaptureJob
from logsteer_server.contract.jobs import Job
from logsteer_server.contract.plan import SteeringPlan, SteeringTrace
from logsteer_server.engines.vllm.captures import RowPool
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import describe_capture, describe_steering
from logsteer_server.engines.vllm.slots import SlotPool

CallWorkers = Callable[..., list[Any]]
"""Calls a method of every worker by name, with arguments; returns the results by rank."""


@dataclass(frozen=True, slots=True)
class SteeringSlot:
    """A slot that one job has, its plan, and the extra arguments that tell the workers so.

    Without a pool it is no slot, which is what a job has that is not steered. A capture has `rows`
    of the capture buffer, too.
    """

    pool: SlotPool | None = None
    number: int = 0
    plan: SteeringPlan | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)
    rows: range | None = None


class SteeringSlots:
    """Give jobs slots of the steering tables; read what the tables measured and captured.

    Jobs with equal plans share a slot; a capture has its rows, of so many, to itself.
    """

    def __init__(self, call_workers: CallWorkers, size: SteeringSize, capture_rows: int) -> None:
        self._call_workers = call_workers
        self._plans = SlotPool(size.slots)
        self._rows = RowPool(capture_rows)

    def take_plan(self, job: Job) -> SteeringSlot | None:
        """Return the slot of a job's plan, if it has one; None where the job has to wait for it.

        Errors: whatever a worker raises.
        """
        if job.plan is None:
            return SteeringSlot()
        found = self._plans.take(job.plan.sites_digest)
        if found is None:
            return None
        number, is_new = found
        if is_new:
            try:
                self._call_workers("load_plan", number, job.plan.sites)
            except Exception:
                self._plans.forget(number)
                raise
        return SteeringSlot(self._plans, number, job.plan, describe_steering(job, number))

    def take_capture(self, job: CaptureJob) -> SteeringSlot | None:
        """Return the slot of the job's plan with rows to capture in; None where it has to wait.

        Errors: as `take_plan`.
        """
        slot = self.take_plan(job)
        if slot is None:
            return None
        rows = self._rows.take(job.num_rows * len(job.layers))
        if rows is None:
            self.release(slot)
            return None
        extra_args = slot.extra_args | describe_capture(job, rows)
        return replace(slot, extra_args=extra_args, rows=rows)

    def release(self, slot: SteeringSlot) -> None:
        """Free a slot for other jobs."""
        if slot.rows is not None:
            self._rows.release(slot.rows)
        if slot.pool is not None:
            slot.pool.release(slot.number)

    def read_traces(self, plans: Mapping[str, SteeringPlan]) -> dict[str, SteeringTrace]:
        """Return what was measured of requests that have ended, of which these are the plans."""
        if not plans:
            return {}
        by_rank = self._call_workers("take_traces", list(plans))
        return {
            request_id: _join_stages(plan, [found[request_id] for found in by_rank if found])
            for request_id, plan in plans.items()
        }

    def read_capture(self, slot: SteeringSlot, job: CaptureJob) -> np.ndarray:
        """Return the activations that a job has captured: float32 [L, T, D]."""
        found = [
            rows_ND for rows_ND in self._call_workers("take_captures", slot.rows) if len(rows_ND)
        ]
        # The rows of a stage are zero at the layers of other stages.
        rows_ND: np.ndarray = sum(found[1:], found[0])
        rows_LTD = rows_ND.reshape(len(job.layers), job.num_rows, -1)
        return rows_LTD / np.float32(len(job.places)) if job.read == "mean" else rows_LTD


def _join_stages(
    plan: SteeringPlan, by_stage: Sequence[tuple[int, Mapping[int, tuple[int, float]]]]
) -> SteeringTrace:
    """Make one trace of those of all pipeline stages: each has measured its own layers."""
    sites = {}
    for site in plan.sites:
        found = [layers.get(site.layer, (0, 0.0)) for _, layers in by_stage]
        tokens, ratios = sum(n for n, _ in found), sum(r for _, r in found)
        sites[site.name] = (tokens, ratios / tokens if tokens else 0.0)
    return SteeringTrace(by_stage[0][0], sites)
