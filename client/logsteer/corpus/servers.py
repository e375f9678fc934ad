"""A job over one server, or several: who is asked next, how much at once, who is left alone."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx

from logsteer._calls import ApiCall, Download
from logsteer.async_client import AsyncClient
from logsteer.corpus.answers import FileScores
from logsteer.corpus.form import RowForm
from logsteer.corpus.job import FileJob, JobLimits, run_chunks
from logsteer.errors import (
    LogsteerError,
    OverloadedError,
    RequestTimeoutError,
    TransportError,
    UnavailableError,
)

LONGEST_PAUSE_S = 60.0
FIRST_PAUSE_S = 0.5
LONGEST_OWN_PAUSE_S = 8.0
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
        pause = getattr(error, "retry_after", None)
        if pause is None:
            longest = min(FIRST_PAUSE_S * 2.0**self._failures, LONGEST_OWN_PAUSE_S)
            pause = longest * (1 - 0.5 * random.random())  # noqa: S311
        self.free_at = now + min(pause, LONGEST_PAUSE_S)
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
    urls = [base_url] if base_url is None or isinstance(base_url, str) else list(base_url)
    settings = {"api_key": api_key, "timeout": timeout, "max_retries": 0}
    clients = [partial(_connect, url, priority, transport, **settings) for url in urls]
    switches = {"strict": strict, "restart": restart, "progress": progress}
    make_job = partial(FileJob, form, source, target, limits, **switches)
    return _run_anywhere(_run(make_job, clients, limits))


def _connect(
    url: str | None,
    priority: str,
    transport: Callable[[str], httpx.AsyncBaseTransport] | None,
    **settings: Any,
) -> AsyncClient:
    own = None if transport is None else transport(url or "")
    client = AsyncClient(url, transport=own, **settings)
    client._http.headers["X-Priority"] = priority
    return client


async def _run(
    make_job: Callable[[], FileJob],
    clients: Sequence[Callable[[], AsyncClient]],
    limits: JobLimits,
) -> FileScores:
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(connect()) for connect in clients]
        servers = [FleetServer(client, limits.concurrency) for client in opened]
        fleet = Fleet(servers, limits.patience_s)
        with make_job() as job:
            await run_chunks(job, fleet.ask, lambda: fleet.limit)
            return job.finish(retries=fleet.retries)


def _run_anywhere(work: Coroutine[Any, Any, FileScores]) -> FileScores:
    """Run a coroutine to its end, in a thread where an event loop runs already, as in a notebook.

    Errors: those of the coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "logsteer-score-file") as pool:
        return pool.submit(asyncio.run, work).result()
