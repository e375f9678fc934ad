"""The queue in front of an engine: calls take turns, and the engine gets no more than it should."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.batches import ScoreJobs
from logsteer_server.contract.engine import EngineLoad, EngineRoom
from logsteer_server.contract.jobs import GenerateJob, Job, Priority, Routing, ScoreJob
from logsteer_server.runtime.queue import LOOK_AHEAD, EngineCall, FairQueue

SIZES = st.lists(st.integers(1, 12), max_size=6)


def make_call(first_id: int, *sizes: int) -> EngineCall:
    """A call with a job of each size in tokens."""
    return EngineCall([Job(np.zeros(size, np.int32)) for size in sizes], first_id)


def ids(queue: FairQueue) -> list[int]:
    return [job_id for own in queue.dequeue().values() for job_id in own.order]


RULES = {
    "calls take turns and keep the order of their jobs": (
        EngineRoom(100),
        "put 0 1 1 1 1 | put 10 1 | put 20 1 1 | sent 0 10 20 1 21 2 3",
    ),
    "the engine holds no more than the budget": (
        EngineRoom(10),
        "put 0 4 4 4 | sent 0 1 | sent | finish 0 | sent 2",
    ),
    "a job beyond the budget runs alone": (
        EngineRoom(10),
        "put 0 1 30 1 | sent 0 | finish 0 | sent 1 | finish 1 | sent 2",
    ),
    "a turn waits for room and is not jumped": (
        EngineRoom(10),
        "put 0 6 | put 10 6 | put 20 1 | sent 0 | finish 0 | sent 10 20",
    ),
    "a finished job that is finished again frees nothing more": (
        EngineRoom(10),
        "put 0 5 5 5 5 5 | sent 0 1 | finish 0 | finish 0 | finish 99 | sent 2",
    ),
    "a call without jobs waits for nothing": (EngineRoom(10), "put 0 | put 0 1 | sent 0"),
    "nothing is left when the engine is gone": (
        EngineRoom(10),
        "put 0 10 10 | sent 0 | clear | sent | put 5 10 | sent 5",
    ),
    "where nothing generates one job may, whatever it takes; what is held is told with a step": (
        EngineRoom(10, cache_tokens=20, sequences=1),
        "chat 0 50 1 | sent 0 | held 50 0 | sent | finish 0 | sent 1",
    ),
    "prompts that were read make room for the next, once": (
        EngineRoom(100, cache_tokens=10_000, sequences=100),
        "chat 0 40 40 40 40 40 40 | sent 0 1 | held 40 0 | sent 2 | finish 0 | sent"
        " | finish 1 | held 80 1 2 77 | sent 3 4",
    ),
    "texts are read past generation that waits for room and keeps its turn": (
        EngineRoom(100, cache_tokens=10_000, sequences=2),
        "chat 0 5 5 5 5 | chat 10 1 | put 20 5 5 | sent 0 10 20 21 | put 30 5 | sent 30"
        " | finish 10 | sent 1",
    ),
    "a generation waits for its turn and is not jumped": (
        EngineRoom(10_000, cache_tokens=1000, sequences=100),
        "chat 0 20 | sent 0 | held 500 0 | chat 10 600 | chat 20 20 | sent | finish 0 | held 0"
        " | sent 10 20",
    ),
    "without a cache that is told of, generation counts with all that it may come to": (
        EngineRoom(100_050),
        "chat 0 20 20 | sent 0 | finish 0 | sent 1",
    ),
    "nothing of generation is left when the engine is gone": (
        EngineRoom(100, cache_tokens=200, sequences=2),
        "chat 0 20 20 20 | sent 0 1 | held 200 0 | clear | chat 10 20 20 20 | sent 10 11",
    ),
}
"""What is put (the first id, and each job's tokens), sent, finished and held (tokens, and the jobs
whose prompts have been read), in this order.
"""


@pytest.mark.parametrize("rule", RULES)
def test_what_is_sent_when(rule: str) -> None:
    room, steps = RULES[rule]
    queue = FairQueue(room)
    for step in steps.split("|"):
        verb, *words = step.split()
        numbers = [int(word) for word in words]
        match verb:
            case "put":
                queue.put(make_call(*numbers))
            case "chat":
                queue.put(chat_call(*numbers))
            case "sent":
                assert ids(queue) == numbers
            case "finish":
                queue.finish(numbers)
            case "held":
                queue.update(EngineLoad(numbers[1:], numbers[0]))
            case "clear":
                queue.clear()


def test_a_call_goes_to_the_replica_that_it_names_while_that_is_open() -> None:
    queue = FairQueue(EngineRoom(4), replicas=2)
    named = Routing(replica=1)
    queue.put(EngineCall(make_call(0, 4, 4, 4).jobs, 0, named))
    assert queue.dequeue().keys() == {1}, "also more than it has room for"
    queue.replicas[1].is_open = False
    queue.put(EngineCall(make_call(10, 4).jobs, 10, named))
    assert queue.dequeue().keys() == {0}


def test_jobs_that_an_engine_died_with_are_sent_one_at_a_time_and_others_pass_them() -> None:
    queue = FairQueue(EngineRoom(100), replicas=2)
    died = [Job(np.full(4, n, np.int32)) for n in range(5)]
    queue.poison.record_death(died)
    queue.put(EngineCall(died, 0))
    others = ScoreJobs.of([ScoreJob(job.tokens, job.tokens) for job in died])
    queue.put(EngineCall(others, 10))
    assert sorted(ids(queue)) == [0, 1, 10, 11, 12, 13, 14], "one for each replica, and all others"
    for replica in (0, 1):
        queue.finish(range(10, 15), replica)
    assert ids(queue) == []
    queue.finish([1], 1)
    assert ids(queue) == [2]
    queue.lose(0)
    queue.poison.forget(died[4:])
    assert ids(queue) == [3, 4], "its process is gone, and an engine has answered the last"
    queue.finish([4], 0)
    queue.finish([4], 1)
    queue.put(EngineCall(died[2:3], 20))
    assert ids(queue) == []


def test_a_dropped_call_says_what_the_engine_has_of_it_and_keeps_that_room_till_the_end() -> None:
    queue = FairQueue(EngineRoom(10))
    long, short = make_call(0, 5, 5, 5, 5), make_call(10, 5)
    queue.put(long)
    assert ids(queue) == [0, 1]
    queue.finish([0])
    queue.put(short)
    assert ids(queue) == [2]
    assert queue.drop(long) == {0: [1, 2]}
    assert ids(queue) == [], "the engine may be at work on both"
    queue.finish([1])
    assert ids(queue) == [10]
    queue.finish([2])
    assert queue.drop(long) == {}
    assert queue.drop(short) == {0: [10]}


def test_a_job_that_another_replica_was_given_is_dropped_there() -> None:
    queue = FairQueue(EngineRoom(10), replicas=2)
    call = make_call(0, 5)
    queue.put(call)
    assert list(queue.dequeue()) == [0]
    queue.replicas[0].is_open = False
    queue.lose(0)
    queue.put_back(call, [0])
    assert list(queue.dequeue()) == [1]
    queue.finish([0], 0)
    assert queue.drop(call) == {1: [0]}
    queue.clear()
    assert queue.drop(call) == {}


@given(calls=st.lists(SIZES, max_size=5), budget=st.integers(1, 20), draw=st.data())
def test_every_job_gets_its_turn_within_the_budget(
    calls: list[list[int]], budget: int, draw: st.DataObject
) -> None:
    queue = FairQueue(EngineRoom(budget))
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
            queue.finish([job_id])
            running.remove(job_id)
    assert sorted(seen) == sorted(size_of)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_long_call_delays_a_short_one_by_a_job_of_each_call_before_it(count: int) -> None:
    queue = FairQueue(EngineRoom(1))
    for number in range(count):
        queue.put(make_call(1000 * number, *[1] * 50))
    queue.put(make_call(99_000, 1))
    order = []
    while taken := ids(queue):
        order += taken
        queue.finish([taken[0]])
    assert order.index(99_000) == count


# ------------------------------------------------------------------ turns between callers


def lane_call(
    first_id: int, tenant: str, *sizes: int, priority: Priority = "interactive"
) -> EngineCall:
    """A call of one tenant."""
    call = make_call(first_id, *sizes)
    return EngineCall(call.jobs, first_id, Routing(tenant, priority))


def drain(queue: FairQueue) -> list[int]:
    """The ids in the order in which an engine with room for one job gets them."""
    order: list[int] = []
    while taken := ids(queue):
        order += taken
        for job_id in taken:
            queue.finish([job_id])
    return order


def test_a_tenant_with_many_calls_gets_no_more_than_one_with_one() -> None:
    """Turns went from call to call: whoever made ten calls had ten turns of eleven."""
    queue = FairQueue(EngineRoom(1))
    for n in range(10):
        queue.put(lane_call(10 * n, "flood", 1, 1, 1))
    queue.put(lane_call(500, "ann", 1, 1, 1))
    first = drain(queue)[:6]
    assert [job_id for job_id in first if job_id >= 500] == [500, 501, 502]


def test_tenants_share_tokens_and_not_jobs() -> None:
    queue = FairQueue(EngineRoom(1))
    queue.put(lane_call(0, "long", *[10] * 10))
    queue.put(lane_call(100, "short", *[1] * 40))
    order = drain(queue)
    assert 15 <= sum(job_id >= 100 for job_id in order[: order.index(2)]) <= 25


def test_what_a_tenant_left_unused_is_not_saved_up() -> None:
    queue = FairQueue(EngineRoom(1))
    queue.put(lane_call(0, "ann", *[1] * 100))
    for _ in range(50):
        (job_id,) = ids(queue)
        queue.finish([job_id])
    queue.put(lane_call(500, "late", *[1] * 10))
    order = drain(queue)
    assert order.index(509) >= 18  # turn and turn about, not ten at once


def test_a_tenant_that_comes_back_does_not_jump_the_others() -> None:
    queue = FairQueue(EngineRoom(1))
    queue.put(lane_call(0, "ann", *[1] * 60))
    order = []
    for n in range(30):  # one call after another, each as soon as the last has ended
        if not n or order[-1] >= 200:
            queue.put(lane_call(200 + n, "big", 20))
        (job_id,) = ids(queue)
        order.append(job_id)
        queue.finish([job_id])
    assert sum(job_id >= 200 for job_id in order) == 2


def test_interactive_work_goes_first_and_batch_work_goes_on() -> None:
    queue = FairQueue(EngineRoom(1))
    queue.put(lane_call(0, "night", *[1] * 4, priority="batch"))
    queue.put(lane_call(100, "ann", *[1] * 40))
    order = drain(queue)
    assert [order.index(n) for n in range(4)] == [15, 31, 42, 43]
    queue.put(lane_call(200, "night", 1, priority="batch"))
    assert ids(queue) == [200]  # alone it does not wait


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(get_args(Priority)), SIZES)))
def test_every_job_of_every_lane_is_sent_once(calls: list[tuple[str, Priority, list[int]]]) -> None:
    queue = FairQueue(EngineRoom(12))
    expected = []
    for n, (tenant, priority, sizes) in enumerate(calls):
        queue.put(lane_call(100 * n, tenant, *sizes, priority=priority))
        expected += range(100 * n, 100 * n + len(sizes))
    assert sorted(drain(queue)) == expected


# ------------------------------------------------------------------ generation


def chat_call(first_id: int, *prompts: int, max_tokens: int = 100_000) -> EngineCall:
    """A call that continues prompts of so many tokens."""
    jobs = [GenerateJob(np.zeros(size, np.int32), max_tokens) for size in prompts]
    return EngineCall(jobs, first_id)


def test_generation_is_let_in_by_what_it_holds_now() -> None:
    """By prompt and max_tokens, one of these would fill any cache."""
    queue = FairQueue(EngineRoom(10_000, cache_tokens=1000, sequences=100))
    queue.put(chat_call(0, *[20] * 80))
    first = ids(queue)
    assert first == list(range(1000 // (20 + LOOK_AHEAD)))
    queue.update(EngineLoad(first, held_tokens=35 * len(first)))
    assert ids(queue) == []
    for job_id in first[4:]:
        queue.finish([job_id])
    assert ids(queue) == [], "that they have ended does not say what is free"
    queue.update(EngineLoad([], held_tokens=4 * 35))
    assert len(ids(queue)) == (1000 - 4 * 35 - 4 * LOOK_AHEAD) // (20 + LOOK_AHEAD)


def test_batch_work_that_is_due_and_waits_for_room_keeps_nobody_back() -> None:
    queue = FairQueue(EngineRoom(10_000, cache_tokens=10_000, sequences=1))
    queue.put(chat_call(0, 1))
    assert ids(queue) == [0]
    night = chat_call(10, 1)
    queue.put(EngineCall(night.jobs, 10, Routing("night", "batch")))
    queue.put(lane_call(100, "ann", *[1] * 40))
    assert ids(queue) == list(range(100, 140))
    queue.finish([0])
    assert ids(queue) == [10]


@given(
    calls=st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), SIZES), max_size=6),
    draw=st.data(),
)
def test_reading_and_generation_each_end_within_their_room(
    calls: list[tuple[bool, str, list[int]]], draw: st.DataObject
) -> None:
    """Whatever ends first, every job is sent once, and no more generate than may."""
    queue = FairQueue(EngineRoom(15, cache_tokens=150, sequences=3))
    expected = []
    for n, (generates, tenant, sizes) in enumerate(calls):
        jobs = (chat_call if generates else make_call)(100 * n, *sizes).jobs
        queue.put(EngineCall(jobs, 100 * n, Routing(tenant)))
        expected += range(100 * n, 100 * n + len(sizes))
    generating = {100 * n for n, (generates, _, _) in enumerate(calls) if generates}
    running: list[int] = []
    seen: list[int] = []
    while (taken := ids(queue)) or running:
        seen += taken
        running += taken
        chats = [job_id for job_id in running if job_id // 100 * 100 in generating]
        assert len(chats) <= 3
        held = draw.draw(st.integers(0, 150)) if chats else 0
        for job_id in draw.draw(st.sets(st.sampled_from(running), min_size=1)):
            queue.finish([job_id])
            running.remove(job_id)
        queue.update(EngineLoad([chat for chat in chats if chat % 2], held))
    assert sorted(seen) == expected
