"""A replica of a model as an ingress' queue has it: a place for one actor at a time."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import ActorDiedError

from logsteer_server.cluster.actors import GoneActorError
from logsteer_server.cluster.beats import expect_beats
from logsteer_server.cluster.calls import (
    BLAMELESS,
    ENGINE_LOST,
    ReplicaCalls,
    start_apart,
)
from logsteer_server.contract.jobs import JobFailure
from logsteer_server.contract.lane import Lane
from logsteer_server.contract.results import ResultPart
from logsteer_server.engines.handle import ReplicaReading
from logsteer_server.engines.process import Add, Cancel, Cancelled, Finished, JobGroup, ToEngine
from logsteer_server.engines.replica import ENDED, Loss, Replica
from logsteer_server.observation.readings import EngineStatus

log = logging.getLogger(__name__)

RETRY_S = 1.0


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
        self._silence_s = self._limits.watch.heartbeat_timeout_s
        self.status: EngineStatus | None = None
        """What the actor last said of its engine."""
        self._calls = calls
        self._take_free = take_free
        self._opening: asyncio.Task[None] | None = None
        self._running: dict[asyncio.Task[None], JobGroup] = {}

    def start(self) -> None:
        """Do nothing: Serve starts actors, and `take` is told of them."""

    def take(self, actor: str) -> None:
        """Have an actor in this place."""
        self.actor, self.retires, self.status = actor, False, None
        self._open_later("it starts")

    def expect(self, *, is_due: bool) -> None:
        """Note, without an actor, whether another is due or the model does with less."""
        if not is_due:
            self.state, self.detail = "unloaded", "no actor"
        elif self.state != "restarting":
            self.state, self.detail = "loading", "Serve starts its actor"

    @property
    def is_due(self) -> bool:
        """Whether an actor is to come, and has not."""
        return self.actor is None and self.state != "unloaded"

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
                # A call that a cut network swallowed is not waited for when the network is back.
                async with asyncio.timeout(self._silence_s):
                    info = await self._calls.describe(self.actor)
                break
            except (ActorDiedError, GoneActorError):
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
        # The actor lets generation in by what its engine's cache holds from moment to moment, which
        # is not known here: it is sent as many prompts as fit in there, and more to read.
        room = info.room
        ahead = room.ahead_tokens + (room.cache_tokens or 0)
        room = replace(room, ahead_tokens=ahead, sequences=None)
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
        alive: AsyncGenerator[ResultPart | JobFailure, None] = expect_beats(parts, self._silence_s)
        try:
            async for part in alive:
                if isinstance(part, JobFailure):
                    self._fail_call(group, part)
                    return
                ids = [group.ids[number] for number in part.numbers]
                named = ResultPart(ids, part.results, began + part.taken_at)
                self._take_message(self, Finished([named]))
        except (ActorDiedError, GoneActorError):
            self._lose_jobs("its actor died", accuses=False)
        except TimeoutError:
            self._lose_jobs(f"its actor was silent for {self._silence_s:g} s", accuses=False)
        except Exception as error:  # as above; whoever waits is not to wait for ever
            log.warning("engine %s: a call of %s ended: %r", self._name, self.actor, error)
            self._lose_jobs(f"a call ended with {type(error).__name__}", accuses=False)
        finally:
            await parts.aclose()

    def _fail_call(self, group: JobGroup, failure: JobFailure) -> None:
        """Answer a call that failed, or have its jobs seen to where the engine was lost."""
        if failure.code in ENGINE_LOST:
            self._lose_jobs(failure.detail, accuses=failure.code != BLAMELESS)
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
        self.state, self.detail = "unloaded", ENDED
        self._stop_tasks()

    def end(self) -> None:
        """Do nothing: actors are ended by Serve, not by one of those who ask them."""

    def read(self) -> ReplicaReading:
        """Return what the replica is at right now."""
        num_jobs = len(self.in_engine)
        return ReplicaReading(self.state, self.detail, self.restarts, num_jobs, number=self.number)

    def observe(self, queued: int) -> EngineStatus:
        """Return what the actor last said of its engine, how often it was lost, and what waits."""
        if self.status is None:
            return EngineStatus(str(self.number), restarts=self.restarts, queued=queued)
        return replace(
            self.status,
            replica=str(self.number),
            restarts=self.restarts,
            queued=queued,
            pid=None,  # another machine's
        )
