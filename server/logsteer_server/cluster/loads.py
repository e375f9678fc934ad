"""What the actors of all models have to do, for ingresses that each know their own jobs alone.

actor     posts to the ledger what it has of each ingress, and what its engine is at
ingress   reads what is new, and counts what others have sent to an actor beside its own
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from logsteer_server.observation.readings import EngineStatus

log = logging.getLogger(__name__)

EVERY_S = 0.1
"""Between two looks of an actor at whether its load has changed, and two readings."""
TELL_EVERY_S = 2.0
"""Between two posts of an actor where it has not; Prometheus asks more seldom for what is in it."""
READ_WAIT_S = 2.0
"""For so long a reading waits for news; it only bounds how late a ledger's end is noticed."""
RETRY_S = 1.0
GONE_S = 30.0
"""An actor that has posted nothing for so long is gone; it only bounds the board's memory, because
who chooses actors hears of that from Serve."""


@dataclass(frozen=True, slots=True)
class ActorLoad:
    """What one actor has: by ingress the tokens expected of jobs that have not ended.

    `application` is that of its model; `status` is what its engine's process is at.
    """

    application: str
    actor: str
    tokens: Mapping[str, int]
    status: EngineStatus


class LoadBoard:
    """The last load of every actor, each with the number of its posting."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._posted: dict[str, tuple[int, float, ActorLoad]] = {}
        self._number = 0
        self._news = asyncio.Event()

    def post(self, load: ActorLoad) -> None:
        """Take an actor's load in place of its earlier one."""
        now = self._clock()
        self._number += 1
        self._posted.pop(load.actor, None)  # so that who posted longest ago stands first
        self._posted[load.actor] = self._number, now, load
        while now - self._posted[oldest := next(iter(self._posted))][1] > GONE_S:
            del self._posted[oldest]
        self._news.set()
        self._news = asyncio.Event()

    async def read(
        self, after: int, wait_s: float = READ_WAIT_S
    ) -> tuple[int, Sequence[ActorLoad]]:
        """Return what was posted after a number, and up to which one; waits a while for news.

        A number that was not reached yet is another board's: everything is new then.
        """
        if after > self._number:
            after = 0
        if after == self._number:
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                return self._number, ()
        return self._number, [load for n, _, load in self._posted.values() if n > after]


class LoadReader:
    """Reads a board while `run` does, and hands on what is new; while it is away, all is forgotten.

    `has_read` is set once it was asked the first time.
    """

    def __init__(
        self,
        read: Callable[[int], Awaitable[tuple[int, Sequence[ActorLoad]]]],
        take: Callable[[ActorLoad], None],
        forget: Callable[[], None],
        every_s: float = EVERY_S,
    ) -> None:
        self.is_away = False
        self.has_read = asyncio.Event()
        self._read = read
        self._take = take
        self._forget = forget
        self._every_s = every_s

    async def run(self) -> None:
        """Read until cancelled."""
        number = -1  # which has no board wait for news
        while True:
            try:
                async with asyncio.timeout(2 * READ_WAIT_S):
                    number, loads = await self._read(number)
            except Exception as error:  # the network's, Ray's, or time: whatever it is, it may pass
                if not self.is_away:
                    log.warning("what other ingresses have sent to actors is not known: %r", error)
                    self._forget()
                self.is_away = True
                self.has_read.set()
                await asyncio.sleep(RETRY_S)
                continue
            self.is_away = False
            for load in loads:
                self._take(load)
            self.has_read.set()
            await asyncio.sleep(self._every_s)


async def post_loads(
    measure: Callable[[], ActorLoad],
    post: Callable[[ActorLoad], Awaitable[None]],
    every_s: float = EVERY_S,
) -> None:
    """Post an actor's load whenever it has changed, and now and then, until cancelled."""
    tokens: Mapping[str, int] | None = None
    posted_at = 0.0
    while True:
        load = measure()
        if load.tokens != tokens or time.monotonic() - posted_at > TELL_EVERY_S:
            try:
                async with asyncio.timeout(READ_WAIT_S):
                    await post(load)
                tokens, posted_at = load.tokens, time.monotonic()
            except Exception as error:  # as above
                log.debug("the ledger was not told what this actor has: %r", error)
                await asyncio.sleep(RETRY_S)
        await asyncio.sleep(every_s)
