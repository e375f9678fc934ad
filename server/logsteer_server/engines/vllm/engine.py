"""The vLLM engine: acquires slots for jobs, submits them to vLLM, and collects their results."""

import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from logsteer_server.contract.batches import find_failure, is_finite
from logsteer_server.contract.captures import CapturedActivations
from logsteer_server.contract.engine import (
    DeviceMemory,
    EngineInfo,
    EngineLoad,
    EngineReading,
    EngineSpec,
)
from logsteer_server.contract.jobs import (
    CaptureJob,
    CheckAdapterJob,
    CheckAdapterOutput,
    GenerateJob,
    Job,
    JobFailure,
    JobResult,
    Output,
    ScoreJob,
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
from logsteer_server.engines.vllm.requests import (
    CaptureRequests,
    Collected,
    GenerationRequests,
    JobRequests,
    RunningJob,
    ScoreRequests,
)
from logsteer_server.engines.vllm.slots import CapturedRows, SteeringSlot, SteeringSlots
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
        self._generation = GenerationRequests(self._vllm, self._info.eos_ids)
        self._kinds: dict[type[Job], JobRequests] = {
            ScoreJob: ScoreRequests(self._vllm, self._info.eos_ids),
            CaptureJob: CaptureRequests(self._vllm),
            GenerateJob: self._generation,
        }
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
                self._submit(RunningJob(job_id, job, self._kinds[type(job)], SteeringSlot(), None))
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
            started.append(RunningJob(job_id, job, self._kinds[type(job)], slot, adapter))
        return slot is not None

    def _release(self, slot: SteeringSlot, adapter: AdapterSlot | None) -> None:
        self._slots.release(slot)
        if adapter is not None:
            self._adapters.release(adapter)

    def _submit(self, running: RunningJob) -> None:
        try:
            running.request_id = running.kind.submit(running)
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
                running.kind.cancel(running.request_id)
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
        results += self._collect(self._find_running(self._vllm.step()))
        self._admit()
        return results

    def _find_running(self, outputs: Sequence[Any]) -> list[tuple[RunningJob, Any]]:
        """Return the outputs of a step with their jobs, without cancelled ones."""
        jobs = self._by_request_id
        return [
            (jobs[output.request_id], output) for output in outputs if output.request_id in jobs
        ]

    def _collect(self, outputs: Sequence[tuple[RunningJob, Any]]) -> list[tuple[int, JobResult]]:
        """Convert outputs of a step to results; rerun jobs that a prefix-cache hit cut short."""
        by_kind: dict[JobRequests, list[tuple[RunningJob, Any]]] = {}
        for running, output in outputs:
            by_kind.setdefault(running.kind, []).append((running, output))
        results: list[tuple[int, JobResult]] = []
        ended: list[tuple[RunningJob, JobResult]] = []
        pieces: list[tuple[RunningJob, Output]] = []
        for kind, own in by_kind.items():
            for running, result in self._add_readings(kind.collect(own)):
                if result is None:
                    if running.has_prompt_condition:  # decided without the skipped token's reading
                        self._vllm.freed_prefixes.evict(running.request_id)
                    self._remove(running)
                    running.use_cache = False
                    self._submit(running)
                elif result.is_last:
                    ended.append((running, result))
                elif isinstance(result, Output):
                    pieces.append((running, result))
        captured = self._read_captures([one for one, _ in pieces if one.streams_captures])
        for running, result in pieces:
            found = captured.get(running.request_id)
            results.append(
                (running.job_id, replace(result, activations=found) if found else result)
            )
        return results + self._end(ended)

    def _read_captures(self, jobs: Sequence[RunningJob]) -> dict[str, CapturedActivations]:
        """Return, by request, the activations captured since its last output with activations."""
        captured = self._slots.read_captures(
            {
                running.request_id: CapturedRows(
                    running.job, running.slot.rows, running.num_captured, running.num_read
                )
                for running in jobs
            }
        )
        for running in jobs:
            running.num_captured = running.num_read
        return captured

    def _add_readings(self, collected: Sequence[Collected]) -> list[Collected]:
        """Add the probe readings of their tokens to the outputs."""
        plans = {
            running.request_id: running.job.plan
            for running, result in collected
            if result is not None and not result.failed and running.keeps_readings
        }
        if not plans:
            return list(collected)
        readings = self._slots.read_readings(plans)
        return [
            (running, running.add_readings(result, readings.get(running.request_id)))
            if running.request_id in plans and isinstance(result, Output)
            else (running, result)
            for running, result in collected
        ]

    def _end(self, ended: Sequence[tuple[RunningJob, JobResult]]) -> list[tuple[int, JobResult]]:
        """Return the last results of jobs, with traces and activations, and release their slots."""
        traces = self._slots.read_traces(
            {
                running.request_id: (running.slot.plan, running.num_read)
                for running, _ in ended
                if running.slot.plan and running.slot.plan.sites
            }
        )
        captured = self._read_captures(
            [running for running, result in ended if running.job.capture and not result.failed]
        )
        results: list[tuple[int, JobResult]] = []
        for running, result in ended:
            trace, found = traces.get(running.request_id), captured.get(running.request_id)
            if not result.failed and (trace or found):
                result = replace(result, trace=trace, activations=found)
            failure = None if result.failed else find_failure(running.job, result)
            if failure is not None or result.failed or not is_finite(result):
                self._vllm.freed_prefixes.evict(running.request_id)
            self._remove(running)
            self._release(running.slot, running.adapter)
            results.append((running.job_id, failure or result))
        return results

    def take_load(self) -> EngineLoad | None:
        """Return the load of generation; None if it is about the same as at the last call."""
        started, is_running = self._generation.pop_started(), self._generation.is_running
        if not (is_running or self._held_tokens):
            return None
        held = self._vllm.count_held() if is_running else 0
        moved = abs(held - self._held_tokens) * LOAD_PARTS >= (self._info.room.cache_tokens or 0)
        if not (started or moved):
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
