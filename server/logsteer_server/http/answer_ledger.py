"""Answers to writes where several processes take them: one ledger of who is at work on what.

    claim    yours      nobody has answered or is at work on it: whoever claimed it does it
             busy       another process is at work on it
             answered   with what
    end      the answer, where there is one to keep

A claim that is not renewed within its lease is free: the process that had it has died.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Literal

from cachetools import TTLCache

log = logging.getLogger(__name__)

LEASE_S = 10.0
RENEW_S = 3.0
POLL_S = 0.1
"""Between two looks at what another process is at work on."""
WAIT_S = 2.0
"""For an answer of the ledger."""
ENTRY_BYTES = 1024
"""What an entry takes beyond its answer's body, from above."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The answer to a request, by the digest of what was asked."""

    asked: bytes
    status: int
    body: bytes
    media_type: str | None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, from above."""
        return len(self.body) + ENTRY_BYTES


class AnswerStore:
    """Answers by caller and key: at most `max_bytes`, each for `keep_s` seconds."""

    def __init__(
        self, max_bytes: int, keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._kept: TTLCache[bytes, KeptAnswer] = TTLCache(
            max_bytes, keep_s, timer=clock, getsizeof=lambda answer: answer.num_bytes
        )

    def find(self, key: bytes) -> KeptAnswer | None:
        """Return the answer to what had this key, if it is known."""
        return self._kept.get(key)

    def keep(self, key: bytes, answer: KeptAnswer) -> None:
        """Keep an answer, unless it is larger than all may be."""
        if answer.num_bytes <= self._max_bytes:
            self._kept[key] = answer


@dataclass(frozen=True, slots=True)
class Claim:
    """What became of a claim: `asked` is what is at work where it is `busy`."""

    state: Literal["yours", "busy", "answered"]
    asked: bytes = b""
    answer: KeptAnswer | None = None


@dataclass(frozen=True, slots=True)
class _Holder:
    process: str
    asked: bytes
    renewed: float


class AnswerLedger:
    """Who is at work on which key, and the answers to those that are done."""

    def __init__(
        self,
        max_bytes: int,
        keep_s: float,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._answers = AnswerStore(max_bytes, keep_s, clock)
        self._lease_s = lease_s
        self._clock = clock
        self._holders: dict[bytes, _Holder] = {}

    def claim(self, process: str, key: bytes, asked: bytes) -> Claim:
        """Claim what has this key for a process, or renew its claim."""
        if (answer := self._answers.find(key)) is not None:
            return Claim("answered", answer=answer)
        now = self._clock()
        for name, own in list(self._holders.items()):
            if now - own.renewed > self._lease_s:
                del self._holders[name]
        holder = self._holders.get(key)
        if holder is not None and holder.process != process:
            return Claim("busy", holder.asked)
        self._holders[key] = _Holder(process, asked, now)
        return Claim("yours")

    def end(self, process: str, key: bytes, answer: KeptAnswer | None) -> None:
        """End a process' claim, with the answer where it succeeded."""
        if (holder := self._holders.get(key)) is not None and holder.process == process:
            del self._holders[key]
        if answer is not None:
            self._answers.keep(key, answer)


class AnotherRequestError(Exception):
    """A key came with another request than the one that is at work under it."""


class SharedAnswers:
    """The ledger of answers as one process has it.

    While it does not answer, a process knows its own answers alone: what is repeated through
    another is then applied again, and the log says that the ledger is away.
    """

    def __init__(
        self,
        process: str,
        claim: Callable[[str, bytes, bytes], Awaitable[Claim]],
        end: Callable[[str, bytes, KeptAnswer | None], Awaitable[None]],
        wait_s: float = WAIT_S,
    ) -> None:
        self._process = process
        self._claim = claim
        self._end = end
        self._wait_s = wait_s
        self._renewals: dict[bytes, asyncio.Task[None]] = {}
        self._ends: set[asyncio.Task[None]] = set()

    async def begin(self, key: bytes, asked: bytes) -> KeptAnswer | None:
        """Return the answer to what has this key, or None where it is now this process' to do.

        Waits for another process that is at work on it. Errors: AnotherRequestError.
        """
        while True:
            claim = await self._try_claim(key, asked)
            if claim is None or claim.state == "yours":
                renewal = asyncio.create_task(self._renew(key, asked), context=Context())
                self._renewals[key] = renewal
                return None
            if claim.state == "answered":
                return claim.answer
            if claim.asked != asked:
                raise AnotherRequestError
            await asyncio.sleep(POLL_S)

    async def _try_claim(self, key: bytes, asked: bytes) -> Claim | None:
        try:
            async with asyncio.timeout(self._wait_s):
                return await self._claim(self._process, key, asked)
        except Exception as error:  # the network's, Ray's, or time: whatever it is, it may pass
            log.error("the ledger of answers does not answer (%r): this ingress' own count", error)
            return None

    async def _renew(self, key: bytes, asked: bytes) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._try_claim(key, asked)

    def end(self, key: bytes, answer: KeptAnswer | None) -> None:
        """Tell the ledger that what has this key is done here; returns at once."""
        if (renewal := self._renewals.pop(key, None)) is not None:
            renewal.cancel()
        task = asyncio.create_task(self._tell(key, answer), context=Context())
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _tell(self, key: bytes, answer: KeptAnswer | None) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._end(self._process, key, answer)
        except Exception as error:  # as above; the lease of the claim ends by itself
            log.error("the ledger of answers was not told of one: %r", error)
