"""Engines in processes of this machine, as the HTTP process sees them: jobs, replicas, errors."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

from logsteer.errors import APIError, api_error
from logsteer.schemas import ModelState
from logsteer_server.contract.engine import EngineInfo, EngineLoad, EngineSpec
from logsteer_server.contract.jobs import Job
from logsteer_server.contract.lane import Lane
from logsteer_server.contract.results import ResultPart, find_first_failure, find_last
from logsteer_server.observation.readings import EngineStatus
from logsteer_server.runtime.handle import ContentSource, ReplicaReading
from logsteer_server.runtime.process import (
    Add,
    Cancel,
    Cancelled,
    Finished,
    FromEngine,
    JobGroup,
)
from logsteer_server.runtime.queue import FairQueue
from logsteer_server.runtime.replica import Loss, Replica, SupervisionLimits
from logsteer_server.runtime.suspects import Quarantine, identify
from logsteer_server.runtime.turns import EngineCall

log = logging.getLogger(__name__)

STATES: Sequence[ModelState] = ("ready", "loading", "restarting", "failed", "unloaded")
"""Of several replicas' states, the first one here is the engine's."""
SAME = ("weights_digest", "engine_version", "dtype", "vocab_size", "context_length")
"""What replicas of one engine have in common, and numbers depend on."""


@dataclass(eq=False)
class _Waiter:
    """Where the results of one call go; `begun` are jobs of which some have come."""

    call: EngineCall
    unread: int = 0
    begun: set[int] = field(default_factory=set)
    results: asyncio.Queue[ResultPart | APIError] = field(default_factory=asyncio.Queue)


class LocalEngine:
    """The `EngineHandle` of an engine in one process of this machine, or in several: replicas.

    They have one queue in front. When one dies or hangs, the jobs that it had go to the others,
    unless pieces of their output have come; where no other answers, whoever waits gets an error and
    may send the request again.
    """

    def __init__(
        self,
        spec: EngineSpec,
        limits: SupervisionLimits | None = None,
        make_replica: Callable[..., Replica] = Replica,
        contents: ContentSource | None = None,
    ) -> None:
        self._contents = contents
        self.spec = spec
        self.info: EngineInfo | None = None
        self.ready = asyncio.Event()
        self._limits = limits or SupervisionLimits()
        self._quarantine = Quarantine(self._limits.poison_s)
        self.replicas = [
            make_replica(number, own, self._limits, self._receive, self._open, self._lose)
            for number, own in enumerate(spec.split())
        ]
        self._queue = FairQueue(
            quarantine=self._quarantine,
            replicas=len(self.replicas),
            prefix_worth=self._limits.prefix_worth,
        )
        for place in self._queue.places:
            place.is_open = False
        self._waiters: dict[int, _Waiter] = {}
        self._ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._closing = False

    def start(self) -> None:
        """Start the processes; call it from the event loop that will use the handle."""
        self._loop = asyncio.get_running_loop()
        for replica in self.replicas:
            replica.start()

    @property
    def state(self) -> ModelState:
        """The state of the replica that is furthest."""
        return self._furthest.state

    @property
    def _furthest(self) -> Replica:
        return min(self.replicas, key=lambda replica: STATES.index(replica.state))

    @property
    def detail(self) -> str:
        """What the engine does, or what is wrong with it."""
        if len(self.replicas) == 1:
            return self.replicas[0].detail
        shown = self._shown
        behind = [replica for replica in shown if replica.state != "ready"]
        if not behind:
            return "answers"
        told = "; ".join(f"{n.number} is {n.state}: {n.detail}" for n in behind)
        return f"{len(shown) - len(behind)} of {len(shown)} replicas answer; {told}"

    @property
    def _shown(self) -> Sequence[Replica]:
        """The replicas that there is something to say of."""
        return self.replicas

    @property
    def restarts(self) -> int:
        """How often replicas were started again."""
        return sum(replica.restarts for replica in self.replicas)

    @property
    def given_up(self) -> bool:
        """Whether no replica is left, and one at least died too often."""
        return self.state == "failed" and any(replica.given_up for replica in self.replicas)

    @property
    def answers_elsewhere(self) -> bool:
        """Never: its processes are asked through this handle alone."""
        return False

    def read(self) -> Sequence[ReplicaReading]:
        """Return what each replica is at right now."""
        return [replica.read() for replica in self._shown]

    def stop(self) -> None:
        """Take no more calls; those that still wait get an error."""
        self._closing = True
        for replica in self.replicas:
            replica.stop()
        self._answer_all(refuse_closing())

    async def close(self) -> None:
        """End the processes; calls that still wait get an error."""
        self.stop()
        with ThreadPoolExecutor(len(self.replicas)) as pool:  # the loop's own may be busy
            loop = asyncio.get_running_loop()
            ends = [loop.run_in_executor(pool, replica.end) for replica in self.replicas]
            await asyncio.gather(*ends)

    def observe(self) -> Sequence[EngineStatus]:
        """Return what each replica's process is at; what waits here is told with the first one."""
        shown = self._shown
        waiting = [self._queue.num_waiting, *[0] * len(shown)]
        return [replica.observe(queued) for replica, queued in zip(shown, waiting, strict=False)]

    def check_ready(self) -> EngineInfo:
        """Return what the engine is. Errors: APIError `model_loading` or `engine_restarting`."""
        if self._closing:
            raise refuse_closing()
        state = self.state
        if state == "ready" and self.info is not None:
            return self.info
        if state == "loading":
            detail = f"Model {self.spec.id} is still loading ({self.detail}); try again shortly."
            raise api_error("model_loading", detail, retry_after=5)
        if state == "failed":
            raise self._refuse_failed()
        raise self._refuse_restarting()

    def _refuse_failed(self) -> APIError:
        detail = f"Model {self.spec.id} failed: {self.detail} See the server's log."
        return api_error("internal", detail)

    def _refuse_restarting(self) -> APIError:
        detail = f"The engine of model {self.spec.id} is being restarted; try again shortly."
        return api_error("engine_restarting", detail, retry_after=10)

    async def run(
        self, jobs: Sequence[Job], lane: Lane | None = None
    ) -> AsyncGenerator[ResultPart, None]:
        """Yield the results of jobs as they come, by the jobs' indices and in any order.

        Leaving early cancels the rest. Errors: APIError, where a job failed or the engine died.
        """
        self.check_ready()
        opened = nullcontext(jobs) if self._contents is None else self._contents.open(jobs)
        async with opened as own:
            self.check_ready()
            waiter = self._enter(own, lane or Lane())
            try:
                missing = len(own)
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
        self._drop(waiter)
        self._send_jobs()

    def _drop(self, waiter: _Waiter) -> None:
        """Forget a call, and have the engine drop what it has of it."""
        for job_id in range(waiter.call.first_id, waiter.call.first_id + len(waiter.call.jobs)):
            self._waiters.pop(job_id, None)
        for number, found in self._queue.drop(waiter.call).items():
            replica = self.replicas[number]
            if own := [job_id for job_id in found if job_id in replica.in_engine]:
                replica.send(Cancel(own))

    def _send_jobs(self) -> None:
        """Send what the queue gives; once more later, where that held something back."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        taken = self._queue.take()
        for job_id in taken.refused:
            if waiter := self._waiters.get(job_id):
                waiter.results.put_nowait(self._refuse_poison())
        for number, own in taken.by_replica.items():
            replica = self.replicas[number]
            for call, ids in own.by_call.items():
                replica.in_engine |= dict.fromkeys(ids, call)
            groups = [
                JobGroup(ids, call.select(ids), call.lane.request_id)
                for call, ids in own.by_call.items()
            ]
            replica.send(Add(groups, own.order))
        if taken.wait_s is not None and self._loop is not None:
            self._wake = self._loop.call_later(taken.wait_s, self._send_jobs)

    def _refuse_poison(self) -> APIError:
        detail = (
            f"The engine of model {self.spec.id} has ended twice while it worked on this request. "
            f"It is refused for {self._limits.poison_s:g} s; change it, or report it with the "
            "server's log."
        )
        return api_error("internal", detail)

    def _receive(self, replica: Replica, message: FromEngine) -> None:
        match message:
            case Finished(parts):
                for part in parts:
                    self._deliver(replica, part)
            case Cancelled(job_ids):
                self._forget(replica, job_ids)
            case EngineLoad():
                self._queue.note_load(message, replica.number)
        self._send_jobs()

    def _open(self, replica: Replica, info: EngineInfo) -> None:
        """Have a replica that is ready take jobs, unless it is another model than the others."""
        others = [n for n in self.replicas if n is not replica and n.state == "ready"]
        if others and self.info is not None:
            differs = [name for name in SAME if getattr(info, name) != getattr(self.info, name)]
            if differs:
                replica.refuse(f"not like the other replicas ({', '.join(differs)}): load it anew")
                self._queue.gone.add(replica.number)
                return
        else:
            self.info = info
        place = self._queue.places[replica.number]
        place.room, place.is_open = info.room, True
        self.ready.set()
        self._send_jobs()

    def _forget(self, replica: Replica, job_ids: Collection[int]) -> None:
        """Note that a replica no longer has these jobs."""
        self._queue.finish(job_ids, replica.number)
        for job_id in job_ids:
            replica.in_engine.pop(job_id, None)

    def _deliver(self, replica: Replica, part: ResultPart) -> None:
        """Hand results of one call to whoever waits for them."""
        waiter = self._waiters.get(part.numbers[0])
        ended = find_last(part)
        for job_id in ended if self._quarantine.has_suspects else ():
            if (call := replica.in_engine.get(job_id)) is not None:
                self._quarantine.acquit(call.job(job_id))
        self._forget(replica, ended)
        for job_id in ended:
            self._waiters.pop(job_id, None)
        if waiter is None:
            return
        if len(ended) < len(part.numbers):
            waiter.begun.update(part.numbers)
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
            "the stream faster, or ask for less at once."
        )
        waiter.results.put_nowait(api_error("overloaded", detail, retry_after=1.0))

    def _lose(self, replica: Replica, loss: Loss) -> None:
        """Have other replicas do what one had as it died, or else answer everyone who waits."""
        lost, replica.in_engine = replica.in_engine, {}
        self._queue.places[replica.number].is_open = False
        self._queue.lose(replica.number)
        if replica.state == "failed":
            self._queue.gone.add(replica.number)
        error = self._refuse_restarting()
        if loss.out_of_memory:
            error = api_error("out_of_memory", error.detail, retry_after=10)
        jobs = {job_id: call.job(job_id) for job_id, call in lost.items()}
        convicted = self._quarantine.accuse(jobs.values() if loss.accuses else ())
        for waiter in self._find_poisoned(jobs, convicted):
            self._drop(waiter)
            waiter.results.put_nowait(self._refuse_poison())
        if any(other.state == "ready" for other in self.replicas):
            self._run_again(lost, error, suspected=loss.accuses)
            self._send_jobs()
        else:
            self.ready.clear()
            self._answer_all(error)

    def _find_poisoned(
        self, jobs: dict[int, Job], convicted: Collection[bytes]
    ) -> Iterable[_Waiter]:
        """Return who waits for one of the convicted jobs."""
        if not convicted:
            return ()
        found = (self._waiters.get(n) for n, job in jobs.items() if identify(job) in convicted)
        return {waiter for waiter in found if waiter is not None}

    def _run_again(self, lost: dict[int, EngineCall], error: APIError, *, suspected: bool) -> None:
        """Put lost jobs back into the queue; calls that have had pieces of one get the error."""
        again: dict[_Waiter, list[int]] = {}
        for job_id in lost:
            if waiter := self._waiters.get(job_id):
                again.setdefault(waiter, []).append(job_id)
        for waiter, ids in again.items():
            if waiter.begun.isdisjoint(ids):
                self._queue.put_back(waiter.call, ids, last=suspected)
                if suspected and self._loop is not None:
                    wait_s = self._limits.suspect_wait_s
                    self._loop.call_later(wait_s, self._give_up_waiting, waiter, ids, error)
            else:
                self._drop(waiter)
                waiter.results.put_nowait(error)

    def _give_up_waiting(self, waiter: _Waiter, ids: Sequence[int], error: APIError) -> None:
        """End a call with an error if a replica still was not sent one of these jobs."""
        unsent = set(waiter.call.unsent).intersection(ids)
        if any(self._waiters.get(job_id) is waiter for job_id in unsent):
            self._drop(waiter)
            waiter.results.put_nowait(error)

    def _answer_all(self, error: APIError) -> None:
        """End every call with an error."""
        waiters, self._waiters = set(self._waiters.values()), {}
        for replica in self.replicas:
            replica.in_engine.clear()
        self._queue.clear()
        for waiter in waiters:
            waiter.results.put_nowait(error)


def refuse_closing() -> APIError:
    """Return the error that the server is shutting down, which may be tried again."""
    detail = "The server is shutting down; try again shortly."
    return api_error("engine_restarting", detail, retry_after=10)


def now() -> float:
    """Return seconds of the clock of `TimedOutput.taken_at`, which all processes share."""
    return time.monotonic()
