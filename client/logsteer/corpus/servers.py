"""A job over one server, or several: who is asked next, how much at once, who is left alone."""

import asyncio
import heapq
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
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

FIRST_LIMIT = 8
GAIN = 1.1
"""How much faster rows are answered where twice as many requests at once are worth it."""
EPOCHS_BETWEEN = 16
"""Epochs after which it is tried again whether more at once is faster."""
LONGEST_PAUSE_S = 60.0
FIRST_PAUSE_S = 0.5
LONGEST_OWN_PAUSE_S = 8.0
MAX_TIMEOUTS = 3
"""Timeouts of one request after which it counts as too much for the time."""


class Pace:
    """How many requests at once a server is given.

    Twice as many are tried for an epoch, two answers for each of them; they stay if rows came
    faster, by GAIN, than before. A server that refuses for want of room gets half as many.
    """

    def __init__(self, most: int) -> None:
        self.limit = min(FIRST_LIMIT, most)
        self._most = most
        self._before = self.limit
        self._best = 0.0
        self._tries = True
        self._epochs = 0
        self._rows = self._count = 0
        self._began: float | None = None

    def record(self, rows: int, now: float) -> None:
        """Record that a request with so many rows was answered."""
        if self._began is None:
            self._began = now
            return
        self._rows += rows
        self._count += 1
        if self._count < 2 * self.limit:
            return
        rate = self._rows / max(1e-6, now - self._began)
        self._begin(now)
        if not self._tries:
            self._best = rate
            self._epochs += 1
            if self._epochs == EPOCHS_BETWEEN:
                self._try_more()
        elif rate > GAIN * self._best:
            self._best = rate
            self._try_more()
        else:
            self._tries, self._epochs, self.limit = False, 0, self._before

    def slow_down(self) -> None:
        """Give the server half as many."""
        self.limit = self._before = max(1, self.limit // 2)
        self._tries, self._epochs = False, 0
        self._begin(None)

    def start_anew(self) -> None:
        """Give a server that did not answer one request, and more as it answers."""
        self.limit = self._before = 1
        self._best, self._tries = 0.0, True
        self._begin(None)

    def _try_more(self) -> None:
        self._tries, self._before = True, self.limit
        self.limit = min(self._most, 2 * self.limit)

    def _begin(self, now: float | None) -> None:
        self._rows = self._count = 0
        self._began = now


class FleetServer:
    """One server: its client, what it has now, and until when it is left alone."""

    def __init__(self, client: AsyncClient, most: int) -> None:
        self.client = client
        self.pace = Pace(most)
        self.in_flight = 0
        self.free_at = 0.0
        self._failures = 0

    def record_answer(self, rows: int) -> None:
        """Record that it answered."""
        self._failures = 0
        self.pace.record(rows, time.monotonic())

    def record_failure(self, error: LogsteerError) -> None:
        """Leave it alone for a while, as long as it says; once for all that it has now."""
        now = time.monotonic()
        if now < self.free_at:
            return
        after = getattr(error, "retry_after", None)
        longest = min(FIRST_PAUSE_S * 2.0**self._failures, LONGEST_OWN_PAUSE_S)
        pause = longest * (1 - 0.5 * random.random()) if after is None else after  # noqa: S311
        self.free_at = now + min(pause, LONGEST_PAUSE_S)
        self._failures += 1
        if isinstance(error, OverloadedError):
            self.pace.slow_down()
        else:
            self.pace.start_anew()


class Fleet:
    """Several servers of one model, or one. Calls of earlier rows go first.

    `patience_s` is how long nothing at all may be answered before that is an error. `retries`
    counts calls that were made again.
    """

    def __init__(self, servers: Sequence[FleetServer], patience_s: float) -> None:
        self._servers = servers
        self._patience_s = patience_s
        self._waiting: list[tuple[int, int, asyncio.Future[FleetServer]]] = []
        self._numbers = itertools.count()
        self._failing_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.retries = 0

    @property
    def limit(self) -> int:
        """Requests that may be under way at once."""
        return sum(server.pace.limit for server in self._servers)

    async def ask(self, first: int, rows: int, call: ApiCall[Download]) -> bytes:
        """Send a call to a server with room; return what it answered.

        What may pass is tried again, by any server. Errors: of the last try once nothing was
        answered for `patience_s`, and what will not pass.
        """
        timeouts = 0
        while True:
            server = await self._acquire(first)
            try:
                answer = await server.client._answer(call)
            except (TransportError, OverloadedError, UnavailableError) as error:
                server.record_failure(error)
                self.retries += 1
                timeouts += isinstance(error, RequestTimeoutError)
                if timeouts == MAX_TIMEOUTS or self._has_no_patience():
                    raise
            else:
                server.record_answer(rows)
                self._failing_since = None
                return answer.data
            finally:
                server.in_flight -= 1
                self._wake()

    def _has_no_patience(self) -> bool:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        return now - self._failing_since > self._patience_s

    async def _acquire(self, first: int) -> FleetServer:
        """Wait for a server with room, and take up room of it."""
        future: asyncio.Future[FleetServer] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (first, next(self._numbers), future))
        self._wake()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().in_flight -= 1
                self._wake()
            raise

    def _wake(self) -> None:
        """Give servers with room to those who wait, the earliest row first."""
        while self._waiting:
            if self._waiting[0][2].done():
                heapq.heappop(self._waiting)
                continue
            now = time.monotonic()
            open_ones = [s for s in self._servers if s.in_flight < s.pace.limit]
            free = [s for s in open_ones if s.free_at <= now]
            if not free:
                if open_ones:
                    self._wake_at(min(s.free_at for s in open_ones) - now)
                return
            server = min(free, key=lambda s: s.in_flight / s.pace.limit)
            server.in_flight += 1
            heapq.heappop(self._waiting)[2].set_result(server)

    def _wake_at(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._wake)


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
    `result` or the `error` that it was refused with. A call with the same arguments goes on where
    an earlier one ended; once all is done it returns the summary again.

    Args:
        source: JSON lines (`.jsonl`, `.jsonl.gz`, `.jsonl.zst`) or `.parquet`.
        target: likewise; beside it `.part` and `.job` are kept while the job is under way.
        endpoint: logprob, diagnostics, gradient, perplexity, generate or steer.
        options: of its requests, the same for all rows. Row k of `generate` and `steer` has the
            seed `seed` + k n, where `seed` is 0 unless given.
        fields: field of an item -> column that holds it: {"context": "question"}.
        id_column: column that is given again as `id`.
        targets: those of rows that have none.
        base_url: one server, or several with the same model.
        api_key: as `Client` has it.
        model: as `Client` has it.
        timeout: as `Client` has it.
        limits: of requests and memory.
        strict: whether the first failed row ends the job.
        restart: whether to begin anew, whatever is there.
        priority: of the requests; `batch` waits behind those of others.
        progress: whether a terminal shows a bar.
        transport: makes what replaces the network to a server of this address.

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
