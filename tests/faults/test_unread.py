"""Results and events that nobody reads: bounded, and the work behind them ends."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from logsteer.errors import OverloadedError
from logsteer_server.api.respond import ByteBuffer
from logsteer_server.contract.batches import ResultPart
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import GenerateJob, GenerateOutput
from logsteer_server.runtime.handle import EngineHandle
from logsteer_server.runtime.process import Cancel
from logsteer_server.runtime.supervision import SupervisionLimits
from tests.conftest import ServerFactory, fake_model
from tests.faults.processes import open_request, read_card, wait_for, wait_for_jobs

NONE = np.zeros((1, 0), np.float32)


def make_handle(**limits: int) -> EngineHandle:
    """One that takes calls, without an engine."""
    handle = EngineHandle(EngineSpec("any", "fake", "here"), SupervisionLimits(**limits))
    handle.check_ready = lambda: None  # type: ignore[assignment, method-assign, return-value]
    handle._queue.replicas[0].is_open = True
    return handle


def piece(*, ends: bool = False) -> GenerateOutput:
    ids = np.zeros(1, np.int32)
    return GenerateOutput(ids, "a", NONE[:, 0:0], NONE, NONE, "length" if ends else None)


async def test_a_call_whose_results_are_not_read_is_ended() -> None:
    handle = make_handle(max_unread_results=10)
    job = GenerateJob(np.arange(3, dtype=np.int32), 100, stream=True)

    def deliver(count: int) -> None:
        handle._deliver(handle.replicas[0], ResultPart([0] * count, [piece()] * count, 0.0))

    async def read() -> list[int]:
        found = []
        async for part in handle.run([job]):
            found += part.numbers
            if len(found) == 1:  # and then it does not come back for a while
                for _ in range(4):
                    deliver(3)
        return found

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    deliver(1)
    with pytest.raises(OverloadedError, match="that were not read"):
        await reading
    assert handle._calls == set()


async def test_an_engine_is_told_of_a_caller_who_leaves() -> None:
    handle = make_handle()
    sent: list[Any] = []
    handle.replicas[0].process = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    jobs = [GenerateJob(np.arange(3, dtype=np.int32), 100) for _ in range(2)]

    async def read() -> None:
        async for _ in handle.run(jobs):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    *_, last = sent
    assert last == Cancel([0, 1])
    assert handle._calls == set()


async def test_a_reader_who_keeps_up_is_never_ended() -> None:
    handle = make_handle(max_unread_results=10)
    job = GenerateJob(np.arange(3, dtype=np.int32), 100, stream=True)

    async def run() -> int:
        found = 0
        async for part in handle.run([job]):
            found += len(part.numbers)
            if found % 5 == 0:
                count = 1 if found == 100 else 5
                own = [piece(ends=found == 100)] * count
                handle._deliver(handle.replicas[0], ResultPart([0] * count, own, 0.0))
        return found

    reading = asyncio.create_task(run())
    await asyncio.sleep(0)
    handle._deliver(handle.replicas[0], ResultPart([0] * 5, [piece()] * 5, 0.0))
    assert await reading == 101


async def test_events_wait_for_room_and_come_in_order() -> None:
    buffer = ByteBuffer(10)
    waiting: list[int] = []

    async def write() -> None:
        for n in range(6):
            await buffer.put(b"%d..." % n)
            waiting.append(n)
        buffer.end()

    writing = asyncio.create_task(write())
    await asyncio.sleep(0.01)
    stopped = list(waiting)
    found = b"".join([part async for part in buffer.read()])
    await writing
    assert stopped == [0, 1], "there is room for ten bytes"
    assert found == b"0...1...2...3...4...5..."


async def test_an_event_larger_than_the_room_goes_alone() -> None:
    buffer = ByteBuffer(2)
    await buffer.put(b"larger than two")
    buffer.end()
    assert b"".join([part async for part in buffer.read()]) == b"larger than two"


TEXT = b"Once upon a time there was a little girl who had a dog. " * 50_000


def test_a_streamed_text_ends_with_its_caller(start_server: ServerFactory) -> None:
    server = start_server({"models": [fake_model(delay_s=0.2)], "cache_bytes": 0})
    with open_request(server, "POST /perplexity/stream?context_length=64", TEXT):
        wait_for_jobs(server, "fake")

    def is_idle() -> bool:
        """Whether no job is at work, and none is a second later: between batches none is, too."""
        counts = [own["num_jobs"] for own in read_card(server, "fake")["replicas"]]
        time.sleep(1)
        return not any(counts + [own["num_jobs"] for own in read_card(server, "fake")["replicas"]])

    wait_for(is_idle, 15)
