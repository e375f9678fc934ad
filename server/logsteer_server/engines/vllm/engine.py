"""The vLLM engine: acquires slots for jobs, submits them to vLLM, and collects their results."""

import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from logsteer_server.contract.batches import find_failure
from logsteer_server.contract.engine import (
    DeviceMemory,
    EngineInfo,
    EngineLoad,
    EngineReading,
    EngineSpec,
)
from logsteer_server.contract.jobs import (
    CheckAdapterJob,
    CheckAdapterOutput,
    GenerateJob,
    Job,
    JobFailure,
    JobResult,
)
from logsteer_server.engines.failures import describe_error
from logsteer_server.engines.needs import choose_dtype, read_config
from logsteer_server.engines.vllm.adapters import AdapterSlot, AdapterSlots, UnfitAdapterError
from logsteer_server.engines.vllm.arguments import check_checkpoint
from logsteer_server.engines.vllm.config import (
    WORKER,
    describe,
    prepare,
    steering_size,
)
from logsteer_server.engines.vllm.requests import RUNNING, RunningJob
from logsteer_server.engines.vllm.slots import Asked, SteeringSlot, SteeringSlots
from logsteer_server.engines.vllm.stream import (
    UnknownStreamError,
    check_model_graphs,
    check_points,
    detect_stream_form,
)
from logsteer_server.imports import hold_collector

LOAD_PARTS = 64
"""Resolution of the cache's load: a change is reported from 1 / LOAD_PARTS of the cache on."""

MEMORY_EVERY_S = 10.0
"""Seconds between two measurements of the GPUs' memory, which call every worker."""


class VllmEngine:
    """Run jobs on a model in vLLM. Errors: ValueError if the spec cannot be served."""

    def __init__(self, spec: EngineSpec) -> None:
        self._scratch, path = prepare(spec)
        spec = replace(spec, dtype=choose_dtype(spec.dtype, path))
        check_checkpoint(read_config(path), spec.dtype)
        with hold_collector():
            from logsteer_server.engines.vllm.core import VllmCore

            import_module(WORKER.rpartition(".")[0])

        self._vllm = VllmCore(spec, path)
        check_model_graphs(self._vllm)
        unsteerable, faults = self._detect_hooks(spec)
        info = describe(
            spec,
            path,
            self._vllm.config,
            self._vllm.context_length,
            unsteerable,
            faults,
            self._vllm.call_workers("find_logits_dtype")[-1],
        )
        self._info = replace(info, int8_products=self._vllm.call_workers("find_int8_products")[0])
        self._slots = SteeringSlots(self._vllm.call_workers, steering_size(spec), self._info)
        self._adapters = AdapterSlots(self._vllm, spec.adapter_slots, spec.adapter_rank)
        self._started: list[int] = []
        self._held_tokens = 0
        self._has_gpu = self._vllm.config.device_config.device_type == "cuda"
        self._memory: tuple[DeviceMemory, ...] = ()
        self._memory_due = 0.0
        self._waiting: dict[int, Job] = {}
        self._running: dict[int, RunningJob] = {}
        self._by_request_id: dict[str, RunningJob] = {}
        self._known: list[tuple[int, JobResult]] = []

    def _detect_hooks(self, spec: EngineSpec) -> tuple[str | None, dict[str, str]]:
        """Return why the model cannot be steered, or None; and the faults of its other hooks."""
        if not spec.steering_slots:
            return "this model takes no steering; configure it with steering_slots above 0", {}
        try:
            form = detect_stream_form(self._vllm)
        except UnknownStreamError as error:
            reason = f"this model cannot be steered in vLLM: {error}"
            return f"{reason}; serve it with engine transformer_lens", {}
        hooks = [hook for hook in spec.hooks if hook != "resid_post"]
        return None, check_points(self._vllm, form, hooks) if hooks else {}

    @property
    def info(self) -> EngineInfo:
        """The description of this engine."""
        return self._info

    @property
    def busy(self) -> bool:
        """Whether a job is unfinished."""
        return bool(self._running or self._waiting or self._known or self._vllm.steps)

    def add(self, jobs: Sequence[tuple[int, Job]]) -> None:
        """Submit jobs to vLLM; jobs that need slots wait for them in order."""
        for job_id, job in jobs:
            failure = self._info.refuse(job)
            if failure is None:
                failure = self._slots.refuse(job)
            if failure is not None:
                self._known.append((job_id, failure))
            elif job.features:
                self._waiting[job_id] = job
            else:
                self._submit(RUNNING[type(job)](job_id, job, SteeringSlot(), None))
        self._admit()

    def _admit(self) -> None:
        """Submit the jobs that wait for slots, in order, while slots are free.

        A capture that waits for room blocks only other captures.
        """
        captures_wait = False
        started: list[RunningJob] = []
        for job_id, job in list(self._waiting.items()):
            is_capture = job.capture is not None
            if is_capture and captures_wait:
                continue
            try:
                if not self._start(job_id, job, started):
                    if not is_capture:
                        break
                    captures_wait = True
                    continue
            except UnfitAdapterError as error:
                self._known.append((job_id, JobFailure(error.code, error.detail)))
            except Exception as error:  # whatever a worker raises over an adapter
                self._known.append((job_id, describe_error(error)))
            del self._waiting[job_id]
        try:
            self._slots.load_plans()
        except Exception as error:  # whatever a worker raises over a plan
            for running in started:
                self._fail(running, describe_error(error))
        else:
            for running in started:
                self._submit(running)

    def _start(self, job_id: int, job: Job, started: list[RunningJob]) -> bool:
        """Acquire a job's slots and add it to those started; return False if it has to wait.

        Errors: UnfitAdapterError, and whatever a worker raises.
        """
        adapter = self._adapters.acquire(job.adapter) if job.adapter else None
        if job.adapter and adapter is None:
            return False
        if adapter is not None and isinstance(job, CheckAdapterJob):
            self._release(SteeringSlot(), adapter)
            self._known.append((job_id, CheckAdapterOutput(adapter.updated)))
            return True
        slot = None
        try:
            slot = self._slots.acquire(job)
        finally:
            if slot is None:
                self._release(SteeringSlot(), adapter)
        if slot is not None:
            started.append(RUNNING[type(job)](job_id, job, slot, adapter))
        return slot is not None

    def _release(self, slot: SteeringSlot, adapter: AdapterSlot | None) -> None:
        self._slots.release(slot)
        if adapter is not None:
            self._adapters.release(adapter)

    def _submit(self, running: RunningJob) -> None:
        try:
            running.submit(self._vllm, self._info.eos_ids)
        except Exception as error:  # whatever vLLM's checks raise, which have no common class
            failure = describe_error(error)
            if isinstance(error, ValueError) and "structure" in running.job.features:
                detail = f"the form of the reply cannot be forced: {error!s:.400}"
                failure = JobFailure("invalid_request", detail)
            self._fail(running, failure)
        else:
            self._running[running.job_id] = self._by_request_id[running.request_id] = running

    def _fail(self, running: RunningJob, failure: JobFailure) -> None:
        """Release the slots of a job that is not in vLLM, and report its failure."""
        self._release(running.slot, running.adapter)
        self._known.append((running.job_id, failure))

    def _remove(self, running: RunningJob) -> None:
        del self._running[running.job_id], self._by_request_id[running.request_id]

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Abort jobs in vLLM, and drop their unreported results."""
        for job_id in job_ids:
            self._waiting.pop(job_id, None)
            if running := self._running.get(job_id):
                self._remove(running)
                self._release(running.slot, running.adapter)
                self._vllm.abort(running.request_id)
        cancelled = set(job_ids)
        self._known = [
            (job_id, result) for job_id, result in self._known if job_id not in cancelled
        ]
        self._admit()

    def step(self) -> list[tuple[int, JobResult]]:
        """End a step of vLLM and return its results.

        With several pending steps, later ones begin first, so that the device computes them while
        this process builds and sends results and adds jobs.
        """
        results, self._known = self._known, []
        results += self._collect(self._vllm.step())
        self._admit()
        return results

    def _collect(self, outputs: Sequence[Any]) -> list[tuple[int, JobResult]]:
        """Convert a step's outputs to results with their measurements; release ended jobs' slots.

        Outputs of cancelled jobs have no job any more.
        """
        collected: list[tuple[RunningJob, JobResult]] = []
        for output in outputs:
            running = self._by_request_id.get(output.request_id)
            if running is None:
                continue
            if output.prefill_stats is not None and isinstance(running.job, GenerateJob):
                self._started.append(running.job_id)
            result = running.read(output)
            if result is None:
                continue
            if result.is_last and not output.finished:
                self._vllm.abort(running.request_id)
            collected.append((running, result))
        asked = {
            running.request_id: Asked(
                running.job, running.slot, running.num_reported, running.num_read, result.is_last
            )
            for running, result in collected
            if not result.failed and (running.job.plan or running.job.capture)
        }
        measured = self._slots.measure(asked)
        results: list[tuple[int, JobResult]] = []
        for running, result in collected:
            running.num_reported = running.num_read
            if not result.failed and (found := measured.get(running.request_id)):
                result = replace(result, **found)
            if result.is_last:
                if not result.failed:
                    result = find_failure(running.job, result) or result
                self._remove(running)
                self._release(running.slot, running.adapter)
            results.append((running.job_id, result))
        return results

    def take_load(self) -> EngineLoad | None:
        """Return the load of generation; None if it is about the same as at the last call."""
        started, self._started = self._started, []
        held, size = self._vllm.count_held(), self._info.room.cache_tokens or 1
        if not (started or abs(held - self._held_tokens) * LOAD_PARTS >= size):
            return None
        self._held_tokens = held
        return EngineLoad(started, held)

    def read(self) -> EngineReading:
        """Return the status of vLLM's scheduler and of the slots for plans and adapters."""
        running, waiting = self._vllm.count_requests()
        blocks, used_blocks = self._vllm.count_blocks()
        plans, used_plans = self._slots.count()
        adapters, used_adapters = self._adapters.count()
        return EngineReading(
            running,
            waiting + len(self._waiting),
            blocks,
            used_blocks,
            self._vllm.preemptions.count,
            plans,
            used_plans,
            adapters,
            used_adapters,
            self._read_memory(),
        )

    def _read_memory(self) -> tuple[DeviceMemory, ...]:
        """Return the memory of the workers' GPUs, at most MEMORY_EVERY_S old."""
        is_due = self._has_gpu and time.monotonic() >= self._memory_due
        if is_due:
            self._memory_due = time.monotonic() + MEMORY_EVERY_S
            self._memory = tuple(
                each for found in self._vllm.call_workers("read_memory") for each in found
            )
        return self._memory

    def close(self) -> None:
        """Stop vLLM and its worker processes, and delete the scratch directory."""
        self._vllm.close()
        self._scratch.close()
