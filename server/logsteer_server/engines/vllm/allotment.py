"""Slots for the plans and captures of running requests, and what the workers' tables tell of them.

Workers are called on every rank through vLLM's `collective_rpc`, in between two steps.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from logsteer_server.contract.jobs import CaptureJob, Job
from logsteer_server.contract.plan import SteeringPlan, SteeringTrace
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import describe_capture, describe_steering
from logsteer_server.engines.vllm.slots import SlotPool

CallWorkers = Callable[..., list[Any]]
"""Calls a method of every worker by name, with `args`; the results by rank."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot held for one request, and the extra arguments that tell the workers so."""

    pool: SlotPool | None = None
    slot: int = 0
    extra_args: dict[str, Any] = field(default_factory=dict)


class Allotment:
    """Who has which slot of the steering tables."""

    def __init__(self, call_workers: CallWorkers, size: SteeringSize) -> None:
        self._call = call_workers
        self._plans = SlotPool(size.slots)
        self._captures = SlotPool(size.captures)
        self._capture_serial = itertools.count()

    def lease(self, job: Job) -> Lease | None:
        """The slot of a job, if it needs one; None where it has to wait for one."""
        if isinstance(job, CaptureJob):
            found = self._captures.take(str(next(self._capture_serial)).encode())
            if found is None:
                return None
            slot, _ = found
            return Lease(self._captures, slot, describe_capture(job, slot))
        if job.plan is None:
            return Lease()
        found = self._plans.take(job.plan.sites_digest)
        if found is None:
            return None
        slot, is_new = found
        if is_new:
            self._call("load_plan", args=(slot, job.plan.sites))
        return Lease(self._plans, slot, describe_steering(job, slot))

    def give_back(self, lease: Lease) -> None:
        """Give a slot back."""
        if lease.pool is not None:
            lease.pool.release(lease.slot)

    def trace(self, plans: Mapping[str, SteeringPlan]) -> dict[str, SteeringTrace]:
        """What was measured of requests that have ended, of which these are the plans."""
        if not plans:
            return {}
        by_rank = self._call("take_traces", args=(list(plans),))
        return {
            request_id: _join_trace(plan, [found[request_id] for found in by_rank if found])
            for request_id, plan in plans.items()
        }

    def read_capture(self, lease: Lease, job: CaptureJob) -> np.ndarray:
        """The activations that a capture has summed up: float32 [L, D]."""
        # The sums of a stage are zero at the layers of other stages.
        found = [
            sums_LD for sums_LD in self._call("take_captures", args=(lease.slot,)) if len(sums_LD)
        ]
        sums_LD: np.ndarray = np.sum(found, axis=0)[list(job.layers)]
        return sums_LD / np.float32(len(job.tokens)) if job.read == "mean" else sums_LD


def _join_trace(
    plan: SteeringPlan, by_stage: Sequence[tuple[int, Mapping[int, tuple[int, float]]]]
) -> SteeringTrace:
    """One trace of those of every pipeline stage: each has measured its own layers."""
    sites = {}
    for site in plan.sites:
        found = [layers.get(site.layer, (0, 0.0)) for _, layers in by_stage]
        tokens, ratios = sum(n for n, _ in found), sum(r for _, r in found)
        sites[site.name] = (tokens, ratios / tokens if tokens else 0.0)
    return SteeringTrace(by_stage[0][0], sites)
