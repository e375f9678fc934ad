"""A job: rows of a file through an endpoint, in their order, each exactly once.

Chunks of rows are asked for at once, many at a time, and written in their order: those that come
early are held. What is written is committed every `commit_s` seconds. Several servers of one model
share the rows.
"""

import asyncio
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing, suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import httpx

from logsteer._calls import ApiCall, Download
from logsteer._exchange import RetryPolicy
from logsteer._progress import CountingProgress
from logsteer.async_client import AsyncClient
from logsteer.corpus.answers import (
    Ask,
    FileScores,
    ScoredChunk,
    describe_difference,
    score_chunk,
    sum_up,
)
from logsteer.corpus.record import JobRecord, Record, check_target, place
from logsteer.corpus.rows import RowForm
from logsteer.errors import (
    LogsteerError,
    OverloadedError,
    RequestTimeoutError,
    TransportError,
    UnavailableError,
)
from logsteer.extras.files import Chunk, RowFile, find_format
from logsteer.extras.sampling import run_anywhere

CHUNKS_AHEAD = 2
"""Chunks that are begun for each request that may be under way."""


@dataclass(frozen=True)
class JobLimits:
    """Bounds of a job.

    `batch_size` and `batch_bytes`: rows of one request, and their bytes. `concurrency`: concurrent
    requests to each server, at most; twice as many wait in memory. `commit_s`: seconds of work that
    an interruption may lose. `patience_s`: seconds without an answer after which the job ends.
    `max_failures`: failed rows in a row after which it ends; 0: no limit.
    """

    batch_size: int = 256
    batch_bytes: int = 2**18
    concurrency: int = 16
    commit_s: float = 1.0
    patience_s: float = 600.0
    max_failures: int = 1000

    def __post_init__(self) -> None:
        for name in ("batch_size", "batch_bytes", "concurrency"):
            if getattr(self, name) < 1:
                raise LogsteerError(f"{name} is {getattr(self, name)}; give 1 at least")


class FileJob:
    """A job between its beginning and its end, however its chunks are scored.

    `chunks` yields what is left; `write` is given each with its lines, in their order; `finish`
    makes the file. Errors: LogsteerError for a file that cannot be read, that has changed, or that
    another job writes.
    """

    def __init__(
        self,
        form: RowForm,
        source: str | Path,
        target: str | Path,
        limits: JobLimits,
        *,
        strict: bool = False,
        restart: bool = False,
        progress: bool = True,
    ) -> None:
        self.form, self.limits = form, limits
        self.target = Path(target)
        check_target(self.target)
        self._strict = strict
        self._began = self._committed_at = time.monotonic()
        self._digest: Any = None
        self._commit: Future[None] = Future()
        self._commit.set_result(None)
        with ExitStack() as opened:
            self.source = opened.enter_context(RowFile(Path(source), form.columns))
            header = {
                "input": {"bytes": self.source.file_bytes, "format": self.source.format},
                "output": find_format(self.target),
                "model": form.model,
                **form.describe(),
            }
            self.record = opened.enter_context(closing(JobRecord(self.target, header, restart)))
            last = self.record.last
            self._before, self._bytes = last.seconds, last.bytes
            self.tally = deepcopy(last.tally)
            self.tally.failed_at_end = 0
            self.resumed = last.rows
            if not self.is_done:
                self._pass_finished()
            self._thread = opened.enter_context(ThreadPoolExecutor(1, "logsteer-commit"))
            bar = CountingProgress("", self.source.size, 0, progress and not self.is_done)
            self._bar = opened.enter_context(bar)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        with self._opened:
            if not self.is_done and not self.record.last.is_whole:
                self.commit()

    @property
    def is_done(self) -> bool:
        """Whether an earlier run has finished all of it."""
        return self.record.done is not None or self.record.is_placed

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows that are left, in chunks."""
        if self.record.last.is_whole or self.is_done:
            return iter(())
        return self.source.cut(self.tally.rows, self.limits.batch_size, self.limits.batch_bytes)

    def write(self, scored: ScoredChunk) -> None:
        """Write the lines of the next chunk.

        Errors: OSError; LogsteerError for another model than before, and where it is to end.
        """
        if self._strict and scored.first_error is not None:
            raise LogsteerError(_describe_failure(*scored.first_error))
        known = self.record.identity
        if known is None:
            self.record.identity = scored.identity
        elif scored.identity not in (None, known):
            told = describe_difference(known, scored.identity)
            raise LogsteerError(f"{told}: continue with that one, or --restart")
        lines = scored.lines
        self.record.write(lines)
        self._bytes += len(lines)
        self._digest.update(b"\n".join(scored.chunk.rows) + b"\n")
        self.tally.add(scored)
        failed = f"  {self.tally.failed:,} failed" if self.tally.failed else ""
        rate = self.tally.tokens / max(1e-3, self.seconds)
        note = f"{self.tally.rows:,} rows  {rate:,.0f} tokens/s{failed}"
        self._bar.show(scored.chunk.place, note)
        most = self.limits.max_failures
        if most and self.tally.failed_at_end >= most and scored.first_error is not None:
            raise LogsteerError(
                f"{self.tally.failed_at_end} rows in a row have failed, and the job ends here "
                f"(max_failures); the last: {_describe_failure(*scored.first_error)}"
            )

    def commit(self, *, wait: bool = True, is_whole: bool = False) -> None:
        """Have what was written on the disk; without `wait` in a thread, every `commit_s`.

        Errors: OSError, of the last commit too: none may follow one that failed.
        """
        is_due = time.monotonic() - self._committed_at > self.limits.commit_s
        if not wait and not (is_due and self._commit.done()):
            return
        self._commit.result()
        record = Record(
            self.tally.rows, self._bytes, self._digest.hexdigest(), self.seconds,
            deepcopy(self.tally), is_whole,
        )  # fmt: skip
        self._commit = self._thread.submit(self.record.commit, record)
        self._committed_at = time.monotonic()
        if wait:
            self._commit.result()

    @property
    def seconds(self) -> float:
        """Seconds that this run and those before have taken."""
        return self._before + time.monotonic() - self._began

    def finish(self, **told: Any) -> FileScores:
        """Make the file of the lines, and return what there is to say of it."""
        if self.record.done is not None:
            return FileScores.model_validate(self.record.done)
        if not self.record.is_placed:
            if not self.record.last.is_whole:
                self.commit(is_whole=True)
            place(self.record.part_path, self.target)
        self.record.is_placed = True
        scores = sum_up(self.form, self.tally, self.record.identity, self.seconds)
        scores = scores.model_copy(update={"resumed_rows": self.resumed, **told})
        self.record.finish(scores.model_dump(mode="json"))
        return scores

    def _pass_finished(self) -> None:
        """Read the rows that are finished, and make sure that they are the same."""
        last = self.record.last
        self._digest = self.source.skip(last.rows)
        if last.rows and self._digest.hexdigest() != last.sha256:
            raise LogsteerError(
                f"{self.source.path} has changed: rows 0 to {last.rows - 1} are not the rows that "
                "were scored. --restart begins again"
            )


def _describe_failure(row: int, error: Mapping[str, Any]) -> str:
    return f"row {row}: {error['code']}: {error['detail']}"


async def run_chunks(job: FileJob, ask: Ask, limit: Callable[[], int]) -> None:
    """Score a job's chunks, as many at once as `limit` says, and write them in their order.

    Errors: the first chunk's that failed, once the chunks before it are written.
    """
    begun: deque[asyncio.Task[ScoredChunk]] = deque()
    chunks = job.chunks()
    try:
        while True:
            for chunk in islice(chunks, max(0, CHUNKS_AHEAD * limit() - len(begun))):
                begun.append(asyncio.create_task(score_chunk(job.form, chunk, ask)))
            if not begun:
                return
            job.write(await begun[0])
            begun.popleft()
            job.commit(wait=False)
    finally:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


LONGEST_PAUSE_S = 60.0
_PAUSES = RetryPolicy(max_retries=sys.maxsize, longest_wait=math.inf)
MAX_TIMEOUTS = 3
"""Timeouts of one request after which it counts as too much for the time."""


class FleetServer:
    """One server: its client, how many requests at once it is given, and when it is asked again.

    One that refuses for want of room gets half as many; of what it answers it gets more.
    """

    def __init__(self, client: AsyncClient, most: int) -> None:
        self.client = client
        self.limit = self._most = most
        self.in_flight = 0
        self.free_at = 0.0
        self._failures = self._answers = 0

    def record_answer(self) -> None:
        """Record that it answered."""
        self._failures = 0
        self._answers += 1
        if self._answers >= self.limit:
            self.limit, self._answers = min(self._most, self.limit + 1), 0

    def record_failure(self, error: LogsteerError) -> None:
        """Leave it alone for a while, as long as it says; once for all that it has now."""
        now = time.monotonic()
        if now < self.free_at:
            return
        pause = _PAUSES.pause(self._failures, getattr(error, "retry_after", None))
        self.free_at = now + min(pause or 0.0, LONGEST_PAUSE_S)
        self._failures += 1
        if isinstance(error, OverloadedError):
            self.limit, self._answers = max(1, self.limit // 2), 0


class Fleet:
    """Several servers of one model, or one.

    `patience_s` is how long nothing at all may be answered before that is an error. `retries`
    counts calls that were made again.
    """

    def __init__(self, servers: Sequence[FleetServer], patience_s: float) -> None:
        self._servers = servers
        self._patience_s = patience_s
        self._changed = asyncio.Condition()
        self._failing_since: float | None = None
        self.retries = 0

    @property
    def limit(self) -> int:
        """Requests that may be under way at once."""
        return sum(server.limit for server in self._servers)

    async def ask(self, call: ApiCall[Download]) -> bytes:
        """Send a call to a server with room; return what it answered.

        What may pass is tried again, by any server. Errors: of the last try once nothing was
        answered for `patience_s`, and what will not pass.
        """
        timeouts = 0
        while True:
            server = await self._acquire()
            try:
                answer = await server.client._answer(call)
            except (TransportError, OverloadedError, UnavailableError) as error:
                server.record_failure(error)
                self.retries += 1
                timeouts += isinstance(error, RequestTimeoutError)
                self._failing_since = self._failing_since or time.monotonic()
                waited = time.monotonic() - self._failing_since
                if timeouts == MAX_TIMEOUTS or waited > self._patience_s:
                    raise
            else:
                server.record_answer()
                self._failing_since = None
                return answer.data
            finally:
                server.in_flight -= 1
                async with self._changed:
                    self._changed.notify_all()

    async def _acquire(self) -> FleetServer:
        """Wait for a server with room, and take up room of it."""
        async with self._changed:
            while True:
                now = time.monotonic()
                room = [one for one in self._servers if one.in_flight < one.limit]
                free = [one for one in room if one.free_at <= now]
                if free:
                    server = min(free, key=lambda one: one.in_flight / one.limit)
                    server.in_flight += 1
                    return server
                pause = min((one.free_at for one in room), default=now + LONGEST_PAUSE_S) - now
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), pause)


def score_file(
    source: str | Path,
    target: str | Path,
    endpoint: str = "logprob",
    *,
    options: Mapping[str, Any] | None = None,
    fields: Mapping[str, str] | None = None,
    id_column: str | None = None,
    targets: Sequence[str] = (),
    base_url: str | Sequence[str] | None = None,
    api_key: str | None = None,
    model: str | None = None,
    timeout: float | httpx.Timeout | None = None,
    limits: JobLimits | None = None,
    strict: bool = False,
    restart: bool = False,
    priority: Literal["batch", "interactive"] = "batch",
    progress: bool = True,
    transport: Callable[[str], httpx.AsyncBaseTransport] | None = None,
) -> FileScores:
    """Send every row of a file to an endpoint, write a line for each, and return a summary.

    The target has one row for each of the source, in the same order: its number from 0, and its
    `result`, or the `error` if it was refused. A call with the same arguments resumes where
    an earlier one ended; once all is done it returns the summary again.

    Args:
        source: JSON lines (`.jsonl`, `.jsonl.gz`) or `.parquet`.
        target: the JSON lines to write; `.part` and `.job` are beside it while the job runs.
        endpoint: logprob, diagnostics, gradient, perplexity, generate or steer.
        options: of the requests, the same for all rows. Row k of `generate` and `steer` has the
            seed `seed` + k n, where `seed` is 0 unless given.
        fields: field of an item -> column that holds it: {"context": "question"}.
        id_column: column to copy to each result as `id`.
        targets: for rows without any.
        base_url: one server, or several with the same model.
        api_key: as `Client` has it.
        model: as `Client` has it.
        timeout: as `Client` has it.
        limits: of requests and memory.
        strict: whether the first failed row ends the job.
        restart: whether to start over, whatever is there.
        priority: of the requests; `batch` lets others pass.
        progress: whether a terminal shows a bar.
        transport: makes the transport to a server of this address, instead of the network.

    Errors: LogsteerError and its kinds, OSError. What was finished until then is kept.

    """
    limits = limits or JobLimits()
    form = RowForm(endpoint, options or {}, model, fields or {}, id_column, targets)
    urls = [base_url] if base_url is None or isinstance(base_url, str) else base_url

    def connect(url: str | None) -> FleetServer:
        own = None if transport is None else transport(url or "")
        client = AsyncClient(url, api_key=api_key, timeout=timeout, max_retries=0, transport=own)
        client._http.headers["X-Priority"] = priority
        return FleetServer(client, limits.concurrency)

    async def run() -> FileScores:
        async with AsyncExitStack() as stack:
            servers = [connect(url) for url in urls]
            for server in servers:
                stack.push_async_callback(server.client.aclose)
            fleet = Fleet(servers, limits.patience_s)
            with FileJob(
                form, source, target, limits, strict=strict, restart=restart, progress=progress
            ) as job:
                await run_chunks(job, fleet.ask, lambda: fleet.limit)
                return job.finish(retries=fleet.retries)

    return run_anywhere(run())
