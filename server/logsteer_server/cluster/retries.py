"""When models that failed are started again: ever later, while they fail in a row."""

import asyncio
from collections.abc import Callable

from logsteer_server.engines.watchdog import lengthen

GROWTH = 16.0
"""So many times the first wait is the longest."""


class LaterStarts:
    """Calls `start` with a model's id, `first_s` after it failed, after twice that, and so on."""

    def __init__(self, first_s: float, start: Callable[[str], object]) -> None:
        self._first_s = first_s
        self._start = start
        self._failures: dict[str, int] = {}
        self._waiting: dict[str, asyncio.TimerHandle] = {}

    def begin(self, model_id: str) -> float:
        """Begin to wait after one more failure; return for how many seconds."""
        count = self._failures[model_id] = self._failures.get(model_id, 0) + 1
        wait_s = lengthen(self._first_s, count, GROWTH * self._first_s)
        if (earlier := self._waiting.get(model_id)) is not None:
            earlier.cancel()
        loop = asyncio.get_running_loop()
        self._waiting[model_id] = loop.call_later(wait_s, self._start, model_id)
        return wait_s

    def forget(self, model_id: str) -> None:
        """Have the next failure of a model be the first one."""
        self._failures.pop(model_id, None)
