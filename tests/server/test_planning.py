"""Planning in slices: turns between requests, room between slices, ends that are noticed."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from logsteer.errors import APIError, OverloadedError, PayloadTooLargeError
from logsteer_server.models.admission import Admission, Reservation
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.tasks import planning
from logsteer_server.tasks.planning import (
    BYTES_PER_CHAR,
    BYTES_PER_NUMBER,
    LONG_TEXT,
    SLICE_S,
    THREADS,
    Capacity,
    Planner,
    Steps,
)


@pytest.fixture
def capacity() -> Iterator[Capacity]:
    found = Capacity(make_settings())
    yield found
    found.close()


def make_settings(**fields: int) -> Settings:
    return Settings(models=[ModelSettings(id="any", path="here")], **fields)


def count_up(steps: int, seconds: float = 0.0, log: list[str] | None = None) -> Steps[str]:
    for n in range(steps):
        time.sleep(seconds)
        if log is not None:
            log.append(threading.current_thread().name)
        yield 10 * (n + 1)
    return "done"


class Covered(Reservation):
    """A reservation that notes what it is to cover."""

    def __init__(self) -> None:
        super().__init__(Admission(2**40))
        self.amounts: list[int] = []

    def cover(self, amount: int) -> None:
        self.amounts.append(amount)


async def advance(capacity: Capacity, steps: Steps[str], room: Reservation | None = None) -> str:
    """What the steps of a request come to."""
    return await Planner(capacity, room or Covered(), capacity.memory.enter()).advance(steps)


def test_steps_return_what_they_come_to_and_tell_what_they_plan(
    capacity: Capacity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SLICE_S", 0.1)
    room = Covered()
    assert asyncio.run(advance(capacity, count_up(20, 0.03), room)) == "done"
    assert room.amounts == sorted(room.amounts)
    assert 3 <= len(room.amounts) < 20, "several steps are a slice"


def test_cheap_steps_are_one_slice(capacity: Capacity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SLICE_S", 60.0)
    room = Covered()
    assert asyncio.run(advance(capacity, count_up(50), room)) == "done"
    assert room.amounts == []


def test_what_cannot_be_covered_ends_the_steps(capacity: Capacity) -> None:
    tokens = Admission(100)
    ran: list[str] = []

    async def run() -> None:
        with tokens.enter() as room:
            await advance(capacity, count_up(1000, SLICE_S, ran), room)

    with pytest.raises(PayloadTooLargeError, match="at most 100"):
        asyncio.run(run())
    assert len(ran) < 20
    assert tokens.pending == 0


async def test_a_short_plan_does_not_wait_for_long_ones(capacity: Capacity) -> None:
    names: list[str] = []
    long = [
        asyncio.create_task(advance(capacity, count_up(1000, SLICE_S, names))) for _ in range(10)
    ]
    while not any(name.startswith("planning-long") for name in names):
        await asyncio.sleep(SLICE_S)
    before = len(names)
    await advance(capacity, count_up(1))
    waited = len(names) - before
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    assert waited < 200, "of their 10,000 steps"


async def test_nobody_plans_for_a_caller_who_has_left(capacity: Capacity) -> None:
    ran: list[str] = []
    task = asyncio.create_task(advance(capacity, count_up(10_000, SLICE_S, ran)))
    await asyncio.sleep(5 * SLICE_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    done = len(ran)
    await asyncio.sleep(5 * SLICE_S)
    assert len(ran) - done <= 1


def make_planner(capacity: Capacity) -> Planner:
    return Planner(capacity, Admission(1000).enter(), capacity.memory.enter())


@pytest.mark.parametrize(("packs", "most"), [(True, 2**18), (False, 2**20 // BYTES_PER_NUMBER)])
def test_activations_are_bounded_by_what_they_take(packs: bool, most: int) -> None:
    capacity = Capacity(make_settings(max_activation_bytes=2**20))
    planner = Planner(capacity, Admission(1000).enter(), capacity.memory.enter(), packs)
    with pytest.raises(PayloadTooLargeError, match="max_activation_bytes") as caught:
        planner.expect_arrays(most + 1)
    assert ("safetensors" in caught.value.detail) == (not packs)
    assert capacity.memory.pending == 0
    planner.expect_arrays(most)
    assert capacity.memory.pending >= planner.expected_bytes > 2**20 - BYTES_PER_NUMBER
    capacity.close()


def test_answers_are_bounded_by_arithmetic() -> None:
    capacity = Capacity(make_settings(max_answer_bytes=2**20))
    planner = make_planner(capacity)
    planner.expect_rows(1000, 2)
    assert planner.expected_bytes == capacity.memory.pending > 1000 * 2 * 8
    with pytest.raises(PayloadTooLargeError, match="max_answer_bytes"):
        planner.expect_rows(1000, 2, alternatives=1000)


def test_memory_is_that_of_all_requests() -> None:
    capacity = Capacity(make_settings(max_pending_bytes=2**20))
    make_planner(capacity).expect_bytes(700_000)
    with pytest.raises(OverloadedError, match="bytes of memory"):
        make_planner(capacity).expect_bytes(700_000)


def test_long_texts_are_encoded_in_a_thread_of_their_own(capacity: Capacity) -> None:
    planner = make_planner(capacity)
    planner.cover_text(LONG_TEXT)
    assert capacity.memory.pending == 0
    planner.cover_text(LONG_TEXT + 1)
    assert capacity.memory.pending == (LONG_TEXT + 1) * BYTES_PER_CHAR
    names: list[str] = []
    asyncio.run(planner.advance(count_up(1, 0, names)))
    assert [name.rpartition("_")[0] for name in names] == ["planning-texts"]
    with pytest.raises(APIError, match="max_text_chars"):
        planner.cover_text(capacity.settings.max_text_chars + 1)


async def test_long_work_leaves_the_threads_of_short_plans_alone(capacity: Capacity) -> None:
    go_on = threading.Event()

    long = [asyncio.create_task(capacity.call_long(go_on.wait, 60)) for _ in range(2 * THREADS)]
    await asyncio.sleep(0)
    assert await capacity.call(int, "7") == 7
    go_on.set()
    assert all(await asyncio.gather(*long)), "the short one was answered before they ended"
