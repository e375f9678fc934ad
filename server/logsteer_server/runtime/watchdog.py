"""When an engine's process counts as hung, and how often it is started again."""

from collections import deque
from dataclasses import dataclass

from logsteer_server.runtime.process import Beat

MAX_INTERVAL_S = 1.0
BEATS_IN_TIMEOUT = 10
MAX_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """How long an engine may be silent, take for one step, and take to load; None: for ever."""

    heartbeat_timeout_s: float = 30.0
    max_step_s: float | None = 600.0
    max_load_s: float | None = 7200.0

    @property
    def interval_s(self) -> float:
        """Seconds from one heartbeat to the next, and from one look at them to the next."""
        return min(MAX_INTERVAL_S, self.heartbeat_timeout_s / BEATS_IN_TIMEOUT)


class Watchdog:
    """Says whether one engine's process hangs. It is told the latest heartbeat, look by look.

    A hang is one of four things: the model is not loaded in time; no heartbeat comes (the process
    is stopped, or one call in it keeps all others from running); heartbeats come and the loop
    stands still outside of the engine; one call of the engine takes longer than a step may. A long
    step within that limit is none.

    Time counts as far as the watching process was awake: what it slept through itself, suspended
    or short of processor time, is no silence of the engine's.
    """

    def __init__(self, limits: WatchLimits) -> None:
        self._limits = limits
        self._last: Beat | None = None
        self._loading_s = 0.0
        self._silent_s = 0.0
        self._standing_s = 0.0

    def look(self, beat: Beat | None, elapsed_s: float) -> str | None:
        """Return why the process hangs, or None; `beat` is None until the model is loaded."""
        limits = self._limits
        counted_s = min(elapsed_s, 2 * limits.interval_s)
        if beat is None:
            self._loading_s += counted_s
            return _exceeds(self._loading_s, limits.max_load_s, "its model was not loaded in")
        last, self._last = self._last, beat
        is_new = last is None or beat.serial != last.serial
        has_moved = last is None or beat.turns != last.turns
        self._silent_s = 0.0 if is_new else self._silent_s + counted_s
        self._standing_s = 0.0 if has_moved else self._standing_s + counted_s
        silence = _exceeds(self._silent_s, limits.heartbeat_timeout_s, "it was silent for")
        if beat.in_engine:
            return silence or _exceeds(self._standing_s, limits.max_step_s, "one step took")
        return silence or _exceeds(
            self._standing_s, limits.heartbeat_timeout_s, "its loop has stood still for"
        )


def _exceeds(seconds: float, limit: float | None, what: str) -> str | None:
    return None if limit is None or seconds <= limit else f"{what} {limit:g} s"


class RestartBudget:
    """At most `max_restarts` restarts within a sliding window, each after a longer wait.

    Both the budget and the wait recover as restarts leave the window: with 8 in 600 s, an engine
    that dies once an hour is restarted after 1 s for ever, and one that cannot be started at all is
    given up after 1 + 2 + 4 + … + 60 s, three minutes.
    """

    def __init__(self, max_restarts: int, window_s: float, delay_s: float) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._delay_s = delay_s
        self._taken: deque[float] = deque()

    def take(self, now: float) -> float | None:
        """Return after how many seconds to restart; None where the budget is used up."""
        while self._taken and now - self._taken[0] >= self.window_s:
            self._taken.popleft()
        if len(self._taken) >= self.max_restarts:
            return None
        self._taken.append(now)
        return lengthen(self._delay_s, len(self._taken), MAX_DELAY_S)


def lengthen(first_s: float, count: int, most_s: float) -> float:
    """Return how long to wait after so many failures: first_s, twice that, ... up to most_s.

    lengthen(60, 1, 960) is 60, lengthen(60, 3, 960) 240, lengthen(60, 9, 960) 960.
    """
    return min(first_s * 2.0 ** min(count - 1, 32), most_s)
