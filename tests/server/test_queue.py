"""The queue before engines: calls take turns, replicas share jobs, and none gets too much.

And the queues of the TransformerLens engine, without the model: order, groups, limits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logsteer_server.contract.batches import ScoreJobs
from logsteer_server.contract.engine import EngineLoad, EngineRoom, EngineSpec
from logsteer_server.contract.jobs import GenerateJob, Job, Output, Priority, Routing, ScoreJob
from logsteer_server.contract.plan import Adapter, Direction, Override, Site, SteeringPlan
from logsteer_server.engines.tlens.queue import (
    EngineLimits,
    Entry,
    JobQueue,
    Results,
)
from logsteer_server.runtime import queue as queue_module
from logsteer_server.runtime.queue import (
    BLOCK,
    LOOK_AHEAD,
    EngineCall,
    FairQueue,
    hash_context,
)
from logsteer_server.settings import ModelSettings

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


CONTEXTS = 12
TARGETS = 4


def context(number: int, length: int = 4 * BLOCK) -> np.ndarray:
    return np.full(length, 10 + number, np.int32)


def score(number: int, target: int, length: int = 4 * BLOCK) -> ScoreJob:
    tokens = np.append(context(number, length), np.int32(target))
    return ScoreJob(tokens, np.array([target, 1], np.int32))


def send(queue: FairQueue) -> dict[int, int]:
    """Job -> replica, of those that are sent now."""
    return {job: number for number, own in queue.dequeue().items() for job in own.order}


def make_queue() -> FairQueue:
    return FairQueue(EngineRoom(100_000), replicas=2)


class TestContexts:
    def test_what_no_engine_shares_is_another_context(self) -> None:
        jobs = [
            replace(score(1, 5), **fields)  # type: ignore[arg-type]
            for fields in (
                {},
                {"cache_namespace": "key"},
                {"adapter": Adapter("path", "sha")},
                {"adapter": Adapter("path", "other")},
                {"override": Override(Direction("path", "sha"), 0.5)},
                {"override": Override(Direction("path", "other"), 0.5)},
                {"override": Override(Direction("path", "sha"), 0.25)},
                {"override": Override(Direction("path", "sha"), 0.5, "float64")},
                {"plan": SteeringPlan((Site(1, "resid_post", np.ones(4, np.float32)),))},
            )
        ]
        contexts = [hash_context(job) for job in jobs]
        assert len(set(contexts)) == len(contexts)
        assert {size for _, size in contexts} == {4 * BLOCK}
        assert hash_context(score(1, 6)) == contexts[0], "the targets are not of the context"
        assert hash_context(score(1, 5, BLOCK - 1))[1] == 0

    @pytest.mark.parametrize(("more", "expected"), [(0, 0), (1, 1)])
    def test_a_token_of_it_is_worth_waiting_for_so_many(self, more: int, expected: int) -> None:
        queue = make_queue()
        queue.put(EngineCall([score(1, 5)], 0))
        assert send(queue) == {0: 0}
        queue.finish([0])
        other = EngineCall([Job(np.zeros(4 * 4 * BLOCK + more, np.int32))], 10)
        queue.replicas[0].add(other, [10])
        queue.put(EngineCall([score(1, 7), score(2, 7)], 20))
        assert send(queue) == {20: expected, 21: 1}

    def test_they_are_forgotten_with_their_process(self) -> None:
        queue = make_queue()
        queue.put(EngineCall([score(1, 5)], 0))
        assert send(queue) == {0: 0}
        queue.lose(0)
        queue.replicas[0].add(EngineCall([Job(context(1, 1))], 10), [10])
        queue.put(EngineCall([score(1, 6)], 20))
        assert send(queue) == {20: 1}


class TestSplit:
    def test_jobs_of_a_context_stay_together_and_contexts_are_shared_out(self) -> None:
        queue = make_queue()
        jobs = [score(c, t) for c in range(CONTEXTS) for t in range(TARGETS)]
        queue.put(EngineCall(jobs, 0))
        places = send(queue)
        assert len(places) == len(jobs)
        for c in range(CONTEXTS):
            assert len({places[c * TARGETS + t] for t in range(TARGETS)}) == 1, f"context {c}"
        assert Counter(places.values()) == {0: len(jobs) // 2, 1: len(jobs) // 2}

    def test_short_jobs_are_shared_out_evenly(self) -> None:
        queue = make_queue()
        queue.put(EngineCall(ScoreJobs.of([score(n, 1, 9) for n in range(100)]), 0))
        assert Counter(send(queue).values()) == {0: 50, 1: 50}

    def test_a_common_beginning_keeps_no_replica_idle(self) -> None:
        """All share 64 tokens; the second replica reads them, too, and has half of the work."""
        queue = make_queue()
        jobs = []
        for n in range(200):
            own = np.concatenate([context(0, 2 * BLOCK), context(n, 3 * BLOCK)])
            jobs.append(ScoreJob(own, np.array([1], np.int32)))
        queue.put(EngineCall(jobs, 0))
        counts = Counter(send(queue).values())
        assert abs(counts[0] - counts[1]) <= 4 * 2 * BLOCK / (5 * BLOCK) + 1

    def test_a_later_call_finds_its_context(self) -> None:
        queue = make_queue()
        for n in range(CONTEXTS):
            queue.put(EngineCall([score(n, 1)], n))
        first = send(queue)
        for job_id, replica in first.items():
            queue.finish([job_id], replica)
        for n in reversed(range(CONTEXTS)):
            queue.put(EngineCall([score(n, 2)], 100 + n))
        again = send(queue)
        assert {n: again[100 + n] for n in first} == first

    def test_a_replica_with_room_is_not_idle_while_jobs_wait(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(queue_module, "PREFIX_WORTH", 1e9)
        queue = FairQueue(EngineRoom(2 * 4 * BLOCK + 2), replicas=2)
        queue.put(EngineCall([score(0, t) for t in range(9)], 0))
        assert Counter(send(queue).values()) == {0: 2, 1: 2}

    def test_generation_counts_until_it_ends(self) -> None:
        queue = FairQueue(EngineRoom(10_000, cache_tokens=10_000, sequences=50), replicas=2)
        long = GenerateJob(np.zeros(4, np.int32), 500)
        queue.put(EngineCall([long], 0))
        assert send(queue) == {0: 0}
        queue.update(EngineLoad([0], 5), 0)
        queue.put(EngineCall([long], 10))
        assert send(queue) == {10: 1}, "the first one has read its prompt, no more"
        queue.finish([0], 0)
        queue.put(EngineCall([long], 20))
        assert send(queue) == {20: 0}

    def test_what_a_replica_had_is_sent_again_first_and_with_its_own_sizes(self) -> None:
        jobs = ScoreJobs.of([score(0, 1, length) for length in (20, 30, 5, 6)])
        call, queue = EngineCall(jobs, 0), FairQueue(EngineRoom(53))
        queue.put(call)
        assert list(send(queue)) == [0, 1]
        queue.lose(0)
        queue.put_back(call, [0, 1])
        assert call.sizes == [len(job.tokens) for job in jobs]
        assert list(send(queue)) == [0, 1]
        assert queue.replicas[0].ahead_tokens == 52
        queue.finish([0, 1])
        assert queue.replicas[0].ahead_tokens == 0
        assert list(send(queue)) == [2, 3]


class TestDevices:
    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"devices": (0, 1)}, [(0,), (1,)]),
            ({"devices": (4, 5, 6, 7), "tensor_parallel": 2}, [(4, 5), (6, 7)]),
            ({"devices": (3, 1, 2, 0), "pipeline_parallel": 2}, [(3, 1), (2, 0)]),
            ({"devices": "auto"}, ["auto", "auto"]),
        ],
    )
    def test_each_replica_has_its_own_by_order(
        self, fields: dict[str, object], expected: Sequence[object]
    ) -> None:
        specs = EngineSpec("m", "vllm", "p", replicas=2, **fields).split()  # type: ignore[arg-type]
        assert [spec.devices for spec in specs] == expected
        assert [spec.replica for spec in specs] == [0, 1]

    def test_too_few_devices_are_refused(self) -> None:
        with pytest.raises(ValueError, match="need 4 devices, 2 each, and devices lists 3"):
            ModelSettings(id="m", path="p", replicas=2, tensor_parallel=2, devices=[0, 1, 2])


# ------------------------------------------------------------------ queues of TransformerLens


class PlainQueue(JobQueue[Entry]):
    """Jobs whose first token is their group."""

    def _accept(self, job_id: int, job: Any) -> Entry:
        return Entry(job_id, job)

    def _group(self, entry: Entry) -> object:
        return int(entry.job.tokens[0])

    def run(self, batch: list[Entry]) -> Results:
        return [(entry.job_id, Output()) for entry in batch]


def take_all(queue: JobQueue[Any]) -> list[list[int]]:
    """The ids of all batches."""
    found = []
    while queue.has_work:
        batch = queue.take()
        assert [i for i, _ in queue.run(batch)] == [entry.job_id for entry in batch]
        found.append([entry.job_id for entry in batch])
    return found


def queue_of(*jobs: tuple[int, int], **limits: int) -> PlainQueue:
    """A queue of jobs of these lengths and groups, whose ids are their lengths."""
    queue = PlainQueue(None, None, EngineLimits(**limits))
    for length, group in jobs:
        queue.add(length, Job(np.full(length, group, np.int32)))
    return queue


def test_the_longest_job_says_how_many_rows_a_batch_has() -> None:
    lengths = [(10, 0), (40, 0), (25, 0), (30, 0)]
    assert take_all(queue_of(*lengths, max_batch_tokens=100)) == [[40, 30], [25, 10]]
    assert take_all(queue_of(*lengths, max_batch_rows=3)) == [[40, 30, 25], [10]]
    assert take_all(queue_of(*lengths, max_batch_tokens=1)) == [[40], [30], [25], [10]]


def test_a_batch_is_of_one_group_and_others_keep_their_place() -> None:
    queue = queue_of((9, 1), (8, 2), (7, 1), (6, 2), (5, 3))
    assert take_all(queue) == [[9, 7], [8, 6], [5]]


def test_whoever_comes_later_waits_for_those_in_front() -> None:
    queue = queue_of((10, 0), (20, 0), max_batch_rows=1)
    assert [entry.job_id for entry in queue.take()] == [20]
    queue.add(30, Job(np.zeros(30, np.int32)))
    assert take_all(queue) == [[10], [30]]


def test_dropped_jobs_are_gone() -> None:
    queue = queue_of((10, 0), (20, 0), (30, 0), max_batch_rows=1)
    queue.take()
    queue.add(5, Job(np.zeros(5, np.int32)))
    queue.drop(frozenset({20, 5, 99}))
    assert take_all(queue) == [[10]]
    assert not queue.has_work
