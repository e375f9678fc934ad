"""A job over one server, or several of the same model."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx

from logsteer.async_client import AsyncClient
from logsteer.corpus.fleet import Fleet, FleetServer
from logsteer.corpus.form import RowForm
from logsteer.corpus.job import FileJob, JobLimits, run_chunks
from logsteer.corpus.summary import FileScores


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
