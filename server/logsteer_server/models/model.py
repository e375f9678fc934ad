"""A resident model: its engine, tokenizer, work budget and cached results."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from logsteer.errors import api_error
from logsteer.schemas import ModelCard, ModelState, Precision, Provenance
from logsteer.schemas.perplexity import WindowOptions
from logsteer_server.contract.batches import (
    OutputPart,
    change_all,
    pack_jobs,
    select_jobs,
    sum_expected,
)
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Job, Output, Routing
from logsteer_server.contract.plan import Cast
from logsteer_server.imports import import_tokenizers
from logsteer_server.models.admission import Admission
from logsteer_server.models.cache import Computed, MissingJob, ResultCache, digest_scope
from logsteer_server.observation.metrics import ModelMetrics, ModelReading
from logsteer_server.runtime.handle import EngineHandle
from logsteer_server.settings import ModelSettings
from logsteer_server.text.tokenizer import TextCodec

log = logging.getLogger(__name__)

CLOSED_RETRY_S = 5.0
"""Retry-After for a model that is drained, replaced or unloaded."""
STORED_AT_ONCE = 1024
"""Results stored in the cache at a time, so that a long call does not hold all of them."""


def name_model(path: str) -> str:
    """Return a model's id on the hub, or the last name of its directory on this machine."""
    return Path(path).name if Path(path).is_absolute() else path


@dataclass(frozen=True, slots=True)
class PreparedJobs:
    """The jobs of a call after the cache lookup: cached results, and jobs to compute.

    `num_tokens`: expected context positions of the jobs to compute. `missing`: where each of these
    belongs; None without a lookup. `num_known`: jobs that skip the engine, cached ones and
    repetitions within the call.
    """

    jobs: Sequence[Job]
    num_tokens: int
    hits: Sequence[tuple[int, Output]] = ()
    missing: Sequence[MissingJob] | None = None
    num_known: int = 0


def _repeat(entries: Sequence[MissingJob], part: OutputPart) -> Iterator[OutputPart]:
    """Yield the outputs of missing jobs, at every index of the call that has them."""
    yield part._replace(indices=[indices[0] for _, indices in entries])
    for n, (_, indices) in enumerate(entries):
        if others := indices[1:]:
            output = replace(part.outputs[n], cached_tokens=0)
            yield OutputPart(others, [output] * len(others))


class ResidentModel:
    """One configured model."""

    def __init__(
        self,
        settings: ModelSettings,
        handle: EngineHandle,
        admission: Admission,
        results: ResultCache,
        metrics: ModelMetrics,
    ) -> None:
        self.id = settings.id
        """The id under which requests name this model."""
        self.settings = settings
        self.handle = handle
        self.admission = admission
        self._results = results
        self.metrics = metrics
        self._codec: TextCodec | None = None
        self._fault: str | None = None
        self._scope: tuple[EngineInfo, ModelSettings, bytes] | None = None
        """Arguments and value of the latest key prefix of results."""
        self.closed: tuple[ModelState, str] | None = None
        """State and detail of a model that is drained or unloaded."""
        self.note = ""
        """A remark added to the detail."""
        self._num_checks = 0
        self.num_resets = 0
        """How often its prefix cache was reset; what is kept counts until the next time."""

    @property
    def num_running(self) -> int:
        """Running requests."""
        return self.admission.num_open + self._num_checks

    def restart_with(self, handle: EngineHandle) -> None:
        """Replace the closed engine with another, which is not ready yet."""
        self.handle = handle
        self.closed = self._fault = self._codec = None

    async def load_codec(self) -> None:
        """Load the tokenizer when the engine is ready; a failure shows in the model's state."""
        await asyncio.to_thread(import_tokenizers)
        await self.handle.ready.wait()
        assert self.handle.info is not None
        try:
            self._codec = await asyncio.to_thread(TextCodec.load, self.handle.info.tokenizer_path)
        except Exception as error:  # a tokenizer's own code may raise anything
            log.exception("the tokenizer of model %s did not load", self.id)
            self._fault = f"its tokenizer did not load: {error}"

    @property
    def status(self) -> tuple[ModelState, str]:
        """State and detail: the engine's, then the tokenizer's."""
        if self.closed is not None:
            return self.closed
        if self._fault is not None:
            return "failed", self._fault
        state, detail = self.handle.state, self.handle.detail
        return ("loading" if state == "ready" and self._codec is None else state), detail

    @property
    def is_ready(self) -> bool:
        """Whether requests can be answered."""
        return self.status[0] == "ready"

    def require(self) -> tuple[TextCodec, EngineInfo]:
        """Return tokenizer and engine. Errors: APIError if the model does not answer now."""
        if self.closed is not None:
            detail = f"Model {self.id} takes no requests: {self.closed[1]}. Try again later."
            raise api_error("model_loading", detail, retry_after=CLOSED_RETRY_S)
        if self._fault is not None:
            detail = f"Model {self.id} failed: {self._fault}. See the server's log."
            raise api_error("internal", detail)
        info = self.handle.check_ready()
        if self._codec is None:
            detail = f"The tokenizer of model {self.id} is still loading; try again shortly."
            raise api_error("model_loading", detail, retry_after=2)
        return self._codec, info

    async def prepare(
        self, jobs: Sequence[Job], cache: bool, routing: Routing | None = None
    ) -> PreparedJobs:
        """Look jobs up in the result cache, if `cache` allows it; merge equal jobs."""
        jobs = pack_jobs(jobs)
        namespace = "" if routing is None else routing.cache_namespace
        namespace += f"#{self.num_resets}" if self.num_resets else ""
        if namespace:
            jobs = change_all(jobs, partial(replace, cache_namespace=namespace))
        if not (cache and self._results.is_on):
            return PreparedJobs(jobs, sum_expected(jobs))
        found = await self._results.find(self._find_scope(), jobs)
        missing = found.missing
        unknown = select_jobs(jobs, np.array([own[0] for _, own in missing], np.int64))
        num_known = len(jobs) - len(missing)
        self.metrics.cache_hits.inc(num_known)
        self.metrics.cache_misses.inc(sum(isinstance(key, bytes) for key, _ in missing))
        return PreparedJobs(unknown, sum_expected(unknown), found.hits, missing, num_known)

    def _find_scope(self) -> bytes:
        """Return `digest_scope` of the running engine. Errors: APIError if none is ready."""
        info, settings, known = self.handle.check_ready(), self.settings, self._scope
        if known is None or known[0] is not info or known[1] is not settings:
            known = self._scope = info, settings, digest_scope(info, settings)
        return known[2]

    async def run(
        self, prepared: PreparedJobs, routing: Routing | None = None
    ) -> AsyncGenerator[OutputPart, None]:
        """Yield indices and outputs of jobs as they end, in pieces if they stream.

        `routing` is the one that the jobs were prepared with. Cached results come first; new ones
        are stored in the cache. Leaving the loop early cancels the rest. Errors: as
        `EngineHandle.run`.
        """
        if prepared.hits:
            yield OutputPart([n for n, _ in prepared.hits], [output for _, output in prepared.hits])
        if not prepared.jobs:
            return
        started = time.monotonic()
        computed: list[Computed] = []
        try:
            async with aclosing(self.handle.run(prepared.jobs, routing)) as parts:
                async for numbers, results, taken_at in parts:
                    part = OutputPart(numbers, cast(Sequence[Output], results), taken_at)
                    if prepared.missing is None:
                        yield part
                        continue
                    entries = [prepared.missing[index] for index in part.indices]
                    computed.append((entries, part.outputs))
                    if sum(len(own) for own, _ in computed) >= STORED_AT_ONCE:
                        self._results.keep(computed)
                        computed = []
                    for again in _repeat(entries, part):
                        yield again
            self.admission.record_speed(prepared.num_tokens, time.monotonic() - started)
        finally:
            if computed:
                self._results.keep(computed)

    async def check(self, job: Job) -> Output:
        """Run one job that reads no tokens. Errors: APIError if it fails."""
        self._num_checks += 1
        try:
            (output,) = [output async for part in self.handle.run([job]) for output in part.results]
        finally:
            self._num_checks -= 1
        return cast(Output, output)

    def read(self) -> ModelReading:
        """Take a reading of the model, for metrics."""
        admission = self.admission
        engines = self.handle.observe()
        return ModelReading(self.id, admission.pending, admission.limit, self.is_ready, engines)

    def describe(self) -> ModelCard:
        """Return the model's card."""
        info, codec = self.handle.info, self._codec
        state, detail = self.status
        known: dict[str, Any] = {}
        if info is not None and codec is not None:
            known = {
                "context_length": info.context_length,
                "vocab_size": info.vocab_size,
                "num_layers": info.num_layers,
                "hidden_size": info.hidden_size,
                "hooks": list(info.hooks),
                "has_chat_template": codec.has_chat_template,
                "columns": list(info.columns),
                "lacks": {str(feature): reason for feature, reason in info.lacks.items()},
                "rounding": info.rounding,
                "provenance": self.provenance(),
            }
        return ModelCard(
            id=self.id,
            engine=self.settings.engine,
            state=state,
            detail=f"{detail}; {self.note}" if self.note else detail,
            required=self.settings.required,
            restarts=self.handle.restarts,
            replicas=list(self.handle.read()),
            **known,
        )

    def provenance(
        self,
        windowing: WindowOptions | None = None,
        precision: Precision = "float32",
        cast: Cast | None = None,
    ) -> Provenance:
        """Return what computes this model's numbers, with the windows of a text and the dtype of an
        override, if any.
        """
        codec, info = self._codec, self.handle.info
        assert codec is not None and info is not None
        return Provenance(
            engine=self.settings.engine,
            engine_version=info.engine_version,
            model_path=name_model(info.model_path),
            weights_digest=info.weights_digest,
            dtype=info.dtype,
            logits_dtype=info.logits_dtype,
            precision=precision,
            cast=cast,
            tf32=info.tf32,
            quantization=info.quantization,
            dequantised_from=info.dequantised_from,
            int8_products=info.int8_products,
            device=info.device,
            tensor_parallel=info.tensor_parallel,
            pipeline_parallel=info.pipeline_parallel,
            batch_invariant=info.batch_invariant,
            vocab_size=info.vocab_size,
            tokenizer_digest=codec.digest,
            protocol=windowing and windowing.protocol,
            context_length=windowing and windowing.context_length,
            stride=windowing and windowing.stride,
            rows=windowing and windowing.rows,
        )
