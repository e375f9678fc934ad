"""Limits of keys whose requests come to several processes: a ledger, and processes that ask it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from logsteer.errors import APIError
from logsteer_server.keys.caller import Allowance
from logsteer_server.keys.entries import KeyLimits
from logsteer_server.keys.ledger import KeyGrant, KeyLedger, KeyReport
from logsteer_server.keys.shared import KeyAccounts
from tests.own_time import run_in_own_time

WAIT_S = 0.2
KEY = "3f9c52d01b7e"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Line:
    """What leads to a ledger, which may be cut, and lose answers."""

    def __init__(self, clock: Clock) -> None:
        self.ledger = KeyLedger(clock=clock)
        self.is_cut = False
        self.loses_answers = False
        self.calls = 0

    async def settle(self, process: str, reports: Sequence[KeyReport]) -> dict[str, KeyGrant]:
        self.calls += 1
        if self.is_cut:
            await asyncio.sleep(10)
        await asyncio.sleep(0.001)
        found = self.ledger.settle(process, reports)
        if self.loses_answers:
            await asyncio.sleep(10)
        return found


@asynccontextmanager
async def ask_as(line: Line, number: int) -> AsyncIterator[list[KeyAccounts]]:
    """So many processes that ask one ledger."""
    found = [KeyAccounts(str(n), line.settle, number, WAIT_S) for n in range(number)]
    tasks = [asyncio.create_task(own.run()) for own in found]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def begin(allowance: Allowance, stack: AsyncExitStack) -> bool:
    """Whether one more request may begin; it is at work until the stack is left."""
    with suppress(APIError):
        await stack.enter_async_context(allowance.enter())
        return True
    return False


def test_places_are_those_of_all_processes() -> None:
    async def work() -> None:
        clock = Clock()
        async with ask_as(Line(clock), 3) as processes:
            own = [each.make(KEY, KeyLimits(concurrency=5), clock) for each in processes]
            async with AsyncExitStack() as stack:
                began = await asyncio.gather(*(begin(own[n % 3], stack) for n in range(12)))
                assert sum(began) == 5
                with pytest.raises(APIError, match="5 requests of this key are at work") as caught:
                    await stack.enter_async_context(own[0].enter())
                assert (caught.value.code, caught.value.retry_after) == ("rate_limited", 1)
            await asyncio.sleep(0.1)
            async with AsyncExitStack() as stack:
                began = await asyncio.gather(*(begin(own[0], stack) for n in range(12)))
                assert sum(began) == 5, "all places were given back, and one process may have all"

    run_in_own_time(work())


def test_whoever_goes_while_it_waits_takes_no_place() -> None:
    async def work() -> None:
        clock = Clock()
        line = Line(clock)
        async with ask_as(line, 2) as processes, AsyncExitStack() as stack:
            own = [each.make(KEY, KeyLimits(concurrency=1), clock) for each in processes]
            gone = asyncio.create_task(begin(own[0], stack))
            while not line.calls:
                await asyncio.sleep(0)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            await asyncio.sleep(0.1)
            assert await begin(own[1], stack)

    run_in_own_time(work())


def test_tokens_are_those_of_all_processes() -> None:
    async def work() -> None:
        clock = Clock()
        async with ask_as(Line(clock), 2) as processes:
            own = [each.make(KEY, KeyLimits(tokens_per_minute=600), clock) for each in processes]
            for allowance in own:
                async with allowance.enter():
                    allowance.check_tokens()
                    allowance.charge(450)
                await asyncio.sleep(0.1)
            for allowance in own:
                async with allowance.enter():
                    with pytest.raises(APIError) as caught:
                        allowance.check_tokens()
                assert (caught.value.code, caught.value.retry_after) == ("rate_limited", 31)
            clock.now += 31
            async with own[0].enter():
                own[0].check_tokens()

    run_in_own_time(work())


def test_an_answer_that_is_lost_counts_nothing_twice() -> None:
    async def work() -> None:
        clock = Clock()
        line = Line(clock)
        async with ask_as(line, 2) as processes:
            limits = KeyLimits(concurrency=4, tokens_per_minute=600)
            own = [each.make(KEY, limits, clock) for each in processes]
            async with own[0].enter():
                own[0].charge(300)
                line.loses_answers = True
                await asyncio.sleep(WAIT_S + 0.1)
                assert processes[0].is_away
            line.loses_answers = False
            await asyncio.sleep(1.2)
            async with own[1].enter():
                own[1].check_tokens()
                own[1].charge(299)
                own[1].check_tokens()
                own[1].charge(2)
                with pytest.raises(APIError):
                    own[1].check_tokens()
            await asyncio.sleep(0.1)
            async with AsyncExitStack() as stack:
                began = [await begin(own[1], stack) for _ in range(5)]
            assert began == [True] * 4 + [False]

    run_in_own_time(work())


def test_without_the_ledger_each_goes_on_with_its_share(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        clock = Clock()
        line = Line(clock)
        line.is_cut = True
        async with ask_as(line, 2) as processes, AsyncExitStack() as stack:
            limits = KeyLimits(concurrency=5, tokens_per_minute=600)
            own = [each.make(KEY, limits, clock) for each in processes]
            began = await asyncio.gather(*(begin(own[n % 2], stack) for n in range(12)))
            assert sum(began) == 4, "two of five for each of two"
            assert "each of 2 ingresses goes on with its share" in caplog.text
            own[0].charge(301)
            with pytest.raises(APIError):
                own[0].check_tokens()
            own[1].check_tokens()
            started = asyncio.get_running_loop().time()
            assert not await begin(own[0], stack)
            assert asyncio.get_running_loop().time() - started < WAIT_S, "it does not wait again"
            new = processes[0].make("another", KeyLimits(tokens_per_minute=600), clock)
            new.charge(301)
            with pytest.raises(APIError):
                new.check_tokens()
            # A ledger that comes anew knows what is at work, and what was charged meanwhile.
            line.ledger, line.is_cut = KeyLedger(clock=clock), False
            await asyncio.sleep(1.5)
            assert not any(each.is_away for each in processes)
            assert await begin(own[0], stack)
            assert not await begin(own[1], stack)
            own[1].charge(298)
            own[1].check_tokens()
            own[1].charge(2)
            with pytest.raises(APIError):
                own[1].check_tokens()

    run_in_own_time(work())


def test_a_new_ledger_begins_with_what_processes_knew() -> None:
    async def work() -> None:
        clock = Clock()
        line = Line(clock)
        async with ask_as(line, 2) as processes:
            own = [each.make(KEY, KeyLimits(tokens_per_minute=600), clock) for each in processes]
            async with own[0].enter():
                own[0].charge(900)
            await asyncio.sleep(0.1)
            async with own[1].enter():  # it was told of the debt
                pass
            line.ledger = KeyLedger(clock=clock)
            async with own[1].enter():
                with pytest.raises(APIError):
                    own[1].check_tokens()

    run_in_own_time(work())


def report(key: str = KEY, at_work: int = 0, asks: int = 1) -> KeyReport:
    return KeyReport(key, KeyLimits(concurrency=3), at_work, asks, 0, 0, None)


def test_places_of_a_process_that_died_are_given_back_after_its_lease() -> None:
    clock = Clock()
    ledger = KeyLedger(10.0, clock)
    assert ledger.settle("dead", [report(asks=3)])[KEY].granted == 3
    clock.now += 9
    assert ledger.settle("alive", [report(asks=3)])[KEY].granted == 0
    clock.now += 2
    assert ledger.settle("alive", [report(asks=2)])[KEY].granted == 2
    # It was only slow: what it has at work counts, and nobody is thrown out.
    assert ledger.settle("dead", [report(at_work=3, asks=1)])[KEY] == KeyGrant(0, 5, 0.0)


def test_keys_that_nobody_uses_are_forgotten() -> None:
    clock = Clock()
    ledger = KeyLedger(10.0, clock)
    for n in range(100):
        ledger.settle("one", [report(str(n), asks=0)])
    assert len(ledger) == 100
    clock.now += 11
    ledger.settle("one", [report("used")])
    assert len(ledger) == 1
