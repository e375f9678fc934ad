"""The accounts of keys whose requests come to several processes: one ledger for all of them.

Each process says where it stands, in whole numbers that are right whenever they are read: how many
requests of a key are at work there, and how many tokens it has charged since it started. So a
report that is lost, or comes twice, changes nothing, and a ledger that starts anew knows after one
report of each process what the one before it knew.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from logsteer_server.keys.caller import TokenBucket
from logsteer_server.keys.entries import KeyLimits

LEASE_S = 10.0
"""For so long a process that is not heard of keeps its places."""


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What a process says of one key, and how many requests more (`asks`) it wants to begin.

    `charged` are tokens since the process started, `settled` those of them that an answer has
    confirmed. `left` is what the last answer comes to by now; None where there was none.
    """

    key: str
    limits: KeyLimits
    at_work: int
    asks: int
    charged: int
    settled: int
    left: float | None


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """What a process is told of a key: how many requests may begin, and what all have together."""

    granted: int
    at_work: int
    left: float


@dataclass(slots=True)
class _Account:
    limits: KeyLimits
    bucket: TokenBucket
    at_work: dict[str, int] = field(default_factory=dict)
    charged: dict[str, int] = field(default_factory=dict)


class KeyLedger:
    """Requests at work and tokens left of every key that has limits and is in use.

    A process that is not heard of for `lease_s` has died, and what was at work there with it.
    """

    def __init__(
        self, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._accounts: dict[str, _Account] = {}
        self._swept_at = clock()

    def __len__(self) -> int:
        return len(self._accounts)

    def settle(self, process: str, reports: Sequence[KeyReport]) -> dict[str, KeyGrant]:
        """Take what a process reports; return what it is told of each of these keys."""
        now = self._clock()
        self._heard[process] = now
        self._end_leases(now)
        return {report.key: self._settle_one(process, report) for report in reports}

    def _settle_one(self, process: str, report: KeyReport) -> KeyGrant:
        limits = report.limits
        account = self._accounts.get(report.key)
        if account is None:
            bucket = TokenBucket(limits.tokens_per_minute, self._clock)
            account = self._accounts[report.key] = _Account(limits, bucket)
        account.limits = limits
        account.bucket.change(limits.tokens_per_minute)
        before = account.charged.get(process)
        if before is None:
            before = report.settled
            if report.left is not None:
                account.bucket.lower(report.left)
        account.bucket.charge(report.charged - before)
        account.charged[process] = report.charged
        account.at_work[process] = report.at_work
        granted = report.asks
        if limits.concurrency is not None:
            free = limits.concurrency - sum(account.at_work.values())
            granted = max(0, min(granted, free))
        account.at_work[process] += granted
        return KeyGrant(granted, sum(account.at_work.values()), account.bucket.left)

    def _end_leases(self, now: float) -> None:
        """Forget processes that are gone, and now and then keys of which there is nothing to say.

        What a process has charged is kept for as long as its key: it may only have been slow.
        """
        gone = [name for name, heard in self._heard.items() if now - heard > self._lease_s]
        for name in gone:
            del self._heard[name]
            for account in self._accounts.values():
                account.at_work.pop(name, None)
        if now - self._swept_at > self._lease_s:
            self._swept_at = now
            for key, account in list(self._accounts.items()):
                if not any(account.at_work.values()) and account.bucket.is_full:
                    del self._accounts[key]
