"""Callers: the scopes of a key, and its limits, with tokens counted by the package `limits`.

Tokens are counted in windows of a minute, an hour and a day; a window starts with the first tokens
after the previous one. A request may start while none of the three is full. It is charged in full,
generated tokens as they arrive. With 600 tokens a minute:

    at  0 s   a request of 900 begins    minute 900 of 600, hour 900 of 36,000, day 900 of 864,000
    at 15 s   the next is refused        Retry-After: 45
    at 60 s   it begins                  the hour still has the 900

A large request uses up its minute, and many of them use up the hour or day.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from limits import RateLimitItemPerDay, RateLimitItemPerHour, RateLimitItemPerMinute
from limits.aio.storage import RedisStorage, Storage
from limits.aio.strategies import FixedWindowRateLimiter
from limits.errors import StorageError
from limits.storage import storage_from_string
from pydantic import BaseModel, ConfigDict, Field

from logsteer.errors import api_error
from logsteer.schemas import SCOPES, KeyScope
from logsteer_server.contract.jobs import Routing
from logsteer_server.settings import ConfigurationError

T = TypeVar("T")

log = logging.getLogger(__name__)

BUSY_RETRY_S = 1.0
"""Retry-After at the concurrency limit; the end of a running request is unknown."""
GRACE_S = 0.05
"""How long a request waits at the concurrency limit: a client may send the next request before the
server has counted the previous one as done."""
REDIS_TIMEOUT_S = 0.5
REDIS_AWAY_S = 5.0
"""How long Redis is not called after a failure, so that requests do not wait for it."""


class KeyLimits(BaseModel):
    """Limits of one key; null: the server's own limits apply."""

    model_config = ConfigDict(extra="forbid")

    concurrency: int | None = Field(None, ge=1, description="Requests running.")
    tokens_per_minute: int | None = Field(None, ge=1, description="Tokens given to engines.")
    stored_bytes: int | None = Field(
        None, ge=1, description="Bytes of each: vectors, overrides, adapters."
    )


class TokenCounts:
    """Tokens used by each key, in memory, or in Redis if several servers share them.

    While Redis does not answer, requests are served uncounted, and the log says so.
    Errors: ConfigurationError for a URL that cannot be used.
    """

    def __init__(self, url: str | None = None) -> None:
        options: dict[str, float | str | bool] = {
            "implementation": "redispy",
            "socket_timeout": REDIS_TIMEOUT_S,
            "socket_connect_timeout": REDIS_TIMEOUT_S,
        }
        try:
            storage = storage_from_string(
                f"async+{url or 'memory://'}", wrap_exceptions=True, **options if url else {}
            )
        except Exception as error:  # by scheme: an unknown one, a package that is missing
            raise ConfigurationError(
                f"limits_url: {error}; give redis://HOST:PORT/NUMBER and install "
                "logsteer-server[redis]"
            ) from None
        self._storage = cast(Storage, storage)
        self._limiter = FixedWindowRateLimiter(self._storage)
        self._away_until = 0.0

    async def close(self) -> None:
        """Close the connections to Redis."""
        if isinstance(self._storage, RedisStorage):
            await self._storage.bridge.storage.aclose()  # type: ignore[attr-defined]

    async def measure_wait(self, key: str, rate: int) -> float:
        """Return the seconds until a key with this rate may start a request; 0: now."""

        async def measure() -> float:
            wait_s = 0.0
            for window in _list_windows(rate):
                if not await self._limiter.test(window, key):
                    reset = (await self._limiter.get_window_stats(window, key)).reset_time
                    wait_s = max(wait_s, 1.0, reset - time.time())
            return wait_s

        return await self._ask(measure, 0.0)

    async def charge(self, key: str, rate: int, num_tokens: int) -> None:
        """Count used tokens of a key, even beyond its limit."""

        async def charge() -> None:
            for window in _list_windows(rate):
                await self._limiter.hit(window, key, cost=num_tokens)

        await self._ask(charge, None)

    async def _ask(self, call: Callable[[], Awaitable[T]], otherwise: T) -> T:
        if time.monotonic() < self._away_until:
            return otherwise
        try:
            return await call()
        except StorageError as error:
            self._away_until = time.monotonic() + REDIS_AWAY_S
            log.warning("limits_url: no answer (%s); tokens are not counted for now", error)
            return otherwise


def _list_windows(
    rate: int,
) -> tuple[RateLimitItemPerMinute, RateLimitItemPerHour, RateLimitItemPerDay]:
    return (
        RateLimitItemPerMinute(rate),
        RateLimitItemPerHour(60 * rate),
        RateLimitItemPerDay(1440 * rate),
    )


class Allowance:
    """The limits of one key, and its running requests on this server."""

    def __init__(
        self, key: str = "", limits: KeyLimits | None = None, counts: TokenCounts | None = None
    ) -> None:
        self.limits = limits or KeyLimits()
        self._key = key
        self._counts = counts
        self._num_running = 0

    async def begin(self) -> None:
        """Count a request as running, until `end`. Errors: APIError `rate_limited` at the limit."""
        limit = self.limits.concurrency
        if limit is not None and self._num_running >= limit:
            await asyncio.sleep(GRACE_S)
            if self._num_running >= limit:
                detail = (
                    f"{self._num_running} requests of this key are running, its limit is {limit}: "
                    "send fewer at once."
                )
                raise api_error("rate_limited", detail, retry_after=BUSY_RETRY_S)
        self._num_running += 1

    def end(self) -> None:
        """Count a request as done."""
        self._num_running -= 1

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are limited."""
        return self._counts is not None and self.limits.tokens_per_minute is not None

    async def check_tokens(self) -> None:
        """Refuse a request while a window is full. Errors: APIError `rate_limited`."""
        rate = self.limits.tokens_per_minute
        if self._counts is None or rate is None:
            return
        if wait_s := await self._counts.measure_wait(self._key, rate):
            detail = (
                f"This key has had its {rate} tokens a minute (or 60 times that in an hour, or "
                f"1,440 times in a day): come back in {wait_s:.0f} s."
            )
            raise api_error("rate_limited", detail, retry_after=math.ceil(wait_s))

    async def charge(self, num_tokens: int) -> None:
        """Count tokens that engines read or generated."""
        rate = self.limits.tokens_per_minute
        if self._counts is not None and rate is not None:
            await self._counts.charge(self._key, rate, num_tokens)


@dataclass(frozen=True, slots=True)
class Requester:
    """The caller of one request, and the routing of its work.

    `namespace` holds the caller's own vectors, overrides and adapters; None without keys, when all
    callers share one.
    """

    scopes: frozenset[KeyScope] = frozenset(SCOPES)
    namespace: str | None = None
    routing: Routing = field(default_factory=Routing)
    allowance: Allowance = field(default_factory=Allowance)

    def require(self, scope: KeyScope) -> None:
        """Require a scope of the key. Errors: APIError `forbidden`, which names the scope."""
        if scope not in self.scopes:
            has = ", ".join(sorted(self.scopes, key=SCOPES.index))
            detail = f"This takes a key with the scope {scope}; this one has {has}."
            raise api_error("forbidden", detail)
