"""The vLLM engine: steps vLLM's EngineCore itself and hands whole jobs to its scheduler.

Score jobs enter the scheduler as `Request` objects that are built here, because vLLM's own front
end costs more than the work on a short text: it copies the sampling parameters of every request
deeply and makes Python objects of every token.
"""

import itertools
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from logsteer_server.contract.engine import EngineInfo, EngineSpec
from logsteer_server.contract.jobs import (
    CaptureJob,
    CaptureOutput,
    CheckAdapterJob,
    CheckAdapterOutput,
    GenerateJob,
    GenerateOutput,
    Job,
    JobFailure,
    JobResult,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.contract.parameters import Adapter
from logsteer_server.engines.vllm.allotment import Allotment, Lease
from logsteer_server.engines.vllm.config import (
    context_length,
    describe,
    engine_args,
    set_environment,
    steering_size,
)
from logsteer_server.engines.vllm.extra_args import describe_rows
from logsteer_server.engines.vllm.hits import HitLimit
from logsteer_server.engines.weights import locate_model
from logsteer_server.numerics.rows import RowSpec, unpack


@dataclass(frozen=True, slots=True)
class _Running:
    """A job that vLLM works on, and what it holds: a slot, an adapter."""

    job_id: int
    job: Job
    lease: Lease
    adapter: Any


class VllmEngine:
    """A model resident in vLLM. Errors: ValueError where the specification cannot be served."""

    def __init__(self, spec: EngineSpec) -> None:
        set_environment(spec)
        path = locate_model(spec.path)

        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        from logsteer_server.engines.vllm.adapters import AdapterShelf
        from logsteer_server.engines.vllm.generation import Generation

        on_cpu = current_platform.is_cpu()
        if spec.devices == "cpu" and not on_cpu:
            raise ValueError("devices: cpu needs vLLM's build for CPUs; this is the one for GPUs")
        limit = context_length(path, spec.max_model_len)
        config = EngineArgs(**engine_args(spec, path, on_cpu, limit)).create_engine_config()
        vllm = LLMEngine(config, Executor.get_class(config), log_stats=False)
        self._core = vllm.engine_core.engine_core
        HitLimit(self._core.scheduler.kv_cache_manager)
        call_workers = self._core.model_executor.collective_rpc
        layers = call_workers("count_layers")[0] if spec.steering_slots else 0
        self._info = describe(spec, path, config, limit, layers)
        self._depth = spec.steering_depth
        self._generation = Generation(vllm)
        self._allotment = Allotment(call_workers, steering_size(spec))
        self._shelf = AdapterShelf(self._core, spec.adapter_slots, spec.adapter_rank)
        self._running: dict[str, _Running] = {}
        self._request_ids: dict[int, str] = {}
        self._waiting: dict[int, Job | CheckAdapterJob] = {}
        self._serial = itertools.count()
        self._known: list[tuple[int, JobResult]] = []
        self._params = SamplingParams(
            temperature=0.0, max_tokens=1, detokenize=False, skip_reading_prefix_cache=False
        )

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        return self._info

    @property
    def busy(self) -> bool:
        """Whether a job is unfinished."""
        return bool(self._running or self._waiting or self._known)

    def add(self, jobs: Sequence[tuple[int, Job]]) -> None:
        """Hand jobs to vLLM's scheduler; those that need a plan's or an adapter's slot in turn."""
        for job_id, job in jobs:
            if failure := self._info.refuse(job):
                self._known.append((job_id, failure))
            elif isinstance(job, CheckAdapterJob):
                self._waiting[job_id] = job
            elif failure := self._check(job):
                self._known.append((job_id, failure))
            elif self._needs_slot(job) or _adapter_of(job):
                self._waiting[job_id] = job
            else:
                self._submit(job_id, job, Lease(), None)
        self._admit()

    def _check(self, job: Job) -> JobFailure | None:
        plan = job.plan
        deepest = max((len(site.ops) for site in plan.sites), default=0) if plan else 0
        if deepest > self._depth:
            detail = (
                f"{deepest} operations at one layer, this model has room for {self._depth} beside "
                "additions: use fewer, or raise steering_depth"
            )
            return JobFailure("unsupported_by_engine", detail)
        return None

    @staticmethod
    def _needs_slot(job: Job) -> bool:
        return isinstance(job, CaptureJob) or job.plan is not None

    def _admit(self) -> None:
        """Submit the jobs that wait for a slot, in order, as far as there are any free."""
        for job_id, job in list(self._waiting.items()):
            wanted = _adapter_of(job)
            adapter = self._shelf.take(wanted) if wanted else None
            if wanted and adapter is None:
                return
            if isinstance(adapter, JobFailure):
                self._known.append((job_id, adapter))
            elif isinstance(job, CheckAdapterJob):
                self._give_back(Lease(), adapter)
                self._known.append((job_id, CheckAdapterOutput()))
            else:
                lease = self._allotment.lease(job)
                if lease is None:
                    self._give_back(Lease(), adapter)
                    return
                self._submit(job_id, job, lease, adapter)
            del self._waiting[job_id]

    def _give_back(self, lease: Lease, adapter: Any) -> None:
        self._allotment.give_back(lease)
        if adapter is not None:
            self._shelf.release(adapter)

    def _submit(
        self, job_id: int, job: Job, lease: Lease, adapter: Any, use_cache: bool = True
    ) -> None:
        try:
            if isinstance(job, GenerateJob):
                name = str(next(self._serial))
                request_id = self._generation.add(name, job, lease.extra_args, adapter)
            else:
                request_id = self._schedule(job, lease.extra_args, adapter, use_cache)
        except ValueError as error:  # vLLM's own limits on sampling parameters
            self._give_back(lease, adapter)
            self._known.append((job_id, JobFailure("invalid_request", str(error))))
            return
        self._running[request_id] = _Running(job_id, job, lease, adapter)
        self._request_ids[job_id] = request_id

    def _schedule(
        self,
        job: Job,
        extra_args: dict[str, Any],
        adapter: Any,
        use_cache: bool,
    ) -> str:
        """Hand a job that generates nothing to vLLM's scheduler; the id of its request."""
        from vllm.v1.request import Request

        params = copy(self._params)
        params.skip_reading_prefix_cache = not use_cache or isinstance(job, CaptureJob)
        params.extra_args = extra_args
        cache_salt = None
        if isinstance(job, ScoreJob):
            params.extra_args = extra_args | describe_rows(job, RowSpec.of(job, self._info.eos_ids))
            if job.plan is not None:
                cache_salt = job.plan.digest(job.prompt_len).hex()
        request_id = str(next(self._serial))
        hasher = self._core.request_block_hasher
        self._core.add_request(
            Request(
                request_id,
                job.tokens.tolist(),
                params,
                None,
                cache_salt=cache_salt,
                lora_request=adapter,
                block_hasher=hasher,
            )
        )
        return request_id

    def _forget(self, request_id: str) -> _Running:
        running = self._running.pop(request_id)
        del self._request_ids[running.job_id]
        self._give_back(running.lease, running.adapter)
        return running

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Abort jobs in vLLM's scheduler."""
        for job_id in job_ids:
            self._waiting.pop(job_id, None)
            request_id = self._request_ids.get(job_id)
            if request_id is None:
                continue
            if isinstance(self._forget(request_id).job, GenerateJob):
                self._generation.cancel(request_id)
            else:
                self._core.abort_requests([request_id])
        self._admit()

    def step(self) -> list[tuple[int, JobResult]]:
        """Run one step of vLLM and give the results that it had."""
        results, self._known = self._known, []
        if not self._running:
            return results
        outputs, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        ended: dict[str, JobResult] = {}
        generated = []
        for batch in (outputs or {}).values():  # None while pipeline stages are being filled
            for output in batch.outputs:
                running = self._running.get(output.request_id)
                if running is None or isinstance(running.job, GenerateJob):
                    generated.append(output)
                elif output.finished:
                    ended |= self._collect(output, running)
        for request_id, piece in self._generation.collect(generated):
            if piece.is_last:
                ended[request_id] = piece
            else:
                results.append((self._running[request_id].job_id, piece))
        results += self._end(ended)
        self._admit()
        return results

    def _collect(self, output: Any, running: _Running) -> dict[str, JobResult]:
        """The result of a request that vLLM has finished; none where it is run once more."""
        request_id, job = output.request_id, running.job
        if isinstance(job, CaptureJob):
            return {request_id: CaptureOutput(self._allotment.read_capture(running.lease, job))}
        assert isinstance(job, ScoreJob)
        values = output.prompt_token_id_logprobs
        reading = RowSpec.of(job, self._info.eos_ids)
        if values is None:
            detail = f"vLLM ended the request without its rows ({output.finish_reason})"
            return {request_id: JobFailure("internal", detail)}
        if values.numel() == 0:
            # The prefix cache reached beyond the first wanted row, so that row was not computed.
            del self._running[request_id]
            self._submit(running.job_id, job, running.lease, running.adapter, use_cache=False)
            return {}
        rows = unpack(values.numpy().reshape(-1, reading.width), reading)
        cached = output.prefill_stats.num_cached_tokens if output.prefill_stats else 0
        return {
            request_id: ScoreOutput(
                rows.columns, rows.top_ids, rows.top_logprobs, cached_tokens=cached
            )
        }

    def _end(self, ended: dict[str, JobResult]) -> list[tuple[int, JobResult]]:
        """The last results of requests, by job, with the traces of those that were steered."""
        plans = {}
        for request_id in ended:
            job = self._running[request_id].job
            if not isinstance(job, CaptureJob) and job.plan is not None:
                plans[request_id] = job.plan
        traces = self._allotment.trace(plans)
        results = []
        for request_id, result in ended.items():
            if request_id in traces and isinstance(result, ScoreOutput | GenerateOutput):
                result = replace(result, trace=traces[request_id])
            results.append((self._forget(request_id).job_id, result))
        return results

    def close(self) -> None:
        """Stop vLLM and its worker processes."""
        self._core.shutdown()
        self._shelf.close()


def _adapter_of(job: Job | CheckAdapterJob) -> Adapter | None:
    return None if isinstance(job, CaptureJob) else job.adapter
