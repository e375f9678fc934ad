"""The HTTP process's handle of a model's engine: its jobs, and its replicas on this machine."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext

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
"""The engine's state is the first of these that one of its replicas has."""
SAME = ("weights_digest", "engine_version", "dtype", "vocab_size", "context_length")
"""Facts that determine the numbers; all replicas of an engine must agree on them."""
SILENT_S = 20.0
"""How long a broken process may take to exit before it is killed. After the same time again it
counts as unkillable, and another process is started."""


class EngineHandle:
    """Run jobs on a model's engine, one process or several replicas, and restart dead ones.

    `ready` is set while the engine accepts jobs; `info` is None until it first does. All replicas
    share one queue. When a replica dies or hangs, its jobs are sent to the others once, unless part
    of their output has arrived; otherwise the caller gets an error and may send the request again.
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
        self._calls: set[EngineCall] = set()
        """The calls whose callers wait for results."""
        self._ids = itertools.count()
        self._watching: asyncio.Task[None] | None = None
        self._closing = False

    # ------------------------------------------------------------------ status

    @property
    def state(self) -> ModelState:
        """The best state of any replica, in the order of STATES."""
        return min((replica.state for replica in self.replicas), key=STATES.index)

    @property
    def detail(self) -> str:
        """What the engine is doing, or what is wrong with it."""
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
        """Restarts of all replicas."""
        return sum(replica.restarts for replica in self.replicas)

    @property
    def given_up(self) -> bool:
        """Whether all replicas have failed, at least one by dying too often."""
        return self.state == "failed" and any(replica.given_up for replica in self.replicas)

    def read(self) -> Sequence[ReplicaCard]:
        """Report the state of each replica."""
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
        """Report each process's status from its heartbeats, for metrics.

        The first replica's status includes the jobs that wait in this queue.
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
        """Return the engine's facts. Errors: APIError `model_loading`, `engine_restarting`."""
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
        """Yield results as they arrive, with the indices of their jobs, in any order.

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
            missing = len(own)
            self._calls.add(call)
            self._queue.put(call)
            self._send_jobs()
            try:
                while missing:
                    part = await call.results.get()
                    if isinstance(part, APIError):
                        raise part
                    call.unread -= len(part.numbers)
                    missing -= len(find_last(part))
                    failure = find_first_failure(part.results)
                    if failure is not None:
                        raise api_error(failure.code, failure.detail)
                    numbers = [job_id - call.first_id for job_id in part.numbers]
                    yield part._replace(numbers=numbers)
            finally:
                if missing:
                    self._drop(call)
                    self._send_jobs()
                self._calls.discard(call)

    def _drop(self, call: EngineCall, error: APIError | None = None) -> None:
        """Drop a call, cancel its jobs in the engine, and pass any error to its caller."""
        self._calls.discard(call)
        for number, found in self._queue.drop(call).items():
            if (process := self.replicas[number].process) is not None:
                process.send(Cancel(found))
        if error is not None:
            call.results.put_nowait(error)

    def _send_jobs(self) -> None:
        """Send each replica the jobs that it has room for."""
        for number, own in self._queue.dequeue().items():
            groups = [
                JobGroup(ids, call.select(ids), call.routing.request_id)
                for call, ids in own.by_call.items()
            ]
            if (process := self.replicas[number].process) is not None:
                process.send(Add(groups, own.order))

    def _deliver(self, replica: Replica, part: ResultPart) -> None:
        """Deliver results of one call to its caller."""
        jobs, ended = self._queue.replicas[replica.number].jobs, find_last(part)
        call = jobs.get(part.numbers[0])
        if self._poison.deaths:
            self._poison.forget(jobs[job_id].job(job_id) for job_id in ended if job_id in jobs)
        self._queue.finish(ended, replica.number)
        if call is None or call not in self._calls:
            return
        if len(ended) < len(part.numbers):
            call.begun.update(part.numbers)
        call.results.put_nowait(part)
        call.unread += len(part.numbers)
        if call.unread > self._limits.max_unread_results:
            call.results = asyncio.Queue()
            detail = (
                f"More than {self._limits.max_unread_results} results came that were not read: "
                "read the stream faster, or ask for less at once."
            )
            self._drop(call, api_error("overloaded", detail, retry_after=1.0))

    # ------------------------------------------------------------------ processes

    def start(self) -> None:
        """Start the engine in the background; call this on the event loop of the handle."""
        self._watching = asyncio.create_task(self._watch())
        for replica in self.replicas:
            self._launch(replica)

    def _launch(self, replica: Replica) -> None:
        """Start a replica's process; schedule a restart if the machine lacks resources."""
        loop = asyncio.get_running_loop()

        def receive(process: EngineProcess, message: FromEngine | Ended) -> None:
            """Pass a message to the event loop from another thread."""
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
        """Open a ready replica for jobs; fail it if it loaded a different model than the others."""
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
        """Reassign or fail the jobs of a dying replica."""
        if replica.apply("fails", why):
            log.error("engine %s: %s", replica.name, why)
            self._reassign_jobs(replica, is_to_blame=is_to_blame, out_of_memory=out_of_memory)

    def _end(self, replica: Replica, why: str, *, is_to_blame: bool = False) -> None:
        """Reassign or fail the jobs of a dead replica, and schedule its restart."""
        replica.process = None
        if not replica.apply("ends", why):
            return
        self._reassign_jobs(replica, is_to_blame=is_to_blame)
        delay, why = replica.plan_restart(), replica.detail
        if delay is None:
            log.error("engine %s: %s", replica.name, why)
            return
        log.warning(
            "engine %s: %s; restart %d in %.1f s", replica.name, why, replica.restarts, delay
        )
        asyncio.get_running_loop().call_later(delay, self._relaunch, replica)

    def _reassign_jobs(
        self, replica: Replica, *, is_to_blame: bool, out_of_memory: bool = False
    ) -> None:
        """Send a replica's jobs to the others, or fail their calls.

        `is_to_blame`: one of the jobs may have caused the death.
        """
        self._queue.replicas[replica.number].is_open = False
        lost = self._queue.lose(replica.number)
        error = self._refuse_restarting()
        if out_of_memory:
            error = api_error("out_of_memory", error.detail, retry_after=10)
        jobs = (call.job(job_id) for job_id, call in lost.items())
        if is_to_blame and self._poison.record_death(jobs):
            for call in list(self._calls):
                if any(map(self._poison.is_poison, call.jobs)):
                    self._drop(call, self._refuse_poison())
        again: dict[EngineCall, list[int]] = {}
        for job_id, call in lost.items():
            if call in self._calls:
                again.setdefault(call, []).append(job_id)
        if not any(own.state == "ready" for own in self.replicas):
            self.ready.clear()
            self._answer_all(error)
            return
        for call, ids in again.items():
            if call.begun.isdisjoint(ids) and call.lost.isdisjoint(ids):
                call.lost.update(ids)
                self._queue.put_back(call, ids)
            else:
                self._drop(call, error)
        self._send_jobs()

    def _answer_all(self, error: APIError) -> None:
        """End every call with an error."""
        calls, self._calls = self._calls, set()
        self._queue.clear()
        for call in calls:
            call.results.put_nowait(error)

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
                    self._check(replica, replica.process, progress, elapsed)

    def _check(
        self, replica: Replica, process: EngineProcess, progress: float | None, elapsed: float
    ) -> None:
        why = None
        if replica.phase == "starting":
            why = replica.watchdog.watch_load(progress, elapsed)
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

    def stop(self) -> None:
        """Refuse new calls, stop restarts, and fail waiting calls."""
        self._closing = True
        if self._watching is not None:
            self._watching.cancel()
        for replica in self.replicas:
            replica.is_closed = True
        self._answer_all(refuse_closing())

    async def close(self) -> None:
        """End the processes; fail waiting calls."""
        self.stop()
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(len(self.replicas)) as pool:  # the loop's own may be busy
            processes = [own.process for own in self.replicas if own.process is not None]
            await asyncio.gather(*(loop.run_in_executor(pool, own.close) for own in processes))


def refuse_closing() -> APIError:
    """Return the retryable error that the server is shutting down."""
    detail = "The server is shutting down; try again shortly."
    return api_error("engine_restarting", detail, retry_after=10)
