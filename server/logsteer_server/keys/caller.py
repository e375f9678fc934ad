"""Who calls: what a key may do, and how much of it is left."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from logsteer.errors import api_error
from logsteer.schemas import SCOPES, KeyScope
from logsteer_server.contract.lane import Lane
from logsteer_server.keys.entries import KeyLimits

BUSY_RETRY_S = 1.0
"""When to come back where all requests of a key are at work; nobody knows when one ends."""


class Allowance:
    """How much one key may still do: requests at once, and tokens a minute.

    Tokens are a bucket that fills evenly up to one minute's worth. A request may begin while
    anything is in it, and is charged in full, what it generates as that comes: a large one leaves
    a debt, which later ones wait for. With 600 tokens a minute:

        at 0 s    600 left   a request of 900 begins    300 short
        at 15 s   150 short  the next is refused        Retry-After: 15
        at 40 s   100 left   it begins
    """

    def __init__(
        self, limits: KeyLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits or KeyLimits()
        self._clock = clock
        self._at_work = 0
        self._filled_at = clock()
        self._left = float(self.limits.tokens_per_minute or 0)

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are limited."""
        return self.limits.tokens_per_minute is not None

    @property
    def is_full(self) -> bool:
        """Whether as many requests are at work as may be."""
        limit = self.limits.concurrency
        return limit is not None and self._at_work >= limit

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count a request as at work. Errors: APIError `rate_limited` beyond the limit."""
        if self.is_full:
            limit = self.limits.concurrency
            detail = f"{self._at_work} requests of this key are at work, its limit is {limit}: "
            raise api_error(
                "rate_limited", detail + "send fewer at once.", retry_after=BUSY_RETRY_S
            )
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1

    def change(self, limits: KeyLimits) -> None:
        """Take other limits from now on; debts and what is at work stay."""
        self._fill()
        self.limits = limits

    def check_tokens(self) -> None:
        """Refuse a request while no token is left. Errors: APIError `rate_limited`."""
        rate = self.limits.tokens_per_minute
        if rate is None:
            return
        self._fill()
        if self._left <= 0:
            wait_s = (1 - self._left) * 60 / rate
            detail = f"This key has had its {rate} tokens a minute: come back in {wait_s:.0f} s."
            raise api_error("rate_limited", detail, retry_after=max(1, math.ceil(wait_s)))

    def charge(self, num_tokens: int) -> None:
        """Take tokens out, more than there are where it must be."""
        if self.counts_tokens:
            self._fill()
            self._left -= num_tokens

    def _fill(self) -> None:
        now, rate = self._clock(), self.limits.tokens_per_minute
        if rate is not None:
            self._left = min(float(rate), self._left + (now - self._filled_at) * rate / 60)
        self._filled_at = now


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
