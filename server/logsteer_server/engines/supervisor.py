"""Engines, as the HTTP process sees them: start, jobs, health, restart."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from logsteer.errors import APIError, api_error
from logsteer.schemas import ModelState
from logsteer_server.contract.engine import EngineInfo, EngineLoad, EngineSpec
from logsteer_server.contract.jobs import Job
from logsteer_server.contract.lane import Lane
from logsteer_server.contract.results import ResultPart, find_first_failure, find_last
from logsteer_server.engines.engine_process import Ended, EngineProcess
from logsteer_server.engines.process import (
    Add,
    Cancel,
    Cancelled,
    Failed,
    Finished,
    FromEngine,
    JobGroup,
    Ready,
)
from logsteer_server.engines.queue import FairQueue
from logsteer_server.engines.suspects import Quarantine, identify
from logsteer_server.engines.turns import EngineCall
from logsteer_server.engines.watchdog import RestartBudget, Watchdog, WatchLimits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """How an engine is fed, watched and restarted; `Settings` describes each number."""

    max_unread_results: int = 131_072
    watch: WatchLimits = field(default_factory=WatchLimits)
    max_restarts: int = 8
    restart_window_s: float = 600.0
    restart_delay_s: float = 1.0
    poison_s: float = 600.0


@dataclass(eq=False)
class _Waiter:
    """Where the results of one call go."""

    call: EngineCall
    unread: int = 0
    results: asyncio.Queue[ResultPart | APIError] = field(default_factory=asyncio.Queue)


class EngineHandle:
    """Run jobs on a resident model, and restart its process when that dies or hangs.

    `given_up` says that it is not started any more, because it died too often.
    """

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
        self.given_up = False
        self.ready = asyncio.Event()
        self._limits = limits or SupervisionLimits()
        self._quarantine = Quarantine(self._limits.poison_s)
        self._queue = FairQueue(quarantine=self._quarantine)
        self._budget = RestartBudget(
            self._limits.max_restarts, self._limits.restart_window_s, self._limits.restart_delay_s
        )
        self._watchdog = Watchdog(self._limits.watch)
        self._waiters: dict[int, _Waiter] = {}
        self._in_engine: dict[int, EngineCall] = {}
        self._ids = itertools.count()
        self._process: EngineProcess | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._said_why = False
        self._closing = False

    def start(self) -> None:
        """Start the engine's process; call it from the event loop that will use the handle."""
        self._loop = asyncio.get_running_loop()
        self._watching = asyncio.create_task(self._watch())
        self._begin()

    def _begin(self) -> None:
        """Start a process; where the machine lacks what that takes, later."""
        if self._closing:
            return
        self._watchdog = Watchdog(self._limits.watch)
        self._said_why = False
        try:
            interval_s = self._limits.watch.interval_s
            self._process = EngineProcess(self.spec, interval_s, self._take_message)
        except (OSError, RuntimeError, MemoryError) as error:
            self.detail = f"its process could not be started: {error}"
            log.warning("engine %s: %s", self.spec.id, self.detail)
            self._restart()

    def _take_message(self, process: EngineProcess, message: FromEngine | Ended) -> None:
        """Hand a message to the event loop, from another thread."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, process, message)

    def stop(self) -> None:
        """Take no more calls; those that still wait get an error."""
        self._closing = True
        self._answer_all(refuse_closing())

    async def close(self) -> None:
        """End the process; calls that still wait get an error."""
        self.stop()
        if self._watching is not None:
            self._watching.cancel()
        if self._process is not None:
            with ThreadPoolExecutor(1) as pool:  # the loop's own may be busy
                await asyncio.get_running_loop().run_in_executor(pool, self._process.close)

    async def _watch(self) -> None:
        """Kill and restart a process that hangs, until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(self._limits.watch.interval_s)
            elapsed, last = time.monotonic() - last, time.monotonic()
            process = self._process
            if process is None:
                continue
            if why := self._watchdog.look(process.beat, elapsed):
                was_stopped = process.is_stopped
                process.kill()
                log.error("engine %s hangs and is killed: %s", self.spec.id, why)
                self._lose(Ended(why, from_outside=was_stopped))

    def check_ready(self) -> EngineInfo:
        """Return what the engine is. Errors: APIError `model_loading` or `engine_restarting`."""
        if self._closing:
            raise refuse_closing()
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

    async def run(
        self, jobs: Sequence[Job], lane: Lane | None = None
    ) -> AsyncGenerator[ResultPart, None]:
        """Yield the results of jobs as they come, by the jobs' indices and in any order.

        Leaving early cancels the rest. Errors: APIError, where a job failed or the engine died.
        """
        self.check_ready()
        waiter = self._enter(jobs, lane or Lane())
        try:
            missing = len(jobs)
            while missing:
                part = await waiter.results.get()
                if isinstance(part, APIError):
                    raise part
                waiter.unread -= len(part.numbers)
                missing -= len(find_last(part))
                failure = find_first_failure(part.results)
                if failure is not None:
                    raise api_error(failure.code, failure.detail)
                first = waiter.call.first_id
                yield part._replace(numbers=[job_id - first for job_id in part.numbers])
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
        """Send what the queue gives; once more later, where that held something back."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        taken = self._queue.take()
        for job_id in taken.refused:
            if waiter := self._waiters.get(job_id):
                waiter.results.put_nowait(self._refuse_poison())
        if taken.order and self._process is not None:
            for call, ids in taken.by_call.items():
                self._in_engine |= dict.fromkeys(ids, call)
            groups = [JobGroup(ids, call.select(ids)) for call, ids in taken.by_call.items()]
            self._process.send(Add(groups, taken.order))
        if taken.wait_s is not None and self._loop is not None:
            self._wake = self._loop.call_later(taken.wait_s, self._send_jobs)

    def _refuse_poison(self) -> APIError:
        detail = (
            f"The engine of model {self.spec.id} has ended twice while it worked on this request. "
            f"It is refused for {self._limits.poison_s:g} s; change it, or report it with the "
            "server's log."
        )
        return api_error("internal", detail)

    def _receive(self, process: EngineProcess, message: FromEngine | Ended) -> None:
        if process is not self._process or self._closing:
            return
        match message:
            case Finished(parts):
                for part in parts:
                    self._deliver(part)
                self._send_jobs()
            case Cancelled(job_ids):
                self._forget(job_ids)
                self._send_jobs()
            case EngineLoad():
                self._queue.note_load(message)
                self._send_jobs()
            case Ready(info):
                self.info, self.state, self.detail = info, "ready", "answers"
                self._queue.room = info.room
                self.ready.set()
            case Failed():
                self._fail(message)
            case Ended():
                self._lose(message)

    def _forget(self, job_ids: Collection[int]) -> None:
        """Note that the engine no longer has these jobs."""
        self._queue.finish(job_ids)
        for job_id in job_ids:
            self._in_engine.pop(job_id, None)

    def _deliver(self, part: ResultPart) -> None:
        """Hand results of one call to whoever waits for them."""
        waiter = self._waiters.get(part.numbers[0])
        ended = find_last(part)
        for job_id in ended if self._quarantine.has_suspects else ():
            if (call := self._in_engine.get(job_id)) is not None:
                self._quarantine.acquit(call.job(job_id))
        self._forget(ended)
        for job_id in ended:
            self._waiters.pop(job_id, None)
        if waiter is None:
            return
        waiter.results.put_nowait(part)
        waiter.unread += len(part.numbers)
        if waiter.unread > self._limits.max_unread_results:
            self._give_up_reading(waiter)

    def _give_up_reading(self, waiter: _Waiter) -> None:
        """End a call whose results are not read, and drop them."""
        self._leave(waiter)
        waiter.results = asyncio.Queue()
        detail = (
            f"More than {self._limits.max_unread_results} results came that were not read: read "
            "the stream faster, ask for less at once, or raise max_unread_results."
        )
        waiter.results.put_nowait(api_error("overloaded", detail, retry_after=1.0))

    def _fail(self, failure: Failed) -> None:
        """Note why the process is about to end, and answer everyone before it has."""
        log.error("engine %s: %s", self.spec.id, failure.detail)
        self.detail, self._said_why = failure.detail, True
        if self.info is None and not failure.can_restart:
            self.state = "failed"
        elif self.state == "ready":
            self.state = "restarting"
        code = "out_of_memory" if failure.out_of_memory else "engine_restarting"
        error = api_error(code, self._restarting_detail(), retry_after=10)
        self._answer_all(error, self._quarantine.accuse(self._list_jobs()))

    def _lose(self, ended: Ended) -> None:
        """Answer everyone whose jobs the process had, and start another in its place."""
        self._process = None
        if not self._said_why:
            self.detail = ended.detail
        accused = [] if ended.from_outside else self._list_jobs()
        error = api_error("engine_restarting", self._restarting_detail(), retry_after=10)
        self._answer_all(error, self._quarantine.accuse(accused))
        if self.state != "failed":
            self._restart()

    def _list_jobs(self) -> list[Job]:
        """Return the jobs that the engine has."""
        return [call.job(job_id) for job_id, call in self._in_engine.items()]

    def _answer_all(self, error: APIError, convicted: Collection[bytes] = ()) -> None:
        """End every call with an error: that of poison where the engine had a convicted job."""
        poisoned = {
            self._waiters.get(job_id)
            for job_id, call in self._in_engine.items()
            if convicted and identify(call.job(job_id)) in convicted
        }
        waiters, self._waiters = set(self._waiters.values()), {}
        self._in_engine.clear()
        self._queue.clear()
        for waiter in waiters:
            waiter.results.put_nowait(self._refuse_poison() if waiter in poisoned else error)

    def _restart(self) -> None:
        """Start a process after a while, as far as the budget of restarts goes."""
        self.ready.clear()
        delay = self._budget.take(time.monotonic())
        if delay is None or self._loop is None:
            self.state, self.given_up = "failed", True
            self.detail = (
                f"it was given up after {self._budget.max_restarts} restarts within "
                f"{self._budget.window_s:g} s; last: {self.detail}"
            )
            log.error("engine %s: %s", self.spec.id, self.detail)
            return
        self.restarts += 1
        self.state = "restarting"
        log.warning(
            "engine %s: %s; restart %d in %.1f s", self.spec.id, self.detail, self.restarts, delay
        )
        self._loop.call_later(delay, self._begin)


def refuse_closing() -> APIError:
    """Return the error that the server is shutting down, which may be tried again."""
    detail = "The server is shutting down; try again shortly."
    return api_error("engine_restarting", detail, retry_after=10)


def now() -> float:
    """Return seconds of the clock of `TimedOutput.taken_at`, which all processes share."""
    return time.monotonic()
