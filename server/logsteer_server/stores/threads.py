"""Threads of their own for what the stores do: a disk that hangs stops nothing else."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from logsteer.errors import api_error

P = ParamSpec("P")
T = TypeVar("T")

RETRY_AFTER_S = 2.0


class StoreThreads:
    """`threads` threads, and at most `max_calls` calls that run in them or wait for one."""

    def __init__(self, threads: int, max_calls: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "stores")
        self._room = threading.Semaphore(max_calls)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what blocking work returns.

        It goes on when its caller is cancelled, if it has begun. Errors: its own; APIError
        `overloaded` where as many calls wait as may.
        """
        if not self._room.acquire(blocking=False):
            detail = "The stores are busy: their disk is slow, or locked by others. Try again."
            raise api_error("overloaded", detail, retry_after=RETRY_AFTER_S)
        future = self._pool.submit(partial(work, *args, **kwargs))
        future.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Let calls at work end, and drop those that wait. Does not wait for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)
