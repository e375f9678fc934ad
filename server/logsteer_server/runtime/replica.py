"""One replica of an engine: its process, which is started, watched, and started again."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from logsteer.schemas import ModelState
from logsteer_server.contract.engine import EngineInfo, EngineSpec
from logsteer_server.observation.logs import LogStyle
from logsteer_server.observation.readings import EngineStatus
from logsteer_server.runtime.engine_process import Ended, EngineProcess
from logsteer_server.runtime.handle import ReplicaReading
from logsteer_server.runtime.process import Failed, FromEngine, Ready, ToEngine
from logsteer_server.runtime.turns import EngineCall
from logsteer_server.runtime.watchdog import RestartBudget, Watchdog, WatchLimits

log = logging.getLogger(__name__)

ENDED = "its engine was ended"


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """How an engine is fed, watched and restarted; `Settings` describes each number."""

    max_unread_results: int = 131_072
    watch: WatchLimits = field(default_factory=WatchLimits)
    max_restarts: int = 8
    restart_window_s: float = 600.0
    restart_delay_s: float = 1.0
    poison_s: float = 600.0
    suspect_wait_s: float = 60.0
    prefix_worth: float = 4.0
    style: LogStyle = field(default_factory=LogStyle)


@dataclass(frozen=True, slots=True)
class Loss:
    """What a replica had is gone with its process.

    `accuses`: the jobs may have ended it. `out_of_memory`: it had too little memory.
    """

    accuses: bool
    out_of_memory: bool = False


class Replica:
    """A process of the engine, restarted when it dies or hangs.

    `in_engine` are the jobs that it has, by id. The owner is told of three things, all on the event
    loop: a message about jobs, that the replica is ready, and that its jobs are lost.
    """

    def __init__(
        self,
        number: int,
        spec: EngineSpec,
        limits: SupervisionLimits,
        take_message: Callable[["Replica", FromEngine], None],
        take_ready: Callable[["Replica", EngineInfo], None],
        take_loss: Callable[["Replica", Loss], None],
    ) -> None:
        self.number = number
        self.spec = spec
        self.state: ModelState = "loading"
        self.detail = "starting"
        self.restarts = 0
        self.given_up = False
        self.in_engine: dict[int, EngineCall] = {}
        self.process: EngineProcess | None = None
        self._limits = limits
        self._take_message = take_message
        self._take_ready = take_ready
        self._take_loss = take_loss
        self._has_loaded = False
        self._budget = RestartBudget(
            limits.max_restarts, limits.restart_window_s, limits.restart_delay_s
        )
        self._watchdog = Watchdog(limits.watch)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._said_why = False
        self._closing = False
        self._name = spec.id if spec.replicas == 1 else f"{spec.id}, replica {number}"

    def start(self) -> None:
        """Start the process; call it from the event loop that will use the replica."""
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
            style = self._limits.style
            self.process = EngineProcess(self.spec, interval_s, self._pass_on, style)
        except (OSError, RuntimeError, MemoryError) as error:
            self.detail = f"its process could not be started: {error}"
            log.warning("engine %s: %s", self._name, self.detail)
            self._restart()

    def _pass_on(self, process: EngineProcess, message: FromEngine | Ended) -> None:
        """Hand a message to the event loop, from another thread."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, process, message)

    def send(self, message: ToEngine) -> None:
        """Send the process a message, if there is one."""
        if self.process is not None:
            self.process.send(message)

    def stop(self) -> None:
        """Take no message any more, and start nothing."""
        self._closing = True
        self.state, self.detail = "unloaded", ENDED
        if self._watching is not None:
            self._watching.cancel()

    def end(self) -> None:
        """End the process; blocks, so not to be called on the event loop."""
        if self.process is not None:
            self.process.close()

    def observe(self, queued: int) -> EngineStatus:
        """Return what the process is at, as far as its heartbeats have told; so many jobs wait."""
        process = self.process
        status = EngineStatus(str(self.number), restarts=self.restarts, queued=queued)
        if process is None:
            return status
        if (beat := process.beat) is None:
            return replace(status, pid=process.pid)
        age_s = max(0.0, time.monotonic() - process.beat_at)
        return replace(
            status, pid=process.pid, heartbeat_age_s=age_s, reading=beat.reading, steps=beat.steps
        )

    def read(self) -> ReplicaReading:
        """Return what the replica is at right now."""
        num_jobs = len(self.in_engine)
        return ReplicaReading(self.state, self.detail, self.restarts, num_jobs, number=self.number)

    async def _watch(self) -> None:
        """Kill and restart a process that hangs, until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(self._limits.watch.interval_s)
            elapsed, last = time.monotonic() - last, time.monotonic()
            process = self.process
            if process is None:
                continue
            if why := self._watchdog.look(process.beat, elapsed):
                was_stopped = process.is_stopped
                process.kill()
                log.error("engine %s hangs and is killed: %s", self._name, why)
                self._lose(Ended(why, from_outside=was_stopped))

    def _receive(self, process: EngineProcess, message: FromEngine | Ended) -> None:
        if process is not self.process or self._closing:
            return
        match message:
            case Ready(info):
                self.state, self.detail, self._has_loaded = "ready", "answers", True
                self._take_ready(self, info)
            case Failed():
                self._fail(message)
            case Ended():
                self._lose(message)
            case _:
                self._take_message(self, message)

    def refuse(self, why: str) -> None:
        """End the process, which may not answer, and start no other."""
        log.error("engine %s: %s", self._name, why)
        self.state, self.detail, self._said_why = "failed", why, True
        if self.process is not None:
            self.process.kill()

    def _fail(self, failure: Failed) -> None:
        """Note why the process is about to end, and have its jobs seen to before it has."""
        log.error("engine %s: %s", self._name, failure.detail)
        self.detail, self._said_why = failure.detail, True
        if not self._has_loaded and not failure.can_restart:
            self.state = "failed"
        elif self.state == "ready":
            self.state = "restarting"
        self._take_loss(self, Loss(accuses=True, out_of_memory=failure.out_of_memory))

    def _lose(self, ended: Ended) -> None:
        """Have the jobs seen to that the process had, and start another in its place."""
        self.process = None
        if not self._said_why:
            self.detail = ended.detail
        if self.state == "ready":
            self.state = "restarting"
        self._take_loss(self, Loss(accuses=not ended.from_outside))
        if self.state != "failed":
            self._restart()

    def _restart(self) -> None:
        """Start a process after a while, as far as the budget of restarts goes."""
        delay = self._budget.take(time.monotonic())
        if delay is None or self._loop is None:
            self.state, self.given_up = "failed", True
            self.detail = (
                f"it was given up after {self._budget.max_restarts} restarts within "
                f"{self._budget.window_s:g} s; last: {self.detail}"
            )
            log.error("engine %s: %s", self._name, self.detail)
            self._take_loss(self, Loss(accuses=False))
            return
        self.restarts += 1
        self.state = "restarting"
        log.warning(
            "engine %s: %s; restart %d in %.1f s", self._name, self.detail, self.restarts, delay
        )
        self._loop.call_later(delay, self._begin)
