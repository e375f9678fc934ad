"""Threads for the stores' blocking calls, and fair turns for slow ones."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from logsteer.errors import api_error

P = ParamSpec("P")
T = TypeVar("T")

RETRY_AFTER_S = 2.0
THREADS = 8
"""Threads, all of which a hanging disk or bucket may block; slow calls use `HEAVY` of them."""
MAX_CALLS = 256
"""Most running and waiting calls: some seconds of work if a call takes 0.1 s."""
HEAVY = 2
"""Files read, converted or combined at once: each takes up to 0.5 GiB."""


class StoreThreads:
    """Run at most `max_calls` blocking calls in `threads` threads; the others wait."""

    def __init__(self, threads: int = THREADS, max_calls: int = MAX_CALLS) -> None:
        self._pool = ThreadPoolExecutor(threads, "stores")
        self._room = threading.Semaphore(max_calls)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work in a thread; return its result.

        Work that has begun runs to its end, even if its caller is cancelled. Errors: its own;
        APIError `overloaded` if too many calls wait.
        """
        if not self._room.acquire(blocking=False):
            detail = "The stores are busy: their disk or bucket is slow. Try again."
            raise api_error("overloaded", detail, retry_after=RETRY_AFTER_S)
        future = self._pool.submit(partial(work, *args, **kwargs))
        future.add_done_callback(lambda _: self._room.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Let running calls end, and drop waiting ones. Does not wait for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class FairTurns:
    """A semaphore of `at_once` turns that is fair between tenants: they alternate.

    With one turn at once, after three requests of tenant `a` and then one of `b`, the order is
    a b a a. Use it from one event loop.
    """

    def __init__(self, at_once: int = HEAVY) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._firsts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it while the block runs."""
        # Only the first request of each tenant waits for a turn; the tenant's others wait for it.
        async with self._firsts.setdefault(tenant, asyncio.Lock()):
            await self._turns.acquire()
        try:
            yield
        finally:
            self._turns.release()
