"""The TransformerLens engine: jobs in, batches through the bridged model, results out.

Each step runs one batch from one of the queues, which take turns. All jobs of a batch use the same
parameters.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from logsteer_server.contract.engine import EngineInfo, EngineReading, EngineRoom, EngineSpec
from logsteer_server.contract.gradients import GradientJob
from logsteer_server.contract.jobs import (
    CaptureJob,
    CheckAdapterJob,
    CheckAdapterOutput,
    CheckOverrideJob,
    GenerateJob,
    Job,
    JobFailure,
    JobResult,
    ScoreJob,
)
from logsteer_server.engines.failures import describe_error, lacks_memory
from logsteer_server.engines.machine import describe_machine, name_devices, read_memory
from logsteer_server.engines.tlens.causal import describe_model
from logsteer_server.engines.tlens.generation import GenerateQueue, GenerationRow
from logsteer_server.engines.tlens.gradient import GradientQueue
from logsteer_server.engines.tlens.model import BridgeModel
from logsteer_server.engines.tlens.parameters import DeltaCache
from logsteer_server.engines.tlens.points import RefusedJobError
from logsteer_server.engines.tlens.queue import (
    EngineLimits,
    Entry,
    JobQueue,
    Results,
)
from logsteer_server.engines.tlens.scoring import CaptureQueue, ScoreQueue
from logsteer_server.engines.weights import digest_weights, find_kind, locate_model
from logsteer_server.numerics.hidden_rows import RowBounds


class TransformerLensEngine:
    """A model loaded in TransformerLens. Errors: ValueError where it cannot be served."""

    def __init__(self, spec: EngineSpec) -> None:
        for name in ("quantization", "memory"):
            if getattr(spec, name) is not None:
                raise ValueError(f"{name}: transformer_lens takes none; leave it out")
        limits = EngineLimits.parse(spec.engine_args)
        path = locate_model(spec.path)
        self._model = BridgeModel(spec, path)
        self._info = self._describe(spec, str(path), digest_weights(path), limits)
        self._deltas = DeltaCache(self._model.parameters, limits.override_cache_bytes)
        self._known: Results = []
        """Results of jobs that need no step."""
        model, deltas = self._model, self._deltas
        bounds = RowBounds(spec.chunk_bytes, spec.column_bytes)
        self._queues: dict[type[Job], JobQueue[Any]] = {
            ScoreJob: ScoreQueue(model, deltas, limits, bounds),
            CaptureJob: CaptureQueue(model, deltas, limits),
            GradientJob: GradientQueue(model, deltas, limits, bounds.logits),
            GenerateJob: GenerateQueue(model, deltas, limits),
        }
        # Continuations under a parameter delta may have to wait; the others need not.
        self._delta_queue = GenerateQueue(model, deltas, limits)
        # The first has the next turn.
        self._turns = deque([*self._queues.values(), self._delta_queue])

    def _describe(
        self, spec: EngineSpec, path: str, digest: str, limits: EngineLimits
    ) -> EngineInfo:
        model = self._model
        return replace(
            describe_model(model),
            model_path=spec.path,
            tokenizer_path=path,
            weights_digest=digest,
            logits_dtype=model.logits_dtype,
            quantization=model.quantization,
            dequantised_from=find_kind(spec.path),
            pipeline_parallel=model.num_devices,
            max_probes=spec.steering_probes,
            hook_widths=model.points.list_widths(model.hidden_size),
            tf32=spec.tf32 and model.device.type == "cuda",
            computed_on=describe_machine(model.device.type),
            device=name_devices(model.device.type),
            room=EngineRoom(limits.max_held_tokens),
        )

    @property
    def info(self) -> EngineInfo:
        """The model and this engine's abilities."""
        return self._info

    @property
    def busy(self) -> bool:
        """Whether a job is unfinished."""
        return bool(self._known) or any(queue.has_work for queue in self._turns)

    def add(self, jobs: Sequence[tuple[int, Job]]) -> None:
        """Accept jobs; results that need no step come with the next one."""
        for job_id, job in jobs:
            result: JobResult | None = self._info.refuse(job)
            if result is None:
                try:
                    result = self._begin(job_id, job)
                except RefusedJobError as error:
                    result = error.failure
                except Exception as error:
                    result = describe_error(error)
            if result is not None:
                self._known.append((job_id, result))

    def _begin(self, job_id: int, job: Job) -> JobResult | None:
        """Queue a job; a job that only asks whether something fits returns its output at once."""
        if isinstance(job, CheckOverrideJob):
            return self._model.parameters.check(job.shapes)
        if isinstance(job, CheckAdapterJob):
            assert job.adapter is not None
            return CheckAdapterOutput(len(self._deltas.read_adapter(job.adapter)))
        has_copy = isinstance(job, GenerateJob) and job.delta
        queue = self._delta_queue if has_copy else self._queues[type(job)]
        queue.add(job_id, job)
        return None

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Drop jobs, queued or running."""
        ids = frozenset(job_ids)
        self._known = [(job_id, result) for job_id, result in self._known if job_id not in ids]
        for queue in self._turns:
            queue.drop(ids)

    def step(self) -> Results:
        """Run the next batch in turn and return its results."""
        results, self._known = self._known, []
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            if self._turns[-1].has_work:
                results += self._run(self._turns[-1])
                break
        if not self.busy:
            self._deltas.trim()
        return results

    def _run(self, queue: JobQueue[Any]) -> Results:
        """Run a queue's next batch and return its results.

        If memory runs out, all its jobs fail. After any other error they run again one by one, so
        that only the job that causes it fails.
        """
        batch = queue.take()
        try:
            return queue.run(batch)
        except RefusedJobError as error:
            failure = error.failure
        except Exception as error:
            failure = _describe_shortage(batch) if lacks_memory(error) else describe_error(error)
        # Only here, outside the handler, does no traceback hold the batch's tensors.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        queue.drop(frozenset(entry.job_id for entry in batch))
        if failure.code != "internal" or len(batch) == 1:
            return [(entry.job_id, failure) for entry in batch]
        results: Results = []
        for entry in batch:
            has_part = isinstance(entry, GenerationRow) and entry.drawn.num_tokens > 0
            if has_part and entry.job.stream:
                results.append((entry.job_id, failure))  # the caller has part of it already
            else:
                queue.add(entry.job_id, entry.job, alone=True)
        return results

    def take_load(self) -> None:
        """Return nothing: continuations are admitted by the most tokens that they may take."""

    def read(self) -> EngineReading:
        """Return the numbers of running and waiting jobs, and the GPUs' memory."""
        return EngineReading(
            running=sum(queue.num_running for queue in self._turns),
            waiting=sum(queue.num_waiting for queue in self._turns),
            memory=read_memory(),
        )

    def close(self) -> None:
        """Free the model."""
        self._turns.clear()
        self._queues.clear()
        del self._model, self._deltas, self._delta_queue


def _describe_shortage(batch: Sequence[Entry]) -> JobFailure:
    tokens = sum(len(entry.job.tokens) for entry in batch)
    detail = (
        f"memory ran out over {len(batch)} sequences of {tokens} tokens; "
        "send less, or set engine_args max_batch_tokens or max_batch_rows lower"
    )
    return JobFailure("out_of_memory", detail)
