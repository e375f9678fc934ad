"""What the log takes of one message: a few of each, and then how many more there were."""

import logging
import threading
import time
from collections.abc import Callable

from cachetools import LRUCache

SHOWN = 10
WINDOW_S = 10.0
REMEMBERED = 1024


class RepeatFilter(logging.Filter):
    """Let the first SHOWN records of one message through in WINDOW_S seconds.

    Records are of one message where they have the same logger and the same text before its
    arguments. The first one behind the window says how many were left out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: LRUCache[tuple[str, str], tuple[float, int]] = LRUCache(REMEMBERED)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        message, now, left_out = (record.name, str(record.msg)), self._clock(), 0
        with self._lock:
            began, count = self._seen.get(message, (now, 0))
            if now - began >= WINDOW_S:
                began, count, left_out = now, 0, max(0, count - SHOWN)
            self._seen[message] = (began, count + 1)
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} more like this were left out)"
            record.args = None
        return count < SHOWN
