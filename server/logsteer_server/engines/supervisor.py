"""Engine processes, as the HTTP process sees them: start, jobs, health, restart."""

import asyncio
import itertools
import logging
import multiprocessing
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from logsteer.errors import APIError, api_error
from logsteer.schemas import ModelState
from logsteer_server.contract.engine import EngineInfo, EngineSpec
from logsteer_server.contract.jobs import Job, JobResult, Output
from logsteer_server.contract.lane import Lane
from logsteer_server.engines.process import (
    Add,
    Cancel,
    Close,
    Failed,
    Finished,
    FromEngine,
    Ping,
    Pong,
    Ready,
    ToEngine,
    run_engine,
)
from logsteer_server.engines.queue import FairQueue
from logsteer_server.engines.turns import EngineCall

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class TimedOutput:
    """A result of one job of a call: its index, the output, and when the engine took the job."""

    index: int
    output: Output
    taken_at: float


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """How an engine process is fed and watched."""

    engine_tokens: int = 65_536
    ping_timeout_s: float = 30.0
    max_restarts: int = 5
    restart_delay_s: float = 1.0


@dataclass(eq=False)
class _Waiter:
    """Where the results of one call go."""

    call: EngineCall
    results: asyncio.Queue[Sequence[tuple[int, JobResult, float]] | APIError] = field(
        default_factory=asyncio.Queue
    )


class _Process:
    """Run one engine process, with the threads that send to it and receive from it.

    Both directions have a thread of their own, because a pipe blocks when its reader is busy, and
    the event loop must not.
    """

    def __init__(self, spec: EngineSpec, receive: Callable[..., None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self.process = context.Process(
            target=run_engine, args=(remote, spec), name=f"engine-{spec.id}"
        )
        self.process.start()
        remote.close()
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._receive = receive
        self._threads = [
            threading.Thread(target=work, name=f"{spec.id}-{work.__name__}", daemon=True)
            for work in (self._send_all, self._receive_all)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: ToEngine) -> None:
        """Queue a message for the engine."""
        self._outbox.put(message)

    def _send_all(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return  # the process is gone; _receive_all reports it

    def _receive_all(self) -> None:
        while True:
            try:
                message: FromEngine | None = self._connection.recv()
            except (EOFError, OSError):
                message = None
            self._receive(self, message)
            if message is None:
                return

    def close(self) -> None:
        """End the process: by asking, then by force. Blocks for up to CLOSE_TIMEOUT_S."""
        self.send(Close())
        self._outbox.put(None)
        self.process.join(CLOSE_TIMEOUT_S)
        for end in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                end()
                self.process.join(5)
        self._connection.close()


class EngineHandle:
    """Run jobs on a resident model, and restart its process when that dies."""

    def __init__(
        self,
        spec: EngineSpec,
        limits: SupervisionLimits | None = None,
    ) -> None:
        self.spec = spec
        self.state: ModelState = "loading"
        self.detail = "starting"
        self.info: EngineInfo | None = None
        self.restarts = 0
        self.ready = asyncio.Event()
        self._limits = limits or SupervisionLimits()
        self._queue = FairQueue(self._limits.engine_tokens)
        self._waiters: dict[int, _Waiter] = {}
        self._ids = itertools.count()
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._process: _Process | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False

    def start(self) -> None:
        """Start the engine's process; call it from the event loop that will use the handle."""
        self._loop = asyncio.get_running_loop()
        loop = self._loop

        def receive(process: _Process, message: FromEngine | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._receive, process, message)

        self._process = _Process(self.spec, receive)

    async def close(self) -> None:
        """End the process; calls that still wait get an error."""
        self._closing = True
        self._fail_all(api_error("engine_restarting", "The server is shutting down; try later."))
        if self._process is not None:
            await asyncio.to_thread(self._process.close)

    def check_ready(self) -> EngineInfo:
        """Return what the engine is. Errors: APIError `model_loading` or `engine_restarting`."""
        if self.state == "ready" and self.info is not None:
            return self.info
        if self.state == "loading":
            detail = f"Model {self.spec.id} is still loading ({self.detail}); try again shortly."
            raise api_error("model_loading", detail, retry_after=5)
        if self.state == "failed":
            detail = f"Model {self.spec.id} failed: {self.detail} See the server's log."
            raise api_error("internal", detail)
        raise api_error("engine_restarting", self._restarting_detail(), retry_after=10)

    def _restarting_detail(self) -> str:
        return f"The engine of model {self.spec.id} is being restarted; try again shortly."

    async def ping(self) -> bool:
        """Return whether the engine's loop answers within the ping timeout."""
        if self.state != "ready" or self._process is None:
            return False
        serial = next(self._ids)
        self._pings[serial] = asyncio.get_running_loop().create_future()
        self._process.send(Ping(serial))
        try:
            await asyncio.wait_for(self._pings[serial], self._limits.ping_timeout_s)
        except (TimeoutError, APIError):
            return False
        finally:
            self._pings.pop(serial, None)
        return True

    async def run(
        self, jobs: Sequence[Job], lane: Lane | None = None
    ) -> AsyncGenerator[TimedOutput, None]:
        """Yield the results of jobs as they come, in any order; leaving early cancels the rest.

        Errors: APIError, where a job failed or the engine died.
        """
        self.check_ready()
        waiter = self._enter(jobs, lane or Lane())
        try:
            missing = len(jobs)
            while missing:
                results = await waiter.results.get()
                if isinstance(results, APIError):
                    raise results
                missing -= sum(result.is_last for _, result, _ in results)
                for job_id, result, taken_at in results:
                    if result.failed:
                        raise api_error(result.code, result.detail)
                    yield TimedOutput(job_id - waiter.call.first_id, result, taken_at)
        finally:
            self._leave(waiter)

    def _enter(self, jobs: Sequence[Job], lane: Lane) -> _Waiter:
        first = next(self._ids)
        self._ids = itertools.count(first + max(1, len(jobs)))
        waiter = _Waiter(EngineCall(jobs, first, lane))
        self._waiters |= dict.fromkeys(waiter.call.unsent, waiter)
        self._queue.put(waiter.call)
        self._send_jobs()
        return waiter

    def _leave(self, waiter: _Waiter) -> None:
        for job_id in range(waiter.call.first_id, waiter.call.first_id + len(waiter.call.jobs)):
            self._waiters.pop(job_id, None)
        in_engine = self._queue.drop(waiter.call)
        if in_engine and self._process is not None:
            self._process.send(Cancel(in_engine))
            self._send_jobs()

    def _send_jobs(self) -> None:
        jobs = self._queue.take()
        if jobs and self._process is not None:
            self._process.send(Add(jobs))

    def _receive(self, process: _Process, message: FromEngine | None) -> None:
        if process is not self._process or self._closing:
            return
        match message:
            case Finished(results):
                self._deliver(results)
            case Ready(info):
                self.info, self.state, self.detail = info, "ready", "answers"
                self.ready.set()
            case Pong(serial):
                if (ping := self._pings.get(serial)) and not ping.done():
                    ping.set_result(None)
            case Failed():
                self._fail(message)
            case None:
                self._restart()

    def _deliver(self, results: Iterable[tuple[int, JobResult, float]]) -> None:
        by_waiter: dict[_Waiter, list[tuple[int, JobResult, float]]] = {}
        for result in results:
            last = result[1].is_last
            if last:
                self._queue.finish(result[0])
            find = self._waiters.pop if last else self._waiters.get
            if waiter := find(result[0], None):
                by_waiter.setdefault(waiter, []).append(result)
        for waiter, own in by_waiter.items():
            waiter.results.put_nowait(own)
        self._send_jobs()

    def _fail(self, failure: Failed) -> None:
        log.error("engine %s: %s", self.spec.id, failure.detail)
        self.detail = failure.detail
        if not failure.can_restart:
            self.state = "failed"
        code = "out_of_memory" if failure.out_of_memory else "engine_restarting"
        self._fail_all(api_error(code, self._restarting_detail(), retry_after=10))

    def _fail_all(self, error: APIError) -> None:
        waiters, self._waiters = set(self._waiters.values()), {}
        self._queue.clear()
        for waiter in waiters:
            waiter.results.put_nowait(error)
        for ping in self._pings.values():
            if not ping.done():
                ping.set_exception(error)

    def _restart(self) -> None:
        """Start a new process in place of one that ended without being asked to."""
        self._fail_all(api_error("engine_restarting", self._restarting_detail(), retry_after=10))
        self.ready.clear()
        if self.state == "failed" or self._loop is None:
            return
        if self.restarts >= self._limits.max_restarts:
            self.state = "failed"
            self.detail = f"it died {self.restarts + 1} times; last: {self.detail}"
            return
        self.restarts += 1
        self.state = "restarting"
        delay = self._limits.restart_delay_s * 2 ** (self.restarts - 1)
        log.warning("engine %s ended; restart %d in %.1f s", self.spec.id, self.restarts, delay)
        self._loop.call_later(delay, self._start_again)

    def _start_again(self) -> None:
        if not self._closing:
            self.start()


def now() -> float:
    """Return seconds of the clock of `TimedOutput.taken_at`, which all processes share."""
    return time.monotonic()
