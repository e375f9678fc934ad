"""An event loop with a time of its own, which passes where nothing is left to do.

What sleeps takes no time, and on a busy machine nothing is late: for tests of which everything runs
in one loop, without threads, sockets or processes.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Lets time pass in place of waiting."""

    now: float

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if found or timeout == 0:
            return found
        if timeout is None:
            raise RuntimeError("nothing is left that could happen")
        self.now += timeout
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._own = _Selector()
        self._own.now = time.monotonic()
        super().__init__(self._own)

    def time(self) -> float:
        return self._own.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Any:
        """Run it here and now: no thread is waited for."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # whoever waits for it raises it
            future.set_exception(error)
        return future


def run_in_own_time(work: Coroutine[Any, Any, T]) -> T:
    """Run this as `asyncio.run` does; `time.monotonic` is the time of its loop meanwhile."""
    with (
        asyncio.Runner(loop_factory=_Loop) as runner,
        mock.patch.object(time, "monotonic", runner.get_loop().time),
    ):
        return runner.run(work)
