"""What names, or contents' SHA-256, were last found to mean, and for how long that holds."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from cachetools import LRUCache

from logsteer.errors import APIError

T = TypeVar("T")

KEPT = 4096
"""Keys that were looked up lately."""


class Lookups(Generic[T]):
    """Answers of lookups, used again for `fresh_s`, and for `stale_s` where nobody answers.

    Threads may share it.
    """

    def __init__(self, fresh_s: float, stale_s: float) -> None:
        self._fresh_s = fresh_s
        self._stale_s = stale_s
        self._lock = threading.Lock()
        self._answers: LRUCache[str, tuple[float, T]] = LRUCache(KEPT)

    def find(self, key: str, ask: Callable[[], T]) -> T:
        """Return what `ask` says of a key now, or has said not long ago. Errors: its own."""
        with self._lock:
            kept = self._answers.get(key)
        age_s = 0.0 if kept is None else time.monotonic() - kept[0]
        if kept is not None and age_s < self._fresh_s:
            return kept[1]
        try:
            answer = ask()
        except APIError as error:
            if error.code != "overloaded":
                self.forget(key)
            elif kept is not None and age_s <= self._stale_s:
                return kept[1]
            raise
        self.note(key, answer)
        return answer

    def note(self, key: str, answer: T) -> None:
        """Know what a key means now."""
        with self._lock:
            self._answers[key] = time.monotonic(), answer

    def forget(self, key: str) -> None:
        """Have a key looked up when it is next used."""
        with self._lock:
            self._answers.pop(key, None)
