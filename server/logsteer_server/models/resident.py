"""The resident models: each an engine, its tokenizer, and the budget of work it takes on."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from logsteer.errors import api_error
from logsteer.schemas import ModelCard, Precision, Provenance
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import (
    CaptureJob,
    CaptureOutput,
    CheckAdapterJob,
    CheckOverrideJob,
    CheckOverrideOutput,
    GenerateJob,
    GenerateOutput,
    GradientJob,
    GradientOutput,
    Job,
    Output,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.engines.supervisor import EngineHandle, JobEnd, SupervisionLimits, now
from logsteer_server.metrics import Metrics, ModelCounters, ModelReading
from logsteer_server.models.cache import Computed, ResultCache, digest_scope
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.text.tokenizer import TextCodec

log = logging.getLogger(__name__)

KEPT_AT_ONCE = 1024
"""Results that wait together for the cache, so that a long call does not hold all of its own."""


T = TypeVar("T")


async def collect(outputs: AsyncIterator[tuple[int, T]]) -> list[T]:
    """The outputs in the order of their jobs, once all of them have come."""
    found = {index: output async for index, output in outputs}
    return [found[index] for index in range(len(found))]


class WorkClock:
    """Times of one request: accepted when made, then when the engine took the first job.

    `cached_results` counts the sequences that the engine never saw.
    """

    def __init__(self) -> None:
        self.cached_results = 0
        self._accepted = now()
        self._taken: float | None = None

    def note(self, end: JobEnd) -> None:
        """Count a finished job in."""
        self._taken = end.taken_at if self._taken is None else min(self._taken, end.taken_at)

    def read(self) -> dict[str, float]:
        """The fields of `Timing`."""
        if self._taken is None:
            return {"queue_ms": 0.0, "engine_ms": 0.0}
        taken = self._taken
        return {
            "queue_ms": round(1e3 * max(0.0, taken - self._accepted), 3),
            "engine_ms": round(1e3 * (now() - taken), 3),
        }


class Resident:
    """One configured model."""

    def __init__(
        self,
        settings: ModelSettings,
        handle: EngineHandle,
        max_tokens: int,
        results: ResultCache,
        counters: ModelCounters,
    ) -> None:
        self.settings = settings
        self.handle = handle
        self._results = results
        self._counters = counters
        self._codec: TextCodec | None = None
        self._max_tokens = max_tokens
        self._pending_tokens = 0
        self._tokens_per_s = 0.0

    @property
    def id(self) -> str:
        """The id under which requests name this model."""
        return self.settings.id

    async def load_codec(self) -> None:
        """Load the tokenizer when the engine is ready; the handle's state says if that fails."""
        await self.handle.ready.wait()
        assert self.handle.info is not None
        try:
            self._codec = await asyncio.to_thread(TextCodec.load, self.handle.info.tokenizer_path)
        except Exception as error:  # a tokenizer's own code may raise anything
            log.exception("the tokenizer of model %s did not load", self.id)
            self.handle.state = "failed"
            self.handle.detail = f"its tokenizer did not load: {error}"

    @property
    def is_ready(self) -> bool:
        """Whether requests can be answered."""
        return self.handle.state == "ready" and self._codec is not None

    def require(self) -> tuple[TextCodec, EngineInfo]:
        """Tokenizer and engine. Errors: APIError where the model does not answer now."""
        info = self.handle.check_ready()
        if self._codec is None:
            detail = f"The tokenizer of model {self.id} is still loading; try again shortly."
            raise api_error("model_loading", detail, retry_after=2)
        return self._codec, info

    @contextmanager
    def admit(self, num_tokens: int) -> Iterator[None]:
        """Reserve room for work while it runs.

        Errors: APIError `overloaded` where other work leaves no room, `payload_too_large` where
        the work would not fit even alone.
        """
        if num_tokens > self._max_tokens:
            detail = (
                f"The request needs {num_tokens} tokens of work, at most {self._max_tokens} are "
                "taken at once: split it, or raise max_pending_tokens."
            )
            raise api_error("payload_too_large", detail)
        if self._pending_tokens + num_tokens > self._max_tokens:
            wait = self._pending_tokens / self._tokens_per_s if self._tokens_per_s else 5.0
            detail = (
                f"{self._pending_tokens} tokens of work are waiting and this request adds "
                f"{num_tokens}; the limit is {self._max_tokens}. Try again later."
            )
            raise api_error("overloaded", detail, retry_after=max(1.0, round(wait)))
        self._pending_tokens += num_tokens
        try:
            yield
        finally:
            self._pending_tokens -= num_tokens

    async def score(
        self, jobs: Sequence[ScoreJob], clock: WorkClock, cache: bool = True
    ) -> AsyncIterator[tuple[int, ScoreOutput]]:
        """Index and output of each job as it ends; see `EngineHandle.run`.

        With `cache`, results that are known come first and take no room of the budget, and jobs
        that are equal are computed once.
        """
        if cache and self._results.is_on:
            async for index, output in self._score_unknown(jobs, clock):
                yield index, output
            return
        async for index, result in self._run(jobs, clock):
            assert isinstance(result, ScoreOutput)
            yield index, result

    async def _score_unknown(
        self, jobs: Sequence[ScoreJob], clock: WorkClock
    ) -> AsyncIterator[tuple[int, ScoreOutput]]:
        scope = digest_scope(self.handle.check_ready(), self.settings)
        found = await self._results.find(scope, jobs)
        missing = found.missing
        clock.cached_results += len(jobs) - len(missing)
        self._counters.cache_hits.inc(len(jobs) - len(missing))
        self._counters.cache_misses.inc(sum(entry.key is not None for entry in missing))
        for index, output in found.hits:
            yield index, output
        if not missing:
            return
        computed: list[Computed] = []
        unknown = [jobs[entry.indices[0]] for entry in missing]
        try:
            async for index, result in self._run(unknown, clock):
                assert isinstance(result, ScoreOutput)
                computed.append((missing[index].key, unknown[index], result))
                if len(computed) == KEPT_AT_ONCE:
                    self._results.keep(computed)
                    computed = []
                first, *others = missing[index].indices
                yield first, result
                for other in others:
                    yield other, replace(result, cached_tokens=0)
        finally:
            self._results.keep(computed)

    async def generate(
        self, jobs: Sequence[GenerateJob], clock: WorkClock
    ) -> AsyncIterator[tuple[int, GenerateOutput]]:
        """Index and output of each job, piece by piece where it streams."""
        async for index, output in self._run(jobs, clock):
            assert isinstance(output, GenerateOutput)
            yield index, output

    async def capture(
        self, jobs: Sequence[CaptureJob], clock: WorkClock
    ) -> AsyncIterator[tuple[int, CaptureOutput]]:
        """Index and output of each job as it ends."""
        async for index, output in self._run(jobs, clock):
            assert isinstance(output, CaptureOutput)
            yield index, output

    async def differentiate(
        self, jobs: Sequence[GradientJob], clock: WorkClock
    ) -> AsyncIterator[tuple[int, GradientOutput]]:
        """Index and output of each job as it ends."""
        async for index, output in self._run(jobs, clock):
            assert isinstance(output, GradientOutput)
            yield index, output

    async def check_override(self, job: CheckOverrideJob) -> CheckOverrideOutput:
        """How much of the model a direction moves. Errors: APIError where it does not fit."""
        (output,) = [end.output async for end in self.handle.run([job])]
        assert isinstance(output, CheckOverrideOutput)
        return output

    async def check_adapter(self, job: CheckAdapterJob) -> None:
        """Errors: APIError where the adapter does not fit the model."""
        async for _ in self.handle.run([job]):
            pass

    async def _run(
        self, jobs: Sequence[Job], clock: WorkClock
    ) -> AsyncIterator[tuple[int, Output]]:
        num_tokens = sum(job.num_positions for job in jobs)
        started = time.monotonic()
        with self.admit(num_tokens):
            async for end in self.handle.run(jobs):
                clock.note(end)
                self._count(jobs[end.index], end.output)
                yield end.index, end.output
        speed = num_tokens / max(1e-3, time.monotonic() - started)
        self._tokens_per_s = 0.8 * self._tokens_per_s + 0.2 * speed if self._tokens_per_s else speed

    def _count(self, job: Job, output: Output) -> None:
        if not output.is_last or not len(job.tokens):
            return
        self._counters.prompt_tokens.inc(len(job.tokens))
        self._counters.prefix_cached_tokens.inc(output.cached_tokens)
        self._counters.scored_tokens.inc(job.num_scored)

    def read(self) -> ModelReading:
        """What the model is at right now."""
        return ModelReading(self.id, self._pending_tokens, self.is_ready, self.handle.restarts)

    def describe(self) -> ModelCard:
        """The model as `GET /models` shows it."""
        info, codec = self.handle.info, self._codec
        card = ModelCard(
            id=self.id,
            engine=self.settings.engine,
            state="loading"
            if self.handle.state == "ready" and codec is None
            else self.handle.state,
            detail=self.handle.detail,
            required=self.settings.required,
            restarts=self.handle.restarts,
        )
        if info is not None and codec is not None:
            card.context_length = info.context_length
            card.vocab_size = info.vocab_size
            card.has_chat_template = codec.has_chat_template
            card.columns = list(info.columns)
            card.provenance = self.provenance()
        return card

    def provenance(
        self, protocol: str | None = None, precision: Precision = "float32"
    ) -> Provenance:
        """What computes this model's numbers."""
        codec, info = self.require() if self.is_ready else (self._codec, self.handle.info)
        assert codec is not None and info is not None
        return Provenance(
            engine=self.settings.engine,
            engine_version=info.engine_version,
            model_path=info.model_path,
            weights_digest=info.weights_digest,
            dtype=info.dtype,
            logits_dtype=info.logits_dtype,
            precision=precision,
            tf32=info.tf32,
            quantization=info.quantization,
            tensor_parallel=info.tensor_parallel,
            pipeline_parallel=info.pipeline_parallel,
            batch_invariant=info.batch_invariant,
            vocab_size=info.vocab_size,
            tokenizer_digest=codec.digest,
            protocol=protocol,
        )


class Residents:
    """Every configured model, by id."""

    def __init__(self, settings: Settings, results: ResultCache, metrics: Metrics) -> None:
        limits = SupervisionLimits(
            settings.engine_tokens, settings.ping_timeout_s, settings.max_restarts
        )
        self.by_id = {
            model.id: Resident(
                model,
                EngineHandle(model.to_spec(settings.directory), limits),
                settings.max_pending_tokens,
                results,
                metrics.for_model(model.id),
            )
            for model in settings.models
        }
        metrics.live.read_models = lambda: [model.read() for model in self.by_id.values()]
        self._answer_ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start every engine; returns at once."""
        for resident in self.by_id.values():
            resident.handle.start()
            self._tasks.append(asyncio.create_task(resident.load_codec()))

    async def close(self) -> None:
        """End every engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(resident.handle.close() for resident in self.by_id.values()))

    def find(self, model_id: str | None) -> Resident:
        """The model of that id, or the only one for None.

        Errors: APIError `unknown_model`, or `invalid_request` where None is ambiguous.
        """
        ids = ", ".join(self.by_id)
        if model_id is None:
            if len(self.by_id) == 1:
                return next(iter(self.by_id.values()))
            detail = f"Several models are resident; name one of them as model: {ids}."
            raise api_error("invalid_request", detail, param="model")
        if model_id not in self.by_id:
            detail = f"No model {model_id!r} is resident; these are: {ids}."
            raise api_error("unknown_model", detail, param="model")
        return self.by_id[model_id]
