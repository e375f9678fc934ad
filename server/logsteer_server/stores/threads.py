"""Threads for the stores' blocking calls, and turns for the slow ones."""

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
"""A disk or a bucket that hangs holds at most these; slow calls hold `HEAVY` of them."""
MAX_CALLS = 256
"""Calls that run and wait at once: some seconds of work where a call takes 0.1 s."""
HEAVY = 2
"""Files that are read, converted or combined at once: each takes up to 0.5 GiB."""


class StoreThreads:
    """`threads` threads, and at most `max_calls` calls that run in them or wait for one."""

    def __init__(self, threads: int = THREADS, max_calls: int = MAX_CALLS) -> None:
        self._pool = ThreadPoolExecutor(threads, "stores")
        self._room = threading.Semaphore(max_calls)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work in a thread; return its result.

        It runs to its end when its caller is cancelled, if it has begun. Errors: its own; APIError
        `overloaded` if too many calls wait.
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
    """At most `at_once` hold a turn; of waiting tenants, each one's first request is next in its
    turn.

    With one turn at once, a tenant `a` that asks three times and then `b` once: a b a a. It is used
    from one event loop.
    """

    def __init__(self, at_once: int = HEAVY) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._firsts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it while the block runs."""
        # A tenant's first one waits among those of all others, and its next ones behind it.
        async with self._firsts.setdefault(tenant, asyncio.Lock()):
            await self._turns.acquire()
        try:
            yield
        finally:
            self._turns.release()
