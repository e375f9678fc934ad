"""`POST /perplexity` and `POST /perplexity/stream`."""

import asyncio
import codecs
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from logsteer.errors import APIError, api_error
from logsteer.schemas import (
    ModelChanges,
    PerplexityAnswer,
    PerplexityRequest,
    PerplexityStreamQuery,
)
from logsteer_server.http.dependencies import (
    LimitedRoute,
    ResidentsDep,
    SettingsDep,
    StoresDep,
    answer,
    check_count,
    describe_answer,
    new_id,
    run_within,
    stream_events,
)
from logsteer_server.http.encoding import encode_event
from logsteer_server.interventions.changes import Changes, Report
from logsteer_server.models.resident import Resident, WorkClock
from logsteer_server.tasks.comparison import Comparison
from logsteer_server.tasks.texts import (
    StreamedText,
    TextScores,
    TextWindow,
    cut_texts,
    sum_tallies,
    summarize_progress,
)

router = APIRouter(route_class=LimitedRoute, tags=["scoring"])


class Run:
    """The scoring of one request's windows, and the documents that report it."""

    def __init__(
        self,
        resident: Resident,
        protocol: str,
        num_texts: int,
        changes: Changes,
        comparison: Comparison | None = None,
        cache: bool = True,
    ) -> None:
        self.resident = resident
        self._changes = changes
        self._report = Report(changes)
        self._cache = cache
        self._comparison = comparison
        self.protocol = protocol
        self.scores = [TextScores() for _ in range(num_texts)]
        self.flags: list[str] = []
        self.windows_done = 0
        self._clock = WorkClock()
        self._id = new_id("perplexity")
        self._usage = {
            "prompt_tokens": 0,
            "scored_tokens": 0,
            "generated_tokens": 0,
            "cached_tokens": 0,
        }

    async def score(
        self, windows: Sequence[TextWindow], keep: bool = False, keep_tokens: bool = False
    ) -> AsyncIterator[dict[str, Any]]:
        """The entry of each window, as `WindowScore`, as it is scored."""
        jobs = [self._changes.change(window.job) for window in windows]
        if not self.windows_done:
            self._changes.check_reach(jobs)
        if self._comparison is not None:
            outputs = self._comparison.score(jobs, self._clock)
        else:
            outputs = self.resident.score(jobs, self._clock, self._cache)
        async for index, output in outputs:
            self._report.add(output)
            window = windows[index]
            score = self.scores[window.text]
            entry = score.add(window, output, keep_tokens)
            if keep:
                score.windows.append(entry)
            self.windows_done += 1
            self._usage["prompt_tokens"] += len(window.job.tokens)
            self._usage["scored_tokens"] += window.num_scored
            self._usage["cached_tokens"] += output.cached_tokens
            yield entry

    def report_start(self) -> bytes:
        """The event that opens a stream."""
        provenance = self.resident.provenance(self.protocol).model_dump()
        document = {"id": self._id, "model": self.resident.id, "provenance": provenance}
        return encode_event("start", document)

    def report_window(self, entry: dict[str, Any], total: int | None) -> bytes:
        """The event of one window."""
        document = {"window": entry, "windows_done": self.windows_done, "windows_total": total}
        return encode_event("window", document | summarize_progress(self.scores))

    def report_result(self, windows: bool = False, tokens: bool = False) -> dict[str, Any]:
        """The whole answer, as `PerplexityAnswer`."""
        results = []
        for score in self.scores:
            result = score.tally.summarize()
            if windows:
                result["windows"] = sorted(score.windows, key=lambda entry: entry["start"])
            if tokens:
                result["tokens"] = score.list_tokens()
            results.append(result)
        total = sum_tallies(self.scores).summarize()
        for document in (*results, total) if self.flags else ():
            document["flags"] = [*document["flags"], *self.flags]  # type: ignore[misc]
        return {
            "id": self._id,
            "model": self.resident.id,
            "results": results,
            "total": total,
            "usage": self._usage | {"cached_results": self._clock.cached_results},
            "timing": self._clock.read(),
            "provenance": self.resident.provenance(self.protocol).model_dump(),
            **self._report.write(),
            "divergence": self._comparison.summarize() if self._comparison else None,
        }


@router.post("/perplexity", responses=describe_answer(PerplexityAnswer))
async def perplexity(
    body: PerplexityRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    stores: StoresDep,
) -> Response:
    """Log-likelihood and perplexity of whole texts, window by window."""
    check_count("texts", len(body.texts), settings.max_items)
    resident = residents.find(body.model)
    comparison = None
    if body.reference is not None:
        comparison = Comparison(
            resident,
            residents.find(body.reference),
            settings.max_reference_bytes,
            settings.scratch_directory,
        )
    codec, info = resident.require()
    changes = await asyncio.to_thread(Changes.resolve, body, stores, info)
    run = Run(resident, body.protocol, len(body.texts), changes, comparison, body.cache)
    if comparison is not None:
        info = replace(info, context_length=comparison.context_length)
    windows, lengths = await asyncio.to_thread(cut_texts, body.texts, body, codec, info)
    for score, length in zip(run.scores, lengths, strict=True):
        score.tally.num_tokens = length
    if body.stream:
        return stream_events(_stream(run, windows, body))
    work = _finish(run, windows, body)
    return answer(request, await run_within(request, settings.request_timeout_s, work))


async def _finish(run: Run, windows: list[TextWindow], body: PerplexityRequest) -> dict[str, Any]:
    async for _ in run.score(windows, body.windows, body.tokens):
        pass
    return run.report_result(body.windows, body.tokens)


async def _stream(
    run: Run, windows: list[TextWindow], body: PerplexityRequest
) -> AsyncIterator[bytes]:
    yield run.report_start()
    try:
        async for entry in run.score(windows, body.windows, body.tokens):
            yield run.report_window(entry, len(windows))
        yield encode_event("result", run.report_result(body.windows, body.tokens))
    except APIError as error:
        yield encode_event("error", error.problem(run._id).model_dump())


@router.post(
    "/perplexity/stream",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"text/plain": {"schema": {"type": "string", "description": "UTF-8"}}},
        }
    },
)
async def perplexity_stream(
    query: Annotated[PerplexityStreamQuery, Query()],
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    stores: StoresDep,
) -> Response:
    """Perplexity of the text in the body, of any length; answers with server-sent events.

    The body is read as fast as it is scored. Events follow once it has been read: windows that are
    still at work then, and the result.
    """
    resident = residents.find(query.model)
    codec, info = resident.require()
    given = ModelChanges(steering=query.steering, override=query.override, adapter=query.adapter)
    changes = await asyncio.to_thread(Changes.resolve, given, stores, info)
    run = Run(resident, query.protocol, 1, changes, cache=query.cache)
    text = StreamedText(query, codec, info)
    waiting: list[TextWindow] = []
    async for piece in _read_text(request, settings.max_stream_bytes):
        waiting += await asyncio.to_thread(text.feed, piece)
        while len(waiting) >= settings.max_windows_in_flight:
            batch = waiting[: settings.max_windows_in_flight]
            del waiting[: settings.max_windows_in_flight]
            async for _ in run.score(batch):
                pass
    waiting += await asyncio.to_thread(text.finish)
    run.scores[0].tally.num_tokens = text.num_tokens
    if not text.num_tokens:
        raise api_error("invalid_request", "The body is empty: send the text as UTF-8.")
    run.flags = text.flags
    return stream_events(_stream_rest(run, waiting))


async def _stream_rest(run: Run, windows: list[TextWindow]) -> AsyncIterator[bytes]:
    yield run.report_start()
    total = run.windows_done + len(windows)
    try:
        async for entry in run.score(windows):
            yield run.report_window(entry, total)
        yield encode_event("result", run.report_result())
    except APIError as error:
        yield encode_event("error", error.problem(run._id).model_dump())


async def _read_text(request: Request, limit: int) -> AsyncIterator[str]:
    """The body as text. Errors: APIError for bytes beyond the limit or that are not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            detail = f"The text is longer than {limit} bytes: split it, or raise max_stream_bytes."
            raise api_error("payload_too_large", detail)
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            detail = (
                f"The body is not UTF-8 near byte {size - len(chunk) + error.start}; send UTF-8."
            )
            raise api_error("invalid_request", detail) from error
        if text:
            yield text
