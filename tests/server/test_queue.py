"""The queue in front of an engine: calls take turns, and the engine gets no more than it should."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.jobs import Job
from logsteer_server.contract.lane import Lane, Priority
from logsteer_server.engines.queue import FairQueue
from logsteer_server.engines.turns import EngineCall, TurnQueue

SIZES = st.lists(st.integers(1, 12), max_size=6)


def make_call(first_id: int, *sizes: int) -> EngineCall:
    """A call with a job of each size in tokens."""
    return EngineCall([Job(np.zeros(size, np.int32)) for size in sizes], first_id)


def ids(queue: FairQueue) -> list[int]:
    return queue.take().order


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


# ------------------------------------------------------------------ turns between callers


def lane_call(
    first_id: int, tenant: str, *sizes: int, priority: Priority = "interactive"
) -> EngineCall:
    """A call of one tenant."""
    call = make_call(first_id, *sizes)
    return EngineCall(call.jobs, first_id, Lane(tenant, priority))


def drain(queue: FairQueue) -> list[int]:
    """The ids in the order in which an engine with room for one job gets them."""
    order: list[int] = []
    while taken := ids(queue):
        order += taken
        for job_id in taken:
            queue.finish(job_id)
    return order


def test_a_tenant_with_many_calls_gets_no_more_than_one_with_one() -> None:
    """Turns went from call to call: whoever made ten calls had ten turns of eleven."""
    queue = FairQueue(1)
    for n in range(10):
        queue.put(lane_call(10 * n, "flood", 1, 1, 1))
    queue.put(lane_call(500, "ann", 1, 1, 1))
    first = drain(queue)[:6]
    assert [job_id for job_id in first if job_id >= 500] == [500, 501, 502]


def test_tenants_share_tokens_and_not_jobs() -> None:
    queue = FairQueue(1)
    queue.put(lane_call(0, "long", *[10] * 10))
    queue.put(lane_call(100, "short", *[1] * 40))
    order = drain(queue)
    assert 15 <= sum(job_id >= 100 for job_id in order[: order.index(2)]) <= 25


def test_what_a_tenant_left_unused_is_not_saved_up() -> None:
    queue = FairQueue(1)
    queue.put(lane_call(0, "ann", *[1] * 100))
    for _ in range(50):
        (job_id,) = ids(queue)
        queue.finish(job_id)
    queue.put(lane_call(500, "late", *[1] * 10))
    order = drain(queue)
    assert order.index(509) >= 18  # turn and turn about, not ten at once


def test_a_tenant_that_comes_back_does_not_jump_the_others() -> None:
    queue = FairQueue(1)
    queue.put(lane_call(0, "ann", *[1] * 60))
    order = []
    for n in range(30):  # one call after another, each as soon as the last has ended
        if not n or order[-1] >= 200:
            queue.put(lane_call(200 + n, "big", 20))
        (job_id,) = ids(queue)
        order.append(job_id)
        queue.finish(job_id)
    assert sum(job_id >= 200 for job_id in order) == 2


def test_interactive_work_goes_first_and_batch_work_goes_on() -> None:
    queue = FairQueue(1)
    queue.put(lane_call(0, "night", *[1] * 4, priority="batch"))
    queue.put(lane_call(100, "ann", *[1] * 40))
    order = drain(queue)
    assert [order.index(n) for n in range(4)] == [15, 31, 42, 43]
    queue.put(lane_call(200, "night", 1, priority="batch"))
    assert ids(queue) == [200]  # alone it does not wait


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(get_args(Priority)), SIZES)))
def test_every_job_of_every_lane_is_sent_once(calls: list[tuple[str, Priority, list[int]]]) -> None:
    queue = FairQueue(12)
    expected = []
    for n, (tenant, priority, sizes) in enumerate(calls):
        queue.put(lane_call(100 * n, tenant, *sizes, priority=priority))
        expected += range(100 * n, 100 * n + len(sizes))
    assert sorted(drain(queue)) == expected


@given(st.data())
def test_a_call_that_is_passed_by_is_taken_later(data: st.DataObject) -> None:
    turns = TurnQueue()
    calls = [
        lane_call(10 * n, data.draw(st.sampled_from("ab")), 1, 1)
        for n in range(data.draw(st.integers(1, 5)))
    ]
    for call in calls:
        turns.put(call)
    assert len(turns) == len(calls)
    seen = set()
    for _ in range(4 * len(calls)):
        seen.add(turns.peek().first_id)
        turns.pass_by()
    assert seen == {call.first_id for call in calls}
    for call in calls:
        turns.drop(call)
    assert not turns
