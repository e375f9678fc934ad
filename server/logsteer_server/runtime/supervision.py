"""Whether an engine's process lives: five phases, what leads from one to the next, and when.

    starting    its model loads
    ready       it answers
    silent      it broke, hangs or was killed; its process is about to be gone
    ended       no process is left; another one is started after a while
    given up    it died too often, or for a reason that stays; none is started any more

All transitions stand in TRANSITIONS. Nothing here starts, kills or waits: `EngineHandle` tells what
happened, and does what follows from the phase.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from logsteer.schemas import ModelState
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.observation.logs import LogStyle
from logsteer_server.runtime.engine_process import EngineProcess
from logsteer_server.runtime.process import Heartbeat

Phase = Literal["starting", "ready", "silent", "ended", "given up"]
Happening = Literal["loads", "fails", "ends", "restarts", "exhausts"]

TRANSITIONS: Mapping[tuple[Phase, Happening], Phase] = {
    ("starting", "loads"): "ready",
    ("starting", "fails"): "silent",  # it says that it cannot load, or makes no progress
    ("starting", "ends"): "ended",
    ("ready", "fails"): "silent",  # it says that it broke, or hangs
    ("ready", "ends"): "ended",
    ("silent", "ends"): "ended",
    ("ended", "restarts"): "starting",
    ("ended", "exhausts"): "given up",
}
"""What is not here changes nothing: what was killed as it had just loaded stays lost."""

MAX_INTERVAL_S = 1.0
HEARTBEATS_IN_TIMEOUT = 10
LOAD_TIMEOUTS = 10
"""A load without progress hangs after so many times `heartbeat_timeout_s`: a disk or a hub that
stalls for minutes comes back, and a kill costs all that was loaded."""
LEAST_PROGRESS = 0.2
"""By which `measure_progress` grows in each second of a load that works: MiB of a slow download, or
hundredths of a core. Threads that wake up now and then in a process that hangs take less."""
RESTART_WINDOW_S = 600.0
MAX_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """How engines are fed, watched and restarted; None: for ever. `Settings` describes some.

    `max_unread_results`: results of one call that wait to be read, in tokens or targets.
    """

    heartbeat_timeout_s: float = 30.0
    max_step_s: float | None = 600.0
    max_load_s: float | None = 7200.0
    max_restarts: int = 8
    restart_delay_s: float = 1.0
    max_unread_results: int = 131_072
    style: LogStyle = field(default_factory=LogStyle)

    @property
    def interval_s(self) -> float:
        """Seconds from one heartbeat to the next, and from one look at them to the next."""
        return min(MAX_INTERVAL_S, self.heartbeat_timeout_s / HEARTBEATS_IN_TIMEOUT)


class Watchdog:
    """Says whether one engine's process hangs, by what it is told look by look.

    A hang is one of these: a load makes no progress, or takes too long altogether; no heartbeat
    comes (the process is stopped, or one call in it keeps all others from running); heartbeats come
    and the loop stands still outside of the engine; one call of the engine takes longer than a step
    may. A long step within that limit is none.

    Time counts as far as the watching process was awake: what it slept through itself, suspended
    or short of processor time, is no silence of the engine's.
    """

    def __init__(self, limits: SupervisionLimits) -> None:
        self._limits = limits
        self._last: Heartbeat | None = None
        self._loading_s = 0.0
        self._progress = 0.0
        self.stalled_s = 0.0
        """For so long a load has made no progress."""
        self._silent_s = 0.0
        self._standing_s = 0.0

    def watch_load(self, progress: float | None, elapsed_s: float) -> str | None:
        """Return why a load hangs, or None; `progress` is what `measure_progress` returns."""
        counted_s = self._count(elapsed_s)
        self._loading_s += counted_s
        self.stalled_s += counted_s
        grown = 0.0 if progress is None else progress - self._progress
        if progress is None or grown < 0 or grown >= max(1.0, LEAST_PROGRESS * self.stalled_s):
            self._progress, self.stalled_s = progress or 0.0, 0.0
        stall_s = LOAD_TIMEOUTS * self._limits.heartbeat_timeout_s
        return _exceeds(self.stalled_s, stall_s, "its load made no progress for") or _exceeds(
            self._loading_s, self._limits.max_load_s, "its model was not loaded in"
        )

    def watch_work(self, heartbeat: Heartbeat, elapsed_s: float) -> str | None:
        """Return why an engine that has loaded hangs, or None; `heartbeat` is its latest."""
        limits, counted_s = self._limits, self._count(elapsed_s)
        last, self._last = self._last, heartbeat
        is_new = last is None or heartbeat.serial != last.serial
        has_moved = last is None or heartbeat.turns != last.turns
        self._silent_s = 0.0 if is_new else self._silent_s + counted_s
        self._standing_s = 0.0 if has_moved else self._standing_s + counted_s
        silence = _exceeds(self._silent_s, limits.heartbeat_timeout_s, "it was silent for")
        if heartbeat.in_engine:
            return silence or _exceeds(self._standing_s, limits.max_step_s, "one step took")
        return silence or _exceeds(
            self._standing_s, limits.heartbeat_timeout_s, "its loop has stood still for"
        )

    def _count(self, elapsed_s: float) -> float:
        return min(elapsed_s, 2 * self._limits.interval_s)


def _exceeds(seconds: float, limit: float | None, what: str) -> str | None:
    return None if limit is None or seconds <= limit else f"{what} {limit:g} s"


class RestartBudget:
    """At most `max_restarts` restarts within RESTART_WINDOW_S, each after a longer wait.

    Both the budget and the wait recover as restarts leave the window: with 8 in 600 s, an engine
    that dies once an hour is restarted after 1 s for ever, and one that cannot be started at all is
    given up after 1 + 2 + 4 + … + 60 s, three minutes.
    """

    def __init__(self, max_restarts: int, delay_s: float) -> None:
        self.max_restarts = max_restarts
        self._delay_s = delay_s
        self._restarts: deque[float] = deque()

    def spend(self, now: float) -> float | None:
        """Return after how many seconds to restart; None where the budget is used up."""
        while self._restarts and now - self._restarts[0] >= RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= self.max_restarts:
            return None
        self._restarts.append(now)
        return min(self._delay_s * 2.0 ** min(len(self._restarts) - 1, 32), MAX_DELAY_S)


class Replica:
    """One engine of a model, over all of its processes: its phase.

    `is_lasting` says that starting it again would not help.
    """

    def __init__(self, number: int, spec: EngineSpec, limits: SupervisionLimits) -> None:
        self.number = number
        self.spec = spec
        self.name = spec.id if spec.replicas == 1 else f"{spec.id}, replica {number}"
        self.phase: Phase = "starting"
        self.restarts = 0
        self.has_loaded = False
        self.is_lasting = False
        self.is_closed = False
        self.process: EngineProcess | None = None
        self.watchdog = Watchdog(limits)
        self.since = time.monotonic()
        """When the phase began."""
        self._limits = limits
        self._reason = ""
        """Why the latest process ended, or is about to."""
        self._budget = RestartBudget(limits.max_restarts, limits.restart_delay_s)

    def apply(self, happening: Happening, reason: str = "") -> bool:
        """Go on to the phase that follows, and keep the reason; return whether there is one.

        What a process said of its failure is the reason, not how it ended then.
        """
        following = TRANSITIONS.get((self.phase, happening))
        if following is None:
            return False
        if reason and self.phase != "silent":
            self._reason = reason
        self.phase, self.since = following, time.monotonic()
        if following == "starting":
            self.watchdog = Watchdog(self._limits)
        self.has_loaded = self.has_loaded or following == "ready"
        return True

    def plan_restart(self) -> float | None:
        """Return after how many seconds to start another process; None where it is given up."""
        delay = None if self.is_lasting else self._budget.spend(time.monotonic())
        if delay is None:
            self.apply("exhausts")
        else:
            self.restarts += 1
        return delay

    @property
    def given_up(self) -> bool:
        """Whether it died too often."""
        return self.phase == "given up" and not self.is_lasting

    @property
    def state(self) -> ModelState:
        """What cards say of the phase."""
        if self.is_closed:
            return "unloaded"
        if self.phase == "ready":
            return "ready"
        if self.phase == "given up" or self.is_lasting:
            return "failed"
        return "restarting" if self.restarts or self.has_loaded else "loading"

    @property
    def detail(self) -> str:
        """What it does now, or what is wrong with it."""
        if self.is_closed:
            return "its engine was ended"
        if self.phase == "ready":
            return "answers"
        if self.given_up:
            within = f"{self._budget.max_restarts} restarts within {RESTART_WINDOW_S:g} s"
            return f"it was given up after {within}; last: {self._reason}"
        if self.phase != "starting":
            return self._reason
        stalled_s = self.watchdog.stalled_s
        is_stalled = stalled_s > self._limits.heartbeat_timeout_s
        doing = f"starting, without progress for {stalled_s:.0f} s" if is_stalled else "starting"
        return f"{doing}; before that: {self._reason}" if self._reason else doing
