"""Calls between nodes say that they are there, and are given up where they do not."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from logsteer_server.cluster.beats import beat_along, expect_beats
from tests.own_time import run_in_own_time


class Caller:
    """A call of three parts, with a pause of 0.1 s before each."""

    beat_s = 0.02

    def __init__(self) -> None:
        self.closed = False

    @beat_along
    async def count(self, most: int) -> AsyncGenerator[int, None]:
        """Count slowly."""
        try:
            for number in range(most):
                await asyncio.sleep(0.1)
                yield number
        finally:
            self.closed = True


def test_beats_fill_the_pauses_and_change_no_part() -> None:
    async def collect() -> list[int | None]:
        return [part async for part in Caller().count(3)]

    found = run_in_own_time(collect())
    assert [part for part in found if part is not None] == [0, 1, 2]
    assert found.count(None) >= 3, "several in each pause"
    assert found[-1] == 2


def test_a_caller_that_expects_them_gets_the_parts_alone() -> None:
    async def collect() -> list[int]:
        return [part async for part in expect_beats(Caller().count(3), 0.09)]

    assert run_in_own_time(collect()) == [0, 1, 2], "beats come more often than it gives up"


def test_a_silent_call_is_given_up() -> None:
    async def stay_silent() -> AsyncGenerator[int | None, None]:
        yield 1
        await asyncio.sleep(30)

    async def wait() -> None:
        parts = expect_beats(stay_silent(), 0.05)
        assert await anext(parts) == 1
        with pytest.raises(TimeoutError):
            await anext(parts)

    run_in_own_time(wait())


def test_a_call_that_is_left_ends() -> None:
    async def leave() -> bool:
        caller = Caller()
        parts = caller.count(1000)
        async for part in parts:
            if part == 0:
                break
        # In the midst of a pause, where a part is awaited.
        assert await anext(parts) is None
        await parts.aclose()
        return caller.closed

    assert run_in_own_time(leave())


def test_an_error_of_a_call_comes_through() -> None:
    class Broken:
        beat_s = 0.02

        @beat_along
        async def run(self) -> AsyncGenerator[int, None]:
            await asyncio.sleep(0.05)
            yield 1
            raise LookupError("no such job")

    async def collect() -> list[int | None]:
        return [part async for part in Broken().run()]

    with pytest.raises(LookupError, match="no such job"):
        run_in_own_time(collect())
