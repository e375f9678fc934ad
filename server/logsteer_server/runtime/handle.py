"""A model's engine in processes of this machine, as the HTTP process sees it: jobs and replicas."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from logsteer.errors import APIError, api_error
from logsteer.schemas import ModelState, ReplicaCard
from logsteer_server.contract.batches import (
    ResultPart,
    find_first_failure,
    find_last,
    name_contents,
)
from logsteer_server.contract.engine import EngineInfo, EngineLoad, EngineSpec
from logsteer_server.contract.jobs import Job, Routing
from logsteer_server.engines.lifetime import measure_progress
from logsteer_server.observation.metrics import EngineStatus
from logsteer_server.runtime.engine_process import Ended, EngineProcess
from logsteer_server.runtime.poison import KEEP_S, PoisonMemory
from logsteer_server.runtime.process import (
    Add,
    Cancel,
    Cancelled,
    Failed,
    Finished,
    FromEngine,
    JobGroup,
    Ready,
)
from logsteer_server.runtime.queue import EngineCall, FairQueue
from logsteer_server.runtime.supervision import Replica, SupervisionLimits
from logsteer_server.stores.contents import JobContents

log = logging.getLogger(__name__)

STATES: Sequence[ModelState] = ("ready", "loading", "restarting", "failed", "unloaded")
"""Of several replicas' states, the first one here is the engine's."""
SAME = ("weights_digest", "engine_version", "dtype", "vocab_size", "context_length")
"""What replicas of one engine have in common, and numbers depend on."""
SILENT_S = 20.0
"""A process that broke may take so long to end; then it is killed. One that is still there after
as long again cannot be killed, and another one is started beside it."""


@dataclass(eq=False)
class _Waiter:
    """Where the results of one call go.

    `begun` are jobs of which some results have come, `lost` those that a replica died with.
    """

    call: EngineCall
    unread: int = 0
    begun: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    results: asyncio.Queue[ResultPart | APIError] = field(default_factory=asyncio.Queue)


class EngineHandle:
    """Run jobs on a model's engine, in one process or in several replicas; keep those running.

    `ready` is set while jobs are taken; `info` is None until they first were. All replicas have one
    queue. When one dies or hangs, the jobs that it had go to the others, once and unless pieces of
    their output have come; otherwise whoever waits gets an error and may send the request again.
    """

    def __init__(
        self,
        spec: EngineSpec,
        limits: SupervisionLimits | None = None,
        contents: JobContents | None = None,
    ) -> None:
        self._contents = contents
        self.spec = spec
        self.info: EngineInfo | None = None
        self.ready = asyncio.Event()
        self._limits = limits or SupervisionLimits()
        self.replicas = [
            Replica(number, own, self._limits) for number, own in enumerate(spec.split())
        ]
        self._poison = PoisonMemory()
        self._queue = FairQueue(replicas=len(self.replicas), poison=self._poison)
        for load in self._queue.replicas:
            load.is_open = False
        self._waiters: dict[EngineCall, _Waiter] = {}
        self._ids = itertools.count()
        self._watching: asyncio.Task[None] | None = None
        self._closing = False

    # ------------------------------------------------------------------ what it is at

    @property
    def state(self) -> ModelState:
        """Whether jobs are taken, and if not, why: the state of the replica that is furthest."""
        return min((replica.state for replica in self.replicas), key=STATES.index)

    @property
    def detail(self) -> str:
        """What the engine does, or what is wrong with it."""
        if len(self.replicas) == 1:
            return self.replicas[0].detail
        others = [replica for replica in self.replicas if replica.state != "ready"]
        if not others:
            return "answers"
        told = "; ".join(f"{own.number} is {own.state}: {own.detail}" for own in others)
        total = len(self.replicas)
        return f"{total - len(others)} of {total} replicas answer; {told}"

    @property
    def restarts(self) -> int:
        """How often replicas were started again."""
        return sum(replica.restarts for replica in self.replicas)

    @property
    def given_up(self) -> bool:
        """Whether no replica is left, and one at least died too often."""
        return self.state == "failed" and any(replica.given_up for replica in self.replicas)

    def read(self) -> Sequence[ReplicaCard]:
        """Return what each replica is at right now; a `Routing` names one by its place."""
        return [
            ReplicaCard(
                state=own.state,
                detail=own.detail,
                restarts=own.restarts,
                num_jobs=len(self._queue.replicas[own.number].jobs),
            )
            for own in self.replicas
        ]

    def observe(self) -> Sequence[EngineStatus]:
        """Return what each process is at by its heartbeats, for metrics.

        The jobs that wait here are told with the first replica.
        """
        found: list[EngineStatus] = []
        for own in self.replicas:
            process = own.process
            heartbeat = None if process is None else process.heartbeat
            age_s = None
            if process is not None and heartbeat is not None:
                age_s = max(0.0, time.monotonic() - process.heartbeat_at)
            found.append(
                EngineStatus(
                    str(own.number),
                    restarts=own.restarts,
                    queued=0 if found else self._queue.num_waiting,
                    pid=None if process is None else process.pid,
                    heartbeat_age_s=age_s,
                    reading=None if heartbeat is None else heartbeat.reading,
                    steps=None if heartbeat is None else heartbeat.steps,
                )
            )
        return found

    def check_ready(self) -> EngineInfo:
        """Return what the engine is. Errors: APIError `model_loading` or `engine_restarting`."""
        if self._closing:
            raise refuse_closing()
        if self.ready.is_set() and self.info is not None:
            return self.info
        state = self.state
        if state == "loading":
            detail = f"Model {self.spec.id} is still loading ({self.detail}); try again shortly."
            raise api_error("model_loading", detail, retry_after=5)
        if state == "failed":
            detail = f"Model {self.spec.id} failed: {self.detail} See the server's log."
            raise api_error("internal", detail)
        raise self._refuse_restarting()

    def _refuse_restarting(self) -> APIError:
        detail = f"The engine of model {self.spec.id} is being restarted; try again shortly."
        return api_error("engine_restarting", detail, retry_after=10)

    def _refuse_poison(self) -> APIError:
        detail = (
            f"The engine of model {self.spec.id} has ended twice while it worked on this request. "
            f"It is refused for {KEEP_S:g} s; change it, or report it with the server's log."
        )
        return api_error("internal", detail)

    # ------------------------------------------------------------------ calls

    async def run(
        self, jobs: Sequence[Job], routing: Routing | None = None
    ) -> AsyncGenerator[ResultPart, None]:
        """Yield the results of jobs as they come, by the jobs' indices and in any order.

        Leaving early cancels the rest. Errors: APIError, where a job failed or the engine died.
        """
        self.check_ready()
        opened: AbstractAsyncContextManager[Sequence[Job]] = nullcontext(jobs)
        if self._contents is not None and name_contents(jobs):
            opened = self._contents.open(jobs)
        async with opened as own:
            self.check_ready()
            if self._poison.deaths and any(map(self._poison.is_poison, own)):
                raise self._refuse_poison()
            call = EngineCall(own, next(self._ids), routing or Routing())
            self._ids = itertools.count(call.first_id + max(1, len(own)))
            waiter, missing = _Waiter(call), len(own)
            self._waiters[call] = waiter
            self._queue.put(call)
            self._send_jobs()
            try:
                while missing:
                    part = await waiter.results.get()
                    if isinstance(part, APIError):
                        raise part
                    waiter.unread -= len(part.numbers)
                    missing -= len(find_last(part))
                    failure = find_first_failure(part.results)
                    if failure is not None:
                        raise api_error(failure.code, failure.detail)
                    numbers = [job_id - call.first_id for job_id in part.numbers]
                    yield part._replace(numbers=numbers)
            finally:
                if missing:
                    self._drop(waiter)
                    self._send_jobs()
                self._waiters.pop(call, None)

    def _drop(self, waiter: _Waiter, error: APIError | None = None) -> None:
        """Forget a call and cancel what the engine has of it; tell its caller the error, if any."""
        self._waiters.pop(waiter.call, None)
        for number, found in self._queue.drop(waiter.call).items():
            if (process := self.replicas[number].process) is not None:
                process.send(Cancel(found))
        if error is not None:
            waiter.results.put_nowait(error)

    def _send_jobs(self) -> None:
        """Send replicas the jobs that they have room for."""
        for number, own in self._queue.dequeue().items():
            groups = [
                JobGroup(ids, call.select(ids), call.routing.request_id)
                for call, ids in own.by_call.items()
            ]
            if (process := self.replicas[number].process) is not None:
                process.send(Add(groups, own.order))

    def _deliver(self, replica: Replica, part: ResultPart) -> None:
        """Hand results of one call to whoever waits for them."""
        jobs, ended = self._queue.replicas[replica.number].jobs, find_last(part)
        call = jobs.get(part.numbers[0])
        if self._poison.deaths:
            self._poison.forget(jobs[job_id].job(job_id) for job_id in ended if job_id in jobs)
        self._queue.finish(ended, replica.number)
        waiter = None if call is None else self._waiters.get(call)
        if waiter is None:
            return
        if len(ended) < len(part.numbers):
            waiter.begun.update(part.numbers)
        waiter.results.put_nowait(part)
        waiter.unread += len(part.numbers)
        if waiter.unread > self._limits.max_unread_results:
            waiter.results = asyncio.Queue()
            detail = (
                f"More than {self._limits.max_unread_results} results came that were not read: "
                "read the stream faster, or ask for less at once."
            )
            self._drop(waiter, api_error("overloaded", detail, retry_after=1.0))

    # ------------------------------------------------------------------ processes

    def start(self) -> None:
        """Begin to start the engine; call it from the event loop that will use the handle."""
        self._watching = asyncio.create_task(self._watch())
        for replica in self.replicas:
            self._launch(replica)

    def _launch(self, replica: Replica) -> None:
        """Start a replica's process; where the machine lacks what that takes, later."""
        loop = asyncio.get_running_loop()

        def receive(process: EngineProcess, message: FromEngine | Ended) -> None:
            """Hand a message to the event loop, from another thread."""
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._receive, replica, process, message)

        limits = self._limits
        try:
            replica.process = EngineProcess(replica.spec, limits.interval_s, receive, limits.style)
        except (OSError, RuntimeError, MemoryError) as error:
            self._end(replica, f"its process could not be started: {error}")

    def _relaunch(self, replica: Replica) -> None:
        if not self._closing and replica.apply("restarts"):
            self._launch(replica)

    def _receive(
        self, replica: Replica, process: EngineProcess, message: FromEngine | Ended
    ) -> None:
        if process is not replica.process or self._closing:
            return
        match message:
            case Ready(info):
                self._open(replica, info)
            case Finished(parts):
                for part in parts:
                    self._deliver(replica, part)
            case Cancelled(job_ids):
                self._queue.finish(job_ids, replica.number)
            case EngineLoad():
                self._queue.update(message, replica.number)
            case Failed(detail, out_of_memory, can_restart):
                replica.is_lasting = not (replica.has_loaded or can_restart)
                self._fail(replica, detail, out_of_memory=out_of_memory)
            case Ended(detail, from_outside):
                self._end(replica, detail, is_to_blame=not from_outside)
        self._send_jobs()

    def _open(self, replica: Replica, info: EngineInfo) -> None:
        """Have a replica that is ready take jobs, unless it is another model than the others."""
        others = [own for own in self.replicas if own is not replica and own.state == "ready"]
        if others and self.info is not None:
            differs = [name for name in SAME if getattr(info, name) != getattr(self.info, name)]
            if differs and replica.process is not None:
                replica.is_lasting = True
                replica.process.kill()
                why = f"not like the other replicas ({', '.join(differs)}): load it again"
                self._fail(replica, why, is_to_blame=False)
                return
        if replica.apply("loads"):
            self.info = self.info if others else info
            load = self._queue.replicas[replica.number]
            load.room, load.is_open = info.room, True
            self.ready.set()

    def _fail(
        self, replica: Replica, why: str, *, is_to_blame: bool = True, out_of_memory: bool = False
    ) -> None:
        """See to the jobs of a replica whose process is about to be gone."""
        if replica.apply("fails", why):
            log.error("engine %s: %s", replica.name, why)
            self._lose_jobs(replica, is_to_blame=is_to_blame, out_of_memory=out_of_memory)

    def _end(self, replica: Replica, why: str, *, is_to_blame: bool = False) -> None:
        """See to the jobs of a replica whose process is gone, and start another one later."""
        replica.process = None
        if not replica.apply("ends", why):
            return
        self._lose_jobs(replica, is_to_blame=is_to_blame)
        delay, why = replica.plan_restart(), replica.detail
        if delay is None:
            log.error("engine %s: %s", replica.name, why)
            return
        log.warning(
            "engine %s: %s; restart %d in %.1f s", replica.name, why, replica.restarts, delay
        )
        asyncio.get_running_loop().call_later(delay, self._relaunch, replica)

    def _lose_jobs(
        self, replica: Replica, *, is_to_blame: bool, out_of_memory: bool = False
    ) -> None:
        """Have other replicas do what one had, or answer whoever waits.

        `is_to_blame`: the replica may have died of a job.
        """
        self._queue.replicas[replica.number].is_open = False
        lost = self._queue.lose(replica.number)
        error = self._refuse_restarting()
        if out_of_memory:
            error = api_error("out_of_memory", error.detail, retry_after=10)
        jobs = (call.job(job_id) for job_id, call in lost.items())
        if is_to_blame and self._poison.record_death(jobs):
            for waiter in list(self._waiters.values()):
                if any(map(self._poison.is_poison, waiter.call.jobs)):
                    self._drop(waiter, self._refuse_poison())
        again: dict[_Waiter, list[int]] = {}
        for job_id, call in lost.items():
            if (owner := self._waiters.get(call)) is not None:
                again.setdefault(owner, []).append(job_id)
        if not any(own.state == "ready" for own in self.replicas):
            self.ready.clear()
            self._answer_all(error)
            return
        for waiter, ids in again.items():
            if waiter.begun.isdisjoint(ids) and waiter.lost.isdisjoint(ids):
                waiter.lost.update(ids)
                self._queue.put_back(waiter.call, ids)
            else:
                self._drop(waiter, error)
        self._send_jobs()

    def _answer_all(self, error: APIError) -> None:
        """End every call with an error."""
        waiters, self._waiters = list(self._waiters.values()), {}
        self._queue.clear()
        for waiter in waiters:
            waiter.results.put_nowait(error)

    async def _watch(self) -> None:
        """Kill processes that hang, until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(self._limits.interval_s)
            # One that waits for another to download or compile the same makes progress by it.
            loading = [own.process for own in self.replicas if own.phase == "starting"]
            pids = [process.pid for process in loading if process is not None and process.pid]
            progress = await asyncio.to_thread(measure_progress, pids) if pids else None
            elapsed, last = time.monotonic() - last, time.monotonic()
            for replica in self.replicas:
                if replica.process is not None:
                    self._look(replica, replica.process, progress, elapsed)

    def _look(
        self, replica: Replica, process: EngineProcess, progress: float | None, elapsed: float
    ) -> None:
        why = None
        if replica.phase == "starting":
            why = self._look_at_load(replica, progress, elapsed)
        elif replica.phase == "ready" and process.heartbeat is not None:
            why = replica.watchdog.watch_work(process.heartbeat, elapsed)
        elif replica.phase == "silent" and time.monotonic() - replica.since > SILENT_S:
            process.kill()
            if time.monotonic() - replica.since > 2 * SILENT_S:
                self._end(replica, "it cannot be killed")
        if why is not None:
            was_stopped = process.is_stopped
            process.kill()
            self._fail(replica, f"it hangs and is killed: {why}", is_to_blame=not was_stopped)

    def _look_at_load(self, replica: Replica, progress: float | None, elapsed: float) -> str | None:
        """Return why a load hangs; log once that it may."""
        dog, patience_s = replica.watchdog, self._limits.heartbeat_timeout_s
        before = dog.stalled_s
        why = dog.watch_load(progress, elapsed)
        if before <= patience_s < dog.stalled_s:
            log.warning("engine %s loads without progress for %g s", replica.name, patience_s)
        return why

    def stop(self) -> None:
        """Take no more calls and start nothing; calls that still wait get an error."""
        self._closing = True
        if self._watching is not None:
            self._watching.cancel()
        for replica in self.replicas:
            replica.is_closed = True
        self._answer_all(refuse_closing())

    async def close(self) -> None:
        """End the processes; calls that still wait get an error."""
        self.stop()
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(len(self.replicas)) as pool:  # the loop's own may be busy
            processes = [own.process for own in self.replicas if own.process is not None]
            await asyncio.gather(*(loop.run_in_executor(pool, own.close) for own in processes))


def refuse_closing() -> APIError:
    """Return the error that the server is shutting down, which may be tried again."""
    detail = "The server is shutting down; try again shortly."
    return api_error("engine_restarting", detail, retry_after=10)
