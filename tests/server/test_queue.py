"""The queue in front of an engine: calls take turns, and the engine gets no more than it should."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.jobs import Job
from logsteer_server.engines.queue import FairQueue
from logsteer_server.engines.turns import EngineCall

SIZES = st.lists(st.integers(1, 12), max_size=6)


def make_call(first_id: int, *sizes: int) -> EngineCall:
    """A call with a job of each size in tokens."""
    return EngineCall([Job(np.zeros(size, np.int32)) for size in sizes], first_id)


def ids(queue: FairQueue) -> list[int]:
    return [job_id for job_id, _ in queue.take().jobs]


def test_calls_take_turns_and_keep_the_order_of_their_jobs() -> None:
    queue = FairQueue(100)
    queue.put(make_call(0, 1, 1, 1, 1))
    queue.put(make_call(10, 1))
    queue.put(make_call(20, 1, 1))
    assert ids(queue) == [0, 10, 20, 1, 21, 2, 3]


def test_the_engine_holds_no_more_than_the_budget() -> None:
    queue = FairQueue(10)
    queue.put(make_call(0, 4, 4, 4))
    assert ids(queue) == [0, 1]
    assert ids(queue) == []
    queue.finish(0)
    assert ids(queue) == [2]


def test_a_job_beyond_the_budget_runs_alone() -> None:
    queue = FairQueue(10)
    queue.put(make_call(0, 1, 30, 1))
    assert ids(queue) == [0]
    queue.finish(0)
    assert ids(queue) == [1]
    queue.finish(1)
    assert ids(queue) == [2]


def test_a_turn_waits_for_room_and_is_not_jumped() -> None:
    queue = FairQueue(10)
    queue.put(make_call(0, 6))
    queue.put(make_call(10, 6))
    queue.put(make_call(20, 1))
    assert ids(queue) == [0]
    queue.finish(0)
    assert ids(queue) == [10, 20]


def test_a_dropped_call_says_what_the_engine_has_of_it_and_keeps_that_room_till_the_end() -> None:
    queue = FairQueue(10)
    long, short = make_call(0, 5, 5, 5, 5), make_call(10, 5)
    queue.put(long)
    assert ids(queue) == [0, 1]
    queue.finish(0)
    queue.put(short)
    assert ids(queue) == [2]
    assert queue.drop(long) == [1, 2]
    assert ids(queue) == [], "the engine may be at work on both"
    queue.finish(1)
    assert ids(queue) == [10]
    queue.finish(2)
    assert queue.drop(long) == []
    assert queue.drop(short) == [10]


def test_a_finished_job_that_is_finished_again_frees_nothing_more() -> None:
    queue = FairQueue(10)
    queue.put(make_call(0, 5, 5, 5, 5, 5))
    assert ids(queue) == [0, 1]
    queue.finish(0)
    queue.finish(0)
    queue.finish(99)
    assert ids(queue) == [2]


def test_a_call_without_jobs_waits_for_nothing() -> None:
    queue = FairQueue(10)
    queue.put(make_call(0))
    queue.put(make_call(0, 1))
    assert ids(queue) == [0]


def test_nothing_is_left_when_the_engine_is_gone() -> None:
    queue = FairQueue(10)
    queue.put(make_call(0, 10, 10))
    assert ids(queue) == [0]
    queue.clear()
    assert ids(queue) == []
    queue.put(make_call(5, 10))
    assert ids(queue) == [5]


@given(calls=st.lists(SIZES, max_size=5), budget=st.integers(1, 20), draw=st.data())
def test_every_job_gets_its_turn_within_the_budget(
    calls: list[list[int]], budget: int, draw: st.DataObject
) -> None:
    queue = FairQueue(budget)
    size_of: dict[int, int] = {}
    for number, sizes in enumerate(calls):
        queue.put(make_call(100 * number, *sizes))
        size_of |= {100 * number + place: size for place, size in enumerate(sizes)}
    running: list[int] = []
    seen: list[int] = []
    while (taken := ids(queue)) or running:
        seen += taken
        running += taken
        assert sum(size_of[i] for i in running) <= budget or len(running) == 1
        for job_id in draw.draw(st.sets(st.sampled_from(running), min_size=1)):
            queue.finish(job_id)
            running.remove(job_id)
    assert sorted(seen) == sorted(size_of)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_long_call_delays_a_short_one_by_a_job_of_each_call_before_it(count: int) -> None:
    queue = FairQueue(1)
    for number in range(count):
        queue.put(make_call(1000 * number, *[1] * 50))
    queue.put(make_call(99_000, 1))
    order = []
    while taken := ids(queue):
        order += taken
        queue.finish(taken[0])
    assert order.index(99_000) == count
