"""One replica of a model on Ray: the actor with the engine, and its place in an ingress' queue."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ray.exceptions import ActorDiedError

from logsteer.errors import APIError
from logsteer_server.contract.engine import EngineInfo, EngineSpec
from logsteer_server.contract.jobs import Job, JobFailure
from logsteer_server.contract.lane import Lane
from logsteer_server.contract.results import ResultPart
from logsteer_server.engines.handle import ReplicaReading
from logsteer_server.engines.process import Add, Cancel, Cancelled, Finished, JobGroup, ToEngine
from logsteer_server.engines.replica import Loss, Replica, SupervisionLimits
from logsteer_server.engines.supervisor import LocalEngine
from logsteer_server.observation.logs import configure_logs
from logsteer_server.observation.readings import EngineStatus

log = logging.getLogger(__name__)

POLL_S = 0.05
RETRY_S = 1.0
ENGINE_LOST = {"engine_restarting", "model_loading"}
"""Codes with which a replica says that its engine ended with what it had."""


class ModelReplica:
    """The class of a model's deployment: an actor that runs one engine, in a process below it.

    It is there once the model is loaded. The first argument of each call is the name that the
    router reads. Errors of making it: RuntimeError where the model cannot be loaded.
    """

    async def __init__(self, spec: EngineSpec, limits: SupervisionLimits) -> None:  # type: ignore[misc]
        configure_logs(limits.style)
        self._engine = LocalEngine(spec, limits)
        self._engine.start()
        while self._engine.state not in ("ready", "failed"):
            await asyncio.sleep(POLL_S)
        await self.check_health()

    async def check_health(self) -> None:
        """Have Serve end and replace this actor if its engine is not started any more.

        One that hangs is killed and started anew by `LocalEngine`; an actor whose event loop hangs
        does not answer this at all. Errors: RuntimeError.
        """
        if self._engine.state == "failed":
            raise RuntimeError(self._engine.detail)

    async def describe(self, _actor: str | None) -> EngineInfo:
        """Return what the engine is, as soon as it answers."""
        await self._engine.ready.wait()
        return self._engine.check_ready()

    async def run(
        self, _actor: str, jobs: Sequence[Job], lane: Lane
    ) -> AsyncIterator[ResultPart | JobFailure]:
        """Yield the results of jobs; a failure ends them. Their times are seconds from now."""
        began = time.monotonic()
        try:
            async for part in self._engine.run(jobs, lane):
                yield part._replace(taken_at=part.taken_at - began)
        except APIError as error:
            yield JobFailure(error.code, error.detail)


def start_apart(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    """Start work in a task that is not part of the request in which it is started.

    Serve gives all calls of one request the same id, and its router takes two of them that wait at
    once for the same.
    """
    return asyncio.create_task(work, context=Context())


class ReplicaCalls(Protocol):
    """What is asked of a model's actors, each by its name."""

    async def describe(self, actor: str | None) -> EngineInfo:
        """Return what an actor's engine is; None: whichever answers first."""
        ...

    def run(
        self, actor: str, jobs: Sequence[Job], lane: Lane
    ) -> AsyncGenerator[ResultPart | JobFailure, None]:
        """Yield what comes of jobs in an actor."""
        ...


class HandleCalls:
    """The `ReplicaCalls` of a deployment of `ModelReplica`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def describe(self, actor: str | None) -> EngineInfo:
        """Return what an actor's engine is."""
        info: EngineInfo = await self._handle.describe.remote(actor)
        return info

    async def run(
        self, actor: str, jobs: Sequence[Job], lane: Lane
    ) -> AsyncGenerator[ResultPart | JobFailure, None]:
        """Yield what comes of jobs in an actor; leaving early cancels them there."""
        response = self._handle.options(stream=True).run.remote(actor, jobs, lane)
        ended = False
        try:
            async for part in response:
                yield part
            ended = True
        finally:
            if not ended:
                response.cancel()


class RemoteReplica(Replica):
    """A place of an ingress' queue, for one of the model's actors at a time.

    `actor` is that one's name; None while there is none. An actor that Serve takes away gets no
    more jobs, and keeps its place until it has answered those that it has.
    """

    def __init__(
        self,
        *arguments: Any,
        calls: ReplicaCalls,
        take_free: Callable[[], None],
    ) -> None:
        super().__init__(*arguments)
        self.state, self.detail = "unloaded", "no actor"
        self.actor: str | None = None
        self.retires = False
        self._calls = calls
        self._take_free = take_free
        self._opening: asyncio.Task[None] | None = None
        self._running: dict[asyncio.Task[None], JobGroup] = {}

    def start(self) -> None:
        """Do nothing: Serve starts actors, and `take` is told of them."""

    def take(self, actor: str) -> None:
        """Have an actor in this place."""
        self.actor, self.retires = actor, False
        self._open_later("it starts")

    def expect(self, *, is_due: bool) -> None:
        """Note, without an actor, whether another is due or the model does with less."""
        if not is_due:
            self.state, self.detail = "unloaded", "no actor"
        elif self.state != "restarting":
            self.state, self.detail = "loading", "Serve starts its actor"

    def retire(self) -> None:
        """Let the actor end with what it has."""
        self.retires = True
        if not self._running:
            self._free()

    def _free(self) -> None:
        self._stop_tasks()
        self.actor, self.retires = None, False
        if self.state != "restarting":
            self.state, self.detail = "unloaded", "no actor"
        self._take_free()

    def _open_later(self, detail: str) -> None:
        """Take jobs as soon as the actor's engine answers."""
        self.state = "restarting" if self._has_loaded else "loading"
        self.detail = detail
        if self._opening is not None:
            self._opening.cancel()
        self._opening = start_apart(self._open())

    async def _open(self) -> None:
        while True:
            try:
                info = await self._calls.describe(self.actor)
                break
            except ActorDiedError:
                self._opening = None
                self.state, self.detail = "restarting", "its actor died"
                self._free()
                return
            except Exception as error:  # the network's, or Ray's: whatever it is may pass
                log.warning("engine %s: %s does not answer: %r", self._name, self.actor, error)
                await asyncio.sleep(RETRY_S)
        if self.retires:
            return
        self.state, self.detail, self._has_loaded = "ready", "answers", True
        # The actor lets generation in by what its engine's cache holds, which is not known here.
        room = info.room
        ahead = room.ahead_tokens + (room.cache_tokens or 0)
        room = replace(room, ahead_tokens=ahead, cache_tokens=None, sequences=None)
        self._take_ready(self, replace(info, room=room))

    def send(self, message: ToEngine) -> None:
        """Have the actor run jobs, or drop them."""
        match message:
            case Add(groups):
                for group in groups:
                    lane = self.in_engine[group.ids[0]].lane
                    task = start_apart(self._run(group, lane))
                    self._running[task] = group
                    task.add_done_callback(self._note_end)
            case Cancel(job_ids):
                dropped = set(job_ids)
                for task, group in list(self._running.items()):
                    if not dropped.isdisjoint(group.ids):
                        task.cancel()
                told = partial(self._take_message, self, Cancelled(job_ids))
                asyncio.get_running_loop().call_soon(told)  # the sender is in the midst of its work

    async def _run(self, group: JobGroup, lane: Lane) -> None:
        """Pass on what comes of jobs of one call."""
        began = time.monotonic()
        assert self.actor is not None
        parts = self._calls.run(self.actor, group.jobs, lane)
        try:
            async for part in parts:
                if isinstance(part, JobFailure):
                    self._fail_call(group, part)
                    return
                ids = [group.ids[number] for number in part.numbers]
                named = ResultPart(ids, part.results, began + part.taken_at)
                self._take_message(self, Finished([named]))
        except ActorDiedError:
            self._lose_jobs("its actor died", accuses=False)
        except Exception as error:  # as above; whoever waits is not to wait for ever
            log.warning("engine %s: a call of %s ended: %r", self._name, self.actor, error)
            self._lose_jobs(f"a call ended with {type(error).__name__}", accuses=False)
        finally:
            await parts.aclose()

    def _fail_call(self, group: JobGroup, failure: JobFailure) -> None:
        """Answer a call that failed, or have its jobs seen to where the engine was lost."""
        if failure.code in ENGINE_LOST:
            self._lose_jobs(failure.detail, accuses=True)
            return
        left = [job_id for job_id in group.ids if job_id in self.in_engine]
        if left:
            part = ResultPart(left[:1], [failure], time.monotonic())
            self._take_message(self, Finished([part]))

    def _lose_jobs(self, detail: str, *, accuses: bool) -> None:
        """Have all jobs of the actor seen to, and find out whether it will take others."""
        log.warning("engine %s: %s", self._name, detail)
        self._stop_tasks()
        self.restarts += 1
        if self.retires:
            self.state, self.detail = "restarting", detail
            self._take_loss(self, Loss(accuses=accuses))
            self._free()
            return
        self._open_later(detail)
        self.state = "restarting"
        self._take_loss(self, Loss(accuses=accuses))

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        self._running.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine %s: a call broke", self._name, exc_info=error)
            self._lose_jobs("a call broke", accuses=False)
        elif self.retires and not self._running:
            self._free()

    def _stop_tasks(self) -> None:
        own = asyncio.current_task()
        found, self._running = [*self._running, self._opening], {}
        for task in found:
            if task is not None and task is not own:
                task.cancel()

    def refuse(self, why: str) -> None:
        """Give the actor no jobs: its model is another than that of the others."""
        log.error("engine %s: %s", self._name, why)
        self.state, self.detail = "failed", why

    def stop(self) -> None:
        """Take no message any more."""
        self._closing = True
        self._stop_tasks()

    def end(self) -> None:
        """Do nothing: actors are ended by Serve, not by one of those who ask them."""

    def read(self) -> ReplicaReading:
        """Return what the replica is at right now."""
        return ReplicaReading(self.state, self.detail, self.restarts, len(self.in_engine))

    def observe(self, queued: int) -> EngineStatus:
        """Return what is known here of the actor: how often it was lost, and what waits."""
        return EngineStatus(str(self.number), restarts=self.restarts, queued=queued)
