"""Results and events that nobody reads: bounded, and the work behind them ends."""

import asyncio
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

NONE = np.zeros((1, 0), np.float32)


def piece(*, ends: bool = False) -> GenerateOutput:
    ids = np.zeros(1, np.int32)
    return GenerateOutput(ids, "a", NONE[:, 0:0], NONE, NONE, "length" if ends else None)


def test_a_call_whose_results_are_not_read_is_ended() -> None:
    limits = SupervisionLimits(max_unread_results=10)
    handle = EngineHandle(EngineSpec("any", "fake", "here"), limits)
    handle.check_ready = lambda: None  # type: ignore[assignment, method-assign, return-value]
    handle._queue.replicas[0].is_open = True
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

    async def run() -> None:
        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        deliver(1)
        with pytest.raises(OverloadedError, match="that were not read"):
            await reading
        assert handle._waiters == {}

    asyncio.run(run())


def test_an_engine_is_told_of_a_caller_who_leaves() -> None:
    handle = EngineHandle(EngineSpec("any", "fake", "here"), SupervisionLimits())
    handle.check_ready = lambda: None  # type: ignore[assignment, method-assign, return-value]
    handle._queue.replicas[0].is_open = True
    sent: list[Any] = []
    handle.replicas[0].process = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    jobs = [GenerateJob(np.arange(3, dtype=np.int32), 100) for _ in range(2)]

    async def read() -> None:
        async for _ in handle.run(jobs):
            pass

    async def run() -> None:
        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(run())
    *_, last = sent
    assert last == Cancel([0, 1])
    assert handle._waiters == {}


def test_a_reader_who_keeps_up_is_never_ended() -> None:
    limits = SupervisionLimits(max_unread_results=10)
    handle = EngineHandle(EngineSpec("any", "fake", "here"), limits)
    handle.check_ready = lambda: None  # type: ignore[assignment, method-assign, return-value]
    handle._queue.replicas[0].is_open = True
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

    async def start() -> int:
        reading = asyncio.create_task(run())
        await asyncio.sleep(0)
        handle._deliver(handle.replicas[0], ResultPart([0] * 5, [piece()] * 5, 0.0))
        return await reading

    assert asyncio.run(start()) == 101


def test_events_wait_for_room_and_come_in_order() -> None:
    async def run() -> tuple[list[int], bytes]:
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
        return stopped, found

    stopped, found = asyncio.run(run())
    assert stopped == [0, 1], "there is room for ten bytes"
    assert found == b"0...1...2...3...4...5..."


def test_an_event_larger_than_the_room_goes_alone() -> None:
    async def run() -> bytes:
        buffer = ByteBuffer(2)
        await buffer.put(b"larger than two")
        buffer.end()
        return b"".join([part async for part in buffer.read()])

    assert asyncio.run(run()) == b"larger than two"
