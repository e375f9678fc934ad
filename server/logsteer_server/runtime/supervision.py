"""Supervision of an engine's process: its phases, the transitions between them, and restarts.

    starting    its model loads
    ready       it answers
    silent      it broke, hangs or was killed; its process has not exited yet
    ended       its process has exited; a restart follows after a delay
    given up    it died too often, or for a permanent reason; no restart follows

TRANSITIONS lists all transitions. Nothing here starts, kills or waits: `EngineHandle` reports
events and acts on the phase.
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
"""Other events change nothing: a process that was killed just after its load stays lost."""

MAX_INTERVAL_S = 1.0
HEARTBEATS_IN_TIMEOUT = 10
LOAD_TIMEOUTS = 10
"""A load hangs after this many times `heartbeat_timeout_s` without progress: a disk or hub that
stalls for minutes recovers, and a kill discards all that was loaded."""
LEAST_PROGRESS = 0.2
"""Growth of `measure_progress` per second in a working load: MiB of a slow download, or hundredths
of a core. The occasional threads of a hanging process stay below it."""
RESTART_WINDOW_S = 600.0
MAX_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """Limits of an engine's supervision; None: unlimited. `Settings` describes some of them.

    `max_unread_results`: results of one call that are not read yet, in tokens or targets.
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
        """Seconds between heartbeats, and between checks of them."""
        return min(MAX_INTERVAL_S, self.heartbeat_timeout_s / HEARTBEATS_IN_TIMEOUT)


class Watchdog:
    """Detect whether an engine's process hangs, from regular checks.

    A process hangs if a load makes no progress or takes too long; if no heartbeat arrives (the
    process is stopped, or a call in it blocks all threads); if heartbeats arrive but the loop stops
    outside of the engine; or if one call of the engine exceeds the limit of a step.

    Only time while the watching process was awake counts: its own suspension, or lack of processor
    time, is not the engine's silence.
    """

    def __init__(self, limits: SupervisionLimits) -> None:
        self._limits = limits
        self._last: Heartbeat | None = None
        self._loading_s = 0.0
        self._progress = 0.0
        self.stalled_s = 0.0
        """Seconds since the load last made progress."""
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
        """Return why a loaded engine hangs, or None; `heartbeat` is its latest."""
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
        """Return the delay of the next restart in seconds; None if the budget is used up."""
        while self._restarts and now - self._restarts[0] >= RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= self.max_restarts:
            return None
        self._restarts.append(now)
        return min(self._delay_s * 2.0 ** min(len(self._restarts) - 1, 32), MAX_DELAY_S)


class Replica:
    """One replica of a model's engine, over all of its processes.

    `is_lasting`: its failure is permanent, so that a restart would not help.
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
        """Start of the phase, monotonic seconds."""
        self._limits = limits
        self._reason = ""
        """Why the latest process ended or is ending."""
        self._budget = RestartBudget(limits.max_restarts, limits.restart_delay_s)

    def apply(self, happening: Happening, reason: str = "") -> bool:
        """Move to the next phase and keep the reason; return whether there is a next phase.

        The reason is what the process reported as its failure, not how it ended afterwards.
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
        """Return the delay of the restart in seconds; None if the replica is given up."""
        delay = None if self.is_lasting else self._budget.spend(time.monotonic())
        if delay is None:
            self.apply("exhausts")
        else:
            self.restarts += 1
        return delay

    @property
    def given_up(self) -> bool:
        """Whether the replica died too often."""
        return self.phase == "given up" and not self.is_lasting

    @property
    def state(self) -> ModelState:
        """The model state of the phase, for cards."""
        if self.is_closed:
            return "unloaded"
        if self.phase == "ready":
            return "ready"
        if self.phase == "given up" or self.is_lasting:
            return "failed"
        return "restarting" if self.restarts or self.has_loaded else "loading"

    @property
    def detail(self) -> str:
        """What the replica is doing, or what is wrong with it."""
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
