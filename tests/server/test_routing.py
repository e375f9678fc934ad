"""Which replica a job goes to: its prefix first, then load; turns and suspects across replicas."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from logsteer_server.contract.batches import ScoreJobs
from logsteer_server.contract.engine import EngineLoad, EngineRoom, EngineSpec
from logsteer_server.contract.jobs import GenerateJob, Job, ScoreJob
from logsteer_server.contract.lane import Lane
from logsteer_server.contract.parameters import Adapter
from logsteer_server.contract.plan import Site, SteeringPlan
from logsteer_server.runtime.occupancy import FULL, Occupancy
from logsteer_server.runtime.queue import FairQueue, NextJobs
from logsteer_server.runtime.routing import BLOCK, Router, hash_blocks
from logsteer_server.runtime.suspects import SETTLE_S, TRIAL_S, Quarantine
from logsteer_server.runtime.turns import EngineCall
from logsteer_server.settings import ModelSettings

CONTEXTS = 12
TARGETS = 4


def context(number: int, length: int = 4 * BLOCK) -> np.ndarray:
    return np.full(length, 10 + number, np.int32)


def score(number: int, target: int, length: int = 4 * BLOCK) -> ScoreJob:
    tokens = np.append(context(number, length), np.int32(target))
    return ScoreJob(tokens, np.array([target, 1], np.int32))


def find_places(taken: NextJobs) -> dict[int, int]:
    """Job -> replica."""
    return {job: number for number, own in taken.by_replica.items() for job in own.order}


def make_queue(**fields: object) -> FairQueue:
    return FairQueue(EngineRoom(100_000), replicas=2, **fields)  # type: ignore[arg-type]


def find_work(places: Sequence[Occupancy]) -> np.ndarray:
    return np.array([place.load for place in places])


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

    @pytest.mark.parametrize(
        "fields",
        [
            {"salt": "key"},
            {"adapter": Adapter("path", "sha")},
            {"plan": SteeringPlan((Site(1, "resid_post", np.ones(4, np.float32)),))},
        ],
    )
    def test_what_no_engine_shares_has_other_blocks(self, fields: dict[str, object]) -> None:
        plain, changed = score(1, 5), replace(score(1, 5), **fields)  # type: ignore[arg-type]
        assert set(hash_blocks(plain)).isdisjoint(hash_blocks(changed))

    def test_less_than_a_block_has_none(self) -> None:
        assert hash_blocks(Job(context(1, BLOCK - 1))) == []


class TestRule:
    def test_a_token_of_prefix_is_worth_waiting_for_so_many(self) -> None:
        router, places = Router(2, 4.0), [Occupancy(0), Occupancy(1)]
        blocks = hash_blocks(score(1, 5))
        router.note(blocks, places[0])
        places[0].add([1], [4 * 4 * BLOCK])
        assert router.choose(blocks, find_work(places)) == 0, "as much as the prefix is worth"
        places[0].add([2], [1])
        assert router.choose(blocks, find_work(places)) == 1, "and one token more"
        assert router.choose([], find_work(places)) == 1, "without a prefix load alone counts"

    def test_the_longer_prefix_wins(self) -> None:
        router, places = Router(2, 4.0), [Occupancy(0), Occupancy(1)]
        blocks = hash_blocks(score(1, 5))
        router.note(blocks[:1], places[0])
        router.note(blocks[:3], places[1])
        assert router.choose(blocks, find_work(places)) == 1

    def test_a_replica_remembers_what_its_cache_holds_and_forgets_with_its_process(self) -> None:
        router = Router(1, 4.0)
        place = Occupancy(0, EngineRoom(cache_tokens=4 * BLOCK))
        old, new = hash_blocks(score(1, 5)), hash_blocks(score(2, 5))
        router.note(old, place)
        router.note(new[:2], place)
        assert router._known[0].count(old) == 2, "the ends go first, as in the engine's cache"
        assert router._known[0].count(new) == 2
        router.forget(0)
        assert router._known[0].count(new) == 0


class PlainRouter:
    """The rule, asked of every replica about every job."""

    def __init__(self, replicas: int, worth: float, blocks: int) -> None:
        self.known: list[list[int]] = [[] for _ in range(replicas)]
        self.worth, self.limit = worth, blocks

    def choose(self, blocks: Sequence[int], work: Sequence[int]) -> int:
        def cost(number: int) -> float:
            known = self.known[number]
            count = next((n for n, b in enumerate(blocks) if b not in known), len(blocks))
            return work[number] - self.worth * BLOCK * count

        return min((n for n, own in enumerate(work) if own < FULL), key=cost)

    def note(self, blocks: Sequence[int], number: int) -> None:
        old = [block for block in self.known[number] if block not in blocks]
        self.known[number] = [*old, *reversed(blocks)][-self.limit :]


@pytest.mark.parametrize("worth", [0.0, 0.5, 4.0])
def test_the_router_chooses_as_if_it_asked_every_replica(worth: float) -> None:
    rng = np.random.default_rng(0)
    replicas, limit = 7, 12
    plain, router = PlainRouter(replicas, worth, limit), Router(replicas, worth)
    places = [Occupancy(n, EngineRoom(cache_tokens=limit * BLOCK)) for n in range(replicas)]
    chosen = Counter()
    for _ in range(1500):
        first, length = int(rng.integers(5)), int(rng.integers(1, 6))
        blocks = [
            1000 * first,
            *(1000 * first + 1 + 10 * n + int(rng.integers(2)) for n in range(length)),
        ]
        work = rng.integers(0, 40, replicas) * BLOCK
        work[rng.random(replicas) < 0.2] = FULL
        if work.min() == FULL:
            continue
        number = router.choose(blocks, work)
        assert number == plain.choose(blocks, work.tolist())
        chosen[number] += 1
        router.note(blocks, places[number])
        plain.note(blocks, number)
        if rng.random() < 0.02:
            router.forget(number)
            plain.known[number] = []
    assert len(chosen) == replicas
    held = {(n, b) for b, numbers in router._holders.items() for n in numbers}
    assert held == {(n, b) for n in range(replicas) for b in plain.known[n] if b % 1000 == 0}


class TestSplit:
    def test_jobs_of_a_context_stay_together_and_contexts_are_shared_out(self) -> None:
        queue = make_queue()
        jobs = [score(c, t) for c in range(CONTEXTS) for t in range(TARGETS)]
        queue.put(EngineCall(jobs, 0))
        places = find_places(queue.take())
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
            found.append(find_places(queue.take()))
        assert found[0] == found[1]

    def test_short_jobs_are_shared_out_evenly(self) -> None:
        queue = make_queue()
        queue.put(EngineCall(ScoreJobs.of([score(n, 1, 9) for n in range(100)]), 0))
        assert Counter(find_places(queue.take()).values()) == {0: 50, 1: 50}

    def test_a_common_beginning_keeps_no_replica_idle(self) -> None:
        """All share 64 tokens; the second replica reads them, too, and has half of the work."""
        queue = make_queue()
        jobs = []
        for n in range(200):
            own = np.concatenate([context(0, 2 * BLOCK), context(n, 3 * BLOCK)])
            jobs.append(ScoreJob(own, np.array([1], np.int32)))
        queue.put(EngineCall(jobs, 0))
        counts = Counter(find_places(queue.take()).values())
        assert abs(counts[0] - counts[1]) <= 4 * 2 * BLOCK / (5 * BLOCK) + 1

    def test_a_later_call_finds_its_context(self) -> None:
        queue = make_queue()
        for n in range(CONTEXTS):
            queue.put(EngineCall([score(n, 1)], n))
        first = find_places(queue.take())
        for job_id, replica in first.items():
            queue.finish([job_id], replica)
        for n in reversed(range(CONTEXTS)):
            queue.put(EngineCall([score(n, 2)], 100 + n))
        again = find_places(queue.take())
        assert {n: again[100 + n] for n in first} == first

    def test_with_worth_0_load_alone_counts(self) -> None:
        queue = make_queue(prefix_worth=0.0)
        queue.put(EngineCall([score(0, t) for t in range(4)], 0))
        assert Counter(find_places(queue.take()).values()) == {0: 2, 1: 2}

    def test_a_replica_with_room_is_not_idle_while_jobs_wait(self) -> None:
        queue = FairQueue(EngineRoom(2 * 4 * BLOCK + 2), replicas=2, prefix_worth=1e9)
        queue.put(EngineCall([score(0, t) for t in range(9)], 0))
        assert Counter(find_places(queue.take()).values()) == {0: 2, 1: 2}

    def test_generation_counts_until_it_ends(self) -> None:
        queue = FairQueue(EngineRoom(10_000, cache_tokens=10_000, sequences=50), replicas=2)
        long = GenerateJob(np.zeros(4, np.int32), 500)
        queue.put(EngineCall([long], 0))
        assert find_places(queue.take()) == {0: 0}
        queue.note_load(EngineLoad([0], 5), 0)
        queue.put(EngineCall([long], 10))
        assert find_places(queue.take()) == {10: 1}, "the first one has read its prompt, no more"
        queue.finish([0], 0)
        queue.put(EngineCall([long], 20))
        assert find_places(queue.take()) == {20: 0}

    def test_a_replica_that_does_not_answer_gets_nothing(self) -> None:
        queue = make_queue()
        queue.places[0].is_open = False
        queue.put(EngineCall([score(n, 1) for n in range(4)], 0))
        assert set(find_places(queue.take()).values()) == {1}

    @pytest.mark.parametrize(("last", "order"), [(False, [0, 1, 2, 3]), (True, [2, 3, 0, 1])])
    def test_what_a_replica_had_is_taken_again_with_its_own_sizes(
        self, last: bool, order: list[int]
    ) -> None:
        """Before the jobs that no replica had, or behind them where they are suspected."""
        jobs = ScoreJobs.of([score(0, 1, length) for length in (20, 30, 5, 6)])
        call, queue = EngineCall(jobs, 0), FairQueue(EngineRoom(53))
        queue.put(call)
        assert queue.take().order == [0, 1]
        queue.lose(0)
        queue.put_back(call, [0, 1], last=last)
        assert list(call.unsent) == order
        assert call.unsent_sizes == [len(jobs[n].tokens) for n in order]
        sent = queue.take().order
        assert sent == order[: len(sent)]
        assert queue.places[0].ahead_tokens == sum(len(jobs[n].tokens) for n in sent) <= 53
        queue.finish(sent)
        assert queue.places[0].ahead_tokens == 0
        assert queue.take().order == order[len(sent) :]

    def test_tenants_take_turns_over_all_replicas(self) -> None:
        queue = FairQueue(EngineRoom(10), replicas=2)
        ten = [Job(np.zeros(10, np.int32)) for _ in range(8)]
        queue.put(EngineCall(ten, 0, Lane("ann")))
        queue.put(EngineCall(ten, 100, Lane("eve")))
        order = []
        for _ in range(8):
            taken = queue.take()
            for job_id, replica in find_places(taken).items():
                order.append("eve" if job_id >= 100 else "ann")
                queue.finish([job_id], replica)
        assert order == ["ann", "eve"] * 8


class TestSuspects:
    @pytest.fixture(autouse=True)
    def _make(self) -> None:
        self.now = 1000.0
        self.quarantine = Quarantine(100.0, lambda: self.now)
        self.queue = FairQueue(EngineRoom(1000), self.quarantine, replicas=2)
        self.next_id = 0

    def ask(self, *numbers: int) -> None:
        jobs = [Job(np.array([1, number], np.int32)) for number in numbers]
        self.queue.put(EngineCall(jobs, self.next_id))
        self.next_id += len(numbers)

    def take(self) -> dict[int, int]:
        self.taken = self.queue.take()
        return {
            int(call.job(job_id).tokens[1]): number
            for number, own in self.taken.by_replica.items()
            for call, ids in own.by_call.items()
            for job_id in ids
        }

    def accuse(self, *numbers: int) -> None:
        self.quarantine.accuse(Job(np.array([1, number], np.int32)) for number in numbers)

    def test_a_suspect_never_goes_to_the_last_replica_that_answers(self) -> None:
        self.accuse(1)
        self.queue.places[0].is_open = False
        self.ask(1)
        self.ask(2)
        assert self.take() == {2: 1}
        self.queue.places[0].is_open = True
        assert self.take() == {1: 0}

    def test_unless_no_other_comes_back(self) -> None:
        self.accuse(1)
        self.queue.places[0].is_open = False
        self.queue.gone.add(0)
        self.ask(1)
        assert self.take() == {1: 1}

    def test_one_suspect_at_a_time_over_all_replicas_and_others_go_elsewhere(self) -> None:
        self.accuse(1, 2)
        self.ask(1)
        self.ask(2)
        self.ask(3)
        assert self.take() == {1: 0, 3: 1}
        self.ask(4)
        assert self.take() == {4: 1}, "new jobs keep out of the trial"
        self.queue.finish([0], 0)
        self.quarantine.acquit(Job(np.array([1, 1], np.int32)))
        assert self.take() == {2: 0}

    def test_a_busy_replica_is_kept_free_for_a_suspect(self) -> None:
        for number in (10, 11):
            self.ask(number)
        assert self.take() == {10: 0, 11: 1}
        self.accuse(1)
        self.ask(1)
        assert self.take() == {}
        assert self.taken.wait_s == SETTLE_S
        for number in (12, 13):
            self.ask(number)
        assert self.take() == {12: 1, 13: 1}, "replica 0 is kept for the suspect"
        self.now += SETTLE_S
        assert self.take() == {1: 0}
        assert self.quarantine.keeps_out(0)
        self.now += TRIAL_S
        assert not self.quarantine.keeps_out(0)


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
