"""The limits of a key where several processes answer its requests.

    a request of a key with limits      one question to the ledger, with those of others that wait
    its end, its tokens                 told with the next question, or SETTLE_S later
    nothing new                         told again each RENEW_S, for the lease of what is at work

While the ledger does not answer, each of n processes goes on by itself with an n-th of a key's
limits, one request at least: nobody is refused because of it, and no key is without a limit.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from weakref import WeakValueDictionary

from logsteer.errors import APIError
from logsteer_server.keys.caller import Allowance, TokenBucket
from logsteer_server.keys.entries import KeyLimits
from logsteer_server.keys.ledger import KeyGrant, KeyReport

log = logging.getLogger(__name__)

SETTLE_S = 0.02
"""Shorter than what a request beyond its key's limit waits before it asks again."""
RENEW_S = 2.0
WAIT_S = 1.0
"""For an answer of the ledger; then a process goes on with its share."""
RETRY_S = 1.0

Settle = Callable[[str, Sequence[KeyReport]], Awaitable[dict[str, KeyGrant]]]
"""`KeyLedger.settle`, wherever that is; it may raise anything."""


class SharedAllowance(Allowance):
    """How much one key may still do, in this process and all others together."""

    def __init__(
        self,
        key: str,
        limits: KeyLimits,
        clock: Callable[[], float],
        accounts: "KeyAccounts",
    ) -> None:
        super().__init__(limits, clock)
        self.key = key
        self.asking: list[asyncio.Future[bool]] = []
        self._accounts = accounts
        self._everywhere = 0
        self._charged = 0
        self._settled = 0
        self._told: TokenBucket | None = None
        self._share: TokenBucket | None = None

    @property
    def is_limited(self) -> bool:
        """Whether there is anything to ask the ledger for."""
        return self.limits.concurrency is not None or self.counts_tokens

    @property
    def is_in_use(self) -> bool:
        """Whether the ledger has to hear of it again, although nothing is new."""
        return self.is_limited and (self._at_work > 0 or self._charged > self._settled)

    async def _take_place(self) -> bool:
        if not self.is_limited:
            return await super()._take_place()
        if self._accounts.is_away:
            return self._take_share()
        place = asyncio.get_running_loop().create_future()
        self.asking.append(place)
        self._accounts.ask(self)
        try:
            return bool(await place)
        except asyncio.CancelledError:
            if not place.cancelled() and place.done() and place.result():
                self._give_back()  # it was let in, and has gone in the same moment
            raise

    def _take_share(self) -> bool:
        limit = self.limits.concurrency
        if limit is not None and self._at_work >= max(1, limit // self._accounts.processes):
            return False
        self._at_work += 1
        return True

    def _give_back(self) -> None:
        super()._give_back()
        self._accounts.note(self)

    def _refuse_place(self, at_work: int) -> APIError:
        return super()._refuse_place(max(at_work, self._everywhere))

    def change(self, limits: KeyLimits) -> None:
        """Take other limits from now on; the ledger hears of them with the next request."""
        super().change(limits)
        rate = limits.tokens_per_minute
        if self._told is not None:
            self._told.change(rate)
        if self._share is not None:
            self._share.change(rate and rate / self._accounts.processes)

    def charge(self, num_tokens: int) -> None:
        """Take tokens out, here and everywhere."""
        if self.counts_tokens:
            self._bucket.charge(num_tokens)
            self._charged += num_tokens
            self._accounts.note(self)

    def report(self) -> KeyReport:
        """Return where this process stands, with all that wait for a place."""
        self.asking = [place for place in self.asking if not place.done()]
        left = None if self._told is None else self._told.left
        return KeyReport(
            self.key, self.limits, self._at_work, len(self.asking), self._charged, self._settled,
            left,
        )  # fmt: skip

    def take(self, grant: KeyGrant, reported: KeyReport) -> None:
        """Take the ledger's answer to a report."""
        self._share = None
        self._settled = reported.charged
        self._everywhere = grant.at_work
        rate = self.limits.tokens_per_minute
        self._told = TokenBucket(rate, self._clock, grant.left)
        self._bucket = TokenBucket(rate, self._clock, grant.left)
        self._bucket.charge(self._charged - self._settled)
        asked, self.asking = self.asking[: reported.asks], self.asking[reported.asks :]
        left = grant.granted
        for place in asked:
            if place.done():  # whoever asked has gone
                continue
            place.set_result(left > 0)
            self._at_work += left > 0
            left -= left > 0
        if left:
            self._accounts.note(self)

    def go_alone(self) -> None:
        """Go on with this process' share, and let those in, or not, that wait for the ledger."""
        rate, parts = self.limits.tokens_per_minute, self._accounts.processes
        if self._share is None and rate is not None:
            left = self._bucket.left
            left = left / parts if left > 0 else left  # a debt is everybody's in full
            self._bucket = self._share = TokenBucket(rate / parts, self._clock, left)
        asked, self.asking = self.asking, []
        for place in asked:
            if not place.done():
                place.set_result(self._take_share())


class KeyAccounts:
    """All keys' limits in the process of this name, one of `processes`, and the questions for them.

    There is one question at a time, for all keys with something to ask or to tell. `run` asks.
    """

    def __init__(self, name: str, settle: Settle, processes: int, wait_s: float = WAIT_S) -> None:
        self.processes = processes
        self.is_away = False
        """Whether the ledger does not answer."""
        self._settle = settle
        self._wait_s = wait_s
        self._process = name
        self._allowances: WeakValueDictionary[str, SharedAllowance] = WeakValueDictionary()
        self._due: dict[str, SharedAllowance] = {}
        self._asked = asyncio.Event()
        self._noted = asyncio.Event()

    def make(self, key: str, limits: KeyLimits, clock: Callable[[], float]) -> Allowance:
        """Return the allowance of a key."""
        own = self._allowances[key] = SharedAllowance(key, limits, clock, self)
        if self.is_away:
            own.go_alone()
        return own

    def note(self, allowance: SharedAllowance) -> None:
        """Tell the ledger of this key soon."""
        if allowance.is_limited:
            self._due[allowance.key] = allowance
            self._noted.set()

    def ask(self, allowance: SharedAllowance) -> None:
        """Ask the ledger for a place of this key at once."""
        self.note(allowance)
        self._asked.set()

    async def run(self) -> None:
        """Ask and tell the ledger, until cancelled."""
        while True:
            await self._pause()
            self._asked.clear()
            self._noted.clear()
            await self._settle_due()

    async def _pause(self) -> None:
        """Wait until there is something to ask or to tell, or all is to be told again."""
        if self.is_away:
            await asyncio.sleep(RETRY_S)
        elif await _wait(self._noted, RENEW_S):
            await _wait(self._asked, SETTLE_S)
            return
        self._due |= {key: own for key, own in self._allowances.items() if own.is_in_use}

    async def _settle_due(self) -> None:
        due, self._due = self._due, {}
        if not due and not self.is_away:
            return
        reports = {key: allowance.report() for key, allowance in due.items()}
        try:
            async with asyncio.timeout(self._wait_s):
                grants = await self._settle(self._process, list(reports.values()))
        except Exception as error:  # the network's, Ray's, or time: whatever it is, it may pass
            self._go_alone(error)
            return
        if self.is_away:
            self.is_away = False
            log.warning("the ledger of keys' limits answers again")
        for key, report in reports.items():
            due[key].take(grants[key], report)

    def _go_alone(self, error: Exception) -> None:
        if not self.is_away:
            self.is_away = True
            log.error(
                "the ledger of keys' limits does not answer (%r): each of %d ingresses goes on "
                "with its share of every limit",
                error, self.processes,
            )  # fmt: skip
        for allowance in self._allowances.values():
            if allowance.is_limited:
                allowance.go_alone()
                self._due[allowance.key] = allowance


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most so long; return whether it has come."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
