"""Which replica a job goes to: its prefix first, then load; turns across replicas."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from logsteer_server.contract.batches import ScoreJobs
from logsteer_server.contract.engine import EngineLoad, EngineRoom, EngineSpec
from logsteer_server.contract.jobs import GenerateJob, Job, Routing, ScoreJob
from logsteer_server.contract.plan import Adapter, Direction, Override, Site, SteeringPlan
from logsteer_server.runtime import queue as queue_module
from logsteer_server.runtime.queue import (
    BLOCK,
    EngineCall,
    FairQueue,
    PrefixMemory,
    ReplicaLoad,
    choose_replica,
    hash_blocks,
)
from logsteer_server.settings import ModelSettings

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


class TestBlocks:
    def test_equal_prefixes_have_equal_blocks(self) -> None:
        one, two = hash_blocks(score(1, 5)), hash_blocks(score(1, 6))
        assert len(one) == 4
        assert one == two
        longer = hash_blocks(replace(score(1, 5), tokens=context(1, 6 * BLOCK)))
        assert longer[:4] == one
        assert len(longer) == 6

    def test_a_block_is_known_by_all_before_it(self) -> None:
        other = context(1).copy()
        other[0] = 9
        assert set(hash_blocks(score(1, 5))).isdisjoint(hash_blocks(Job(other)))

    def test_what_no_engine_shares_has_other_blocks(self) -> None:
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
        blocks = [block for job in jobs for block in hash_blocks(job)]
        assert len(set(blocks)) == len(blocks) == 4 * len(jobs)

    def test_less_than_a_block_has_none(self) -> None:
        assert hash_blocks(Job(context(1, BLOCK - 1))) == []


class TestRule:
    def test_a_token_of_prefix_is_worth_waiting_for_so_many(self) -> None:
        replicas, blocks = [ReplicaLoad(0), ReplicaLoad(1)], hash_blocks(score(1, 5))
        replicas[0].prefixes.record(blocks, None)
        replicas[0].add(EngineCall([Job(context(1, 4 * 4 * BLOCK))], 1), [1])
        assert choose_replica(blocks, replicas).number == 0, "as much as the prefix is worth"
        replicas[0].add(EngineCall([Job(context(1, 1))], 2), [2])
        assert choose_replica(blocks, replicas).number == 1, "and one token more"
        assert choose_replica([], replicas).number == 1, "without a prefix load alone counts"

    def test_the_longer_prefix_wins(self) -> None:
        replicas, blocks = [ReplicaLoad(0), ReplicaLoad(1)], hash_blocks(score(1, 5))
        replicas[0].prefixes.record(blocks[:1], None)
        replicas[1].prefixes.record(blocks[:3], None)
        assert choose_replica(blocks, replicas).number == 1

    def test_a_replica_remembers_what_its_cache_holds(self) -> None:
        known, (old, new) = PrefixMemory(), (hash_blocks(score(n, 5)) for n in (1, 2))
        known.record(old, 4 * BLOCK)
        known.record(new[:2], 4 * BLOCK)
        assert known.count(old) == 2, "the ends go first, as in the engine's cache"
        assert known.count(new) == 2

    def test_and_forgets_it_with_its_process(self) -> None:
        queue, blocks = make_queue(), hash_blocks(score(1, 5))
        queue.put(EngineCall([score(1, 5)], 0))
        assert send(queue) == {0: 0}
        assert queue.replicas[0].prefixes.count(blocks) == 4
        queue.lose(0)
        assert queue.replicas[0].prefixes.count(blocks) == 0


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

    def test_arrays_of_jobs_are_split_the_same_way(self) -> None:
        jobs = [score(c, t) for c in range(CONTEXTS) for t in range(TARGETS)]
        found = []
        for own in (jobs, ScoreJobs.of(jobs)):
            queue = make_queue()
            queue.put(EngineCall(own, 0))
            found.append(send(queue))
        assert found[0] == found[1]

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

    def test_a_replica_that_does_not_answer_gets_nothing(self) -> None:
        queue = make_queue()
        queue.replicas[0].is_open = False
        queue.put(EngineCall([score(n, 1) for n in range(4)], 0))
        assert set(send(queue).values()) == {1}

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

    def test_tenants_take_turns_over_all_replicas(self) -> None:
        queue = FairQueue(EngineRoom(10), replicas=2)
        ten = [Job(np.zeros(10, np.int32)) for _ in range(8)]
        queue.put(EngineCall(ten, 0, Routing("ann")))
        queue.put(EngineCall(ten, 100, Routing("eve")))
        order = []
        for _ in range(8):
            for job_id, replica in send(queue).items():
                order.append("eve" if job_id >= 100 else "ann")
                queue.finish([job_id], replica)
        assert order == ["ann", "eve"] * 8


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
