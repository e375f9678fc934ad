"""Who calls: what a key may do, and how much of it is left."""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from logsteer.errors import APIError, api_error
from logsteer.schemas import SCOPES, KeyScope
from logsteer_server.contract.lane import Lane
from logsteer_server.keys.entries import KeyLimits

BUSY_RETRY_S = 1.0
"""When to come back where all requests of a key are at work; nobody knows when one ends."""
GRACE_S = 0.05
"""What a request beyond its key's limit waits: who has just read an answer's end may be back before
the server has counted that request as done."""


class TokenBucket:
    """Tokens that one key has left: fills evenly up to one minute's worth.

    With 600 tokens a minute:

        at 0 s    600 left   a request of 900 begins    300 short
        at 15 s   150 short  the next is refused        Retry-After: 15
        at 40 s   100 left   it begins

    `rate`: tokens a minute; None: as many as there may be.
    """

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        left: float | None = None,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._filled_at = clock()
        self._left = float(rate or 0) if left is None else left

    @property
    def left(self) -> float:
        """What is left now; below 0 it is a debt."""
        now = self._clock()
        if self._rate is not None:
            gained = (now - self._filled_at) * self._rate / 60
            self._left = min(float(self._rate), self._left + gained)
        self._filled_at = now
        return self._left

    @property
    def is_full(self) -> bool:
        """Whether nothing is missing of a minute's worth."""
        return self._rate is None or self.left >= self._rate

    def charge(self, num_tokens: float) -> None:
        """Take tokens out, more than there are where it must be."""
        if self._rate is not None:
            self._left = self.left - num_tokens

    def change(self, rate: float | None) -> None:
        """Fill at another rate from now on; what is left, or owed, stays."""
        if rate != self._rate:
            _ = self.left
            self._rate = rate

    def lower(self, left: float) -> None:
        """Have no more than this left."""
        self._left = min(self.left, left)

    def measure_wait(self) -> float:
        """Return in how many seconds one token is left; 0 where some are."""
        left = self.left
        return 0.0 if self._rate is None or left > 0 else (1 - left) * 60 / self._rate


class Allowance:
    """How much one key may still do: requests at once, and tokens a minute (`TokenBucket`).

    A request may begin while any token is left, and is charged in full, what it generates as that
    comes: a large one leaves a debt, which later ones wait for.
    """

    def __init__(
        self, limits: KeyLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits or KeyLimits()
        self._clock = clock
        self._at_work = 0
        self._bucket = TokenBucket(self.limits.tokens_per_minute, clock)

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are limited."""
        return self.limits.tokens_per_minute is not None

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Count a request as at work. Errors: APIError `rate_limited` beyond the limit."""
        if not await self._take_place():
            await asyncio.sleep(GRACE_S)
            if not await self._take_place():
                raise self._refuse_place(self._at_work)
        try:
            yield
        finally:
            self._give_back()

    async def _take_place(self) -> bool:
        """Count a request as at work, if one more may be; return whether it may."""
        limit = self.limits.concurrency
        if limit is not None and self._at_work >= limit:
            return False
        self._at_work += 1
        return True

    def _give_back(self) -> None:
        """Count a request as at work no longer."""
        self._at_work -= 1

    def _refuse_place(self, at_work: int) -> APIError:
        detail = (
            f"{at_work} requests of this key are at work, its limit is "
            f"{self.limits.concurrency}: send fewer at once."
        )
        return api_error("rate_limited", detail, retry_after=BUSY_RETRY_S)

    def change(self, limits: KeyLimits) -> None:
        """Take other limits from now on; debts and what is at work stay."""
        self._bucket.change(limits.tokens_per_minute)
        self.limits = limits

    def check_tokens(self) -> None:
        """Refuse a request while no token is left. Errors: APIError `rate_limited`."""
        if wait_s := self._bucket.measure_wait():
            rate = self.limits.tokens_per_minute
            detail = f"This key has had its {rate} tokens a minute: come back in {wait_s:.0f} s."
            raise api_error("rate_limited", detail, retry_after=max(1, math.ceil(wait_s)))

    def charge(self, num_tokens: int) -> None:
        """Take tokens out, more than there are where it must be."""
        self._bucket.charge(num_tokens)


MakeAllowance = Callable[[str, KeyLimits, Callable[[], float]], Allowance]
"""Makes the allowance of a key, by its id, its limits and a clock."""


def make_own_allowance(_: str, limits: KeyLimits, clock: Callable[[], float]) -> Allowance:
    """Return the allowance of a key whose requests all come to this process."""
    return Allowance(limits, clock)


@dataclass(slots=True)
class Requester:
    """Who sent a request, and where its work waits; one object a request.

    `namespace` is the name under which its vectors, overrides and adapters are its own; None where
    there are no keys, and all of them are everybody's.
    """

    scopes: frozenset[KeyScope] = frozenset(SCOPES)
    namespace: str | None = None
    lane: Lane = field(default_factory=Lane)
    allowance: Allowance = field(default_factory=Allowance)

    def require(self, scope: KeyScope) -> None:
        """Refuse what the key may not do. Errors: APIError `forbidden`, with the scope."""
        if scope not in self.scopes:
            has = ", ".join(sorted(self.scopes, key=SCOPES.index))
            detail = f"This takes a key with the scope {scope}; this one has {has}."
            raise api_error("forbidden", detail)

    def lower(self) -> None:
        """Have this request's work let that of interactive ones pass."""
        self.lane = replace(self.lane, priority="batch")


def salt_caches(name: str) -> str:
    """Return what a key's cached results and prefixes are marked with: the same at every start."""
    return hashlib.sha256(b"logsteer-salt:" + name.encode()).hexdigest()
