"""The fair queue of an engine's calls, and the choice of a replica for each job.

Calls are scheduled at three levels, one job a turn:

    priority   `interactive` first; `batch` gets one of BATCH_EVERY turns while both wait
    tenant     within a priority: the tenant whose jobs had the fewest recent tokens
    call       within a tenant: round robin

Without keys, all calls have the same tenant and priority.

A job goes to the replica with the lowest cost:

    tokens left to read and generate  -  PREFIX_WORTH * tokens of the job's prefix in its cache

A job waits for PREFIX_WORTH tokens of other work to save one token of its prefix. Example: replica
0 has a context of 384 tokens in its cache. Jobs with that context go to 0 until it has 1536 tokens
more to do than 1. Then 1 reads the context as well, and both share the jobs that follow.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import get_args

import numpy as np

from logsteer_server.contract.batches import ScoreJobs, count_positions, select_jobs
from logsteer_server.contract.engine import EngineLoad, EngineRoom
from logsteer_server.contract.jobs import GenerateJob, Job, Priority, Routing
from logsteer_server.runtime.poison import PoisonMemory

BATCH_EVERY = 16
"""Keeps priority `batch` progressing, slowly, under a constant load of `interactive`."""
PREFIX_WORTH = 4.0
BLOCK = 32
"""Tokens of a prefix block; engines share prefixes in blocks of 16 or 32."""
UNKNOWN_CACHE = 131_072
"""Assumed prefix cache of a replica, in tokens, if its engine reports none."""
LOOK_AHEAD = 16
"""Tokens reserved for the growth of each generation when another one is admitted."""


@dataclass(eq=False)
class EngineCall:
    """The jobs of one call, with their `sizes` in positions and the positions `expected` in use.

    `unsent`: ids of jobs not sent to the engine yet.
    """

    jobs: Sequence[Job]
    first_id: int
    routing: Routing = field(default_factory=Routing)
    unsent: deque[int] = field(init=False)
    sizes: list[int] = field(init=False)
    expected: list[int] = field(init=False)
    only_reads: bool = field(init=False)
    """Whether the jobs are packed score jobs, so that none generates."""

    def __post_init__(self) -> None:
        self.unsent = deque(range(self.first_id, self.first_id + len(self.jobs)))
        self.sizes = count_positions(self.jobs)
        self.only_reads = isinstance(self.jobs, ScoreJobs)
        self.expected = self.sizes if self.only_reads else [job.num_expected for job in self.jobs]

    def job(self, job_id: int) -> Job:
        """Return the job of that id."""
        return self.jobs[job_id - self.first_id]

    def select(self, ids: Sequence[int]) -> Sequence[Job]:
        """Return the jobs of these ids."""
        return select_jobs(self.jobs, np.array(ids, dtype=np.int64) - self.first_id)

    @property
    def generates(self) -> bool:
        """Whether the next job generates."""
        return not self.only_reads and isinstance(self.job(self.unsent[0]), GenerateJob)


class CallQueue:
    """The calls that wait for one engine, in the order of their turns.

    Within a priority, the tenant with the smallest `served`, the tokens of its jobs so far, is
    next. A tenant that arrives or returns starts at the smallest `served` in the queue:
    unused time does not accumulate, and recent use still counts.

        ann, jobs of 10 tokens   10       20 30       40 50
        eve, jobs of 20 tokens      20          40          60
    """

    def __init__(self) -> None:
        self._calls: dict[Priority, dict[str, deque[EngineCall]]] = {
            priority: {} for priority in get_args(Priority)
        }
        self._served: dict[Priority, Counter[str]] = {
            priority: Counter() for priority in get_args(Priority)
        }
        self._reached: Counter[Priority] = Counter()
        self._turns_without_batch = 0

    def __iter__(self) -> Iterator[EngineCall]:
        """Yield the calls in the order of their turns, which only `pop` changes."""
        order = reversed if self._turns_without_batch >= BATCH_EVERY - 1 else iter
        for priority in order(get_args(Priority)):
            calls = self._calls[priority]
            for tenant in sorted(calls, key=self._served[priority].__getitem__):
                yield from calls[tenant]

    def peek(self, reading: bool, held: Collection[EngineCall]) -> EngineCall | None:
        """Return the next call that is not held; with `reading`, the next whose job does not
        generate.
        """
        for call in self:
            if not (call in held or (reading and call.generates)):
                return call
        return None

    def put(self, call: EngineCall) -> None:
        """Append a call to its tenant's."""
        tenant, priority = call.routing.tenant, call.routing.priority
        calls, served = self._calls[priority], self._served[priority]
        if tenant not in calls:
            calls[tenant] = deque()
            served[tenant] = max(self._reached[priority], served[tenant])
        calls[tenant].append(call)

    def pop(self, call: EngineCall, count: int = 1) -> list[int]:
        """Dequeue the next jobs of a call, return their ids, and move the call back."""
        tenant, priority = call.routing.tenant, call.routing.priority
        has_batch = bool(self._calls["batch"])
        is_passed_over = has_batch and priority != "batch"
        self._turns_without_batch = self._turns_without_batch + 1 if is_passed_over else 0
        served = self._served[priority]
        self._reached[priority] = max(self._reached[priority], served[tenant])
        ids = []
        for _ in range(count):
            job_id = call.unsent.popleft()
            ids.append(job_id)
            served[tenant] += max(1, call.expected[job_id - call.first_id])
        calls = self._calls[priority][tenant]
        calls.remove(call)
        if call.unsent:
            calls.append(call)
        if not calls:
            del self._calls[priority][tenant]
        return ids

    def drop(self, call: EngineCall) -> None:
        """Remove a call, if it is there."""
        waiting, tenant = self._calls[call.routing.priority], call.routing.tenant
        if call in waiting.get(tenant, ()):
            waiting[tenant].remove(call)
            if not waiting[tenant]:
                del waiting[tenant]


def hash_blocks(job: Job) -> list[int]:
    """Return a hash of each full block of a job's tokens and all tokens before it.

    Hashes differ between jobs with other model changes or cache namespaces.
    """
    tokens = np.ascontiguousarray(job.tokens, dtype=np.int32).tobytes()
    size = 4 * BLOCK
    if len(tokens) < size:
        return []
    adapter = job.adapter and job.adapter.sha256
    override = job.override and job.override.identity
    before = hash((job.cache_namespace, adapter, override))
    first, plan = job.plan_namespace or (len(tokens), "")
    found = []
    for start in range(0, len(tokens) - size + 1, size):
        is_steered = first < start // 4 + BLOCK
        before = hash((before, tokens[start : start + size], plan if is_steered else ""))
        found.append(before)
    return found


class PrefixMemory:
    """The prefix blocks last sent to a replica, as many as its cache holds."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def count(self, blocks: Sequence[int]) -> int:
        """Return how many of a job's leading blocks are cached."""
        return next((n for n, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def record(self, blocks: Sequence[int], cache_tokens: int | None) -> None:
        """Record a job's blocks; later blocks are evicted first, as in the cache."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > (cache_tokens or UNKNOWN_CACHE) // BLOCK:
            self._blocks.popitem(last=False)


class ReplicaLoad:
    """The jobs of one replica, by id with their calls, and the tokens that they take.

    Jobs not yet begun take at most `room.ahead_tokens`, or there is only one. If the replica
    reports what generation holds (`update`), a generating job counts with its prompt until that
    has been read. Another one is admitted while the unread prompts fit into the cache beside what
    is held now, with room for all to grow by LOOK_AHEAD; if they grow more, the engine preempts
    some. A replica accepts jobs while it `is_open`. `candidate`: its one suspected poison job.
    """

    def __init__(
        self, number: int = 0, room: EngineRoom | None = None, *, is_open: bool = True
    ) -> None:
        self.number = number
        self.room = room or EngineRoom()
        self.is_open = is_open
        self.prefixes = PrefixMemory()
        self.ahead_tokens = 0
        self.candidate: int | None = None
        self.jobs: dict[int, EngineCall] = {}
        self._ahead_of: dict[int, int] = {}
        """Job -> tokens not begun."""
        self._to_generate: dict[int, int] = {}
        """Generating job -> expected tokens."""
        self._generated_ahead = 0
        self._unread_prompts = 0
        self._held_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens left to read, and the expected ones left to generate."""
        return self.ahead_tokens + self._generated_ahead

    def measure(self, call: EngineCall, job_id: int) -> int:
        """Return the tokens of a job that has not begun."""
        if self.room.cache_tokens is None or call.only_reads:
            return call.sizes[job_id - call.first_id]
        return len(call.job(job_id).tokens)

    def may_read(self, call: EngineCall) -> bool:
        """Return whether there is room to read a call's next job."""
        if not self.is_open:
            return False
        return not self.ahead_tokens or (
            self.ahead_tokens + self.measure(call, call.unsent[0]) <= self.room.ahead_tokens
        )

    def may_generate(self, call: EngineCall) -> bool:
        """Return whether there is room to generate for a call's next job."""
        cache_tokens, sequences = self.room.cache_tokens, self.room.sequences
        count = len(self._to_generate)
        if not count:
            return True
        if sequences is not None and count >= sequences:
            return False
        if cache_tokens is None:
            return True
        size = self.measure(call, call.unsent[0])
        to_come = self._unread_prompts + size + LOOK_AHEAD * (count + 1)
        return self._held_tokens + to_come <= cache_tokens

    def count_due(self, call: EngineCall) -> int:
        """Return how many of a call's next jobs fit, at least one; none of them generates."""
        room, count = self.room.ahead_tokens - self.ahead_tokens, 0
        for job_id in call.unsent:
            room -= call.sizes[job_id - call.first_id]
            if room < 0:
                break
            count += 1
        return max(1, count)

    def add(self, call: EngineCall, ids: Sequence[int]) -> None:
        """Add jobs of a call."""
        reads = call.only_reads
        self.jobs |= dict.fromkeys(ids, call)
        for job_id in ids:
            size = call.sizes[job_id - call.first_id] if reads else self.measure(call, job_id)
            self._ahead_of[job_id] = size
            self.ahead_tokens += size
            if not reads and isinstance(job := call.job(job_id), GenerateJob):
                self._to_generate[job_id] = job.num_expected - len(job.tokens)
                self._generated_ahead += self._to_generate[job_id]
                self._unread_prompts += size

    def update(self, load: EngineLoad) -> None:
        """Record what generation holds, and which prompts were read."""
        for job_id in load.started:
            if job_id in self._to_generate:
                size = self._ahead_of.get(job_id, 0)
                self.ahead_tokens -= size
                self._unread_prompts -= size
                self._ahead_of[job_id] = 0
        self._held_tokens = load.held_tokens

    def finish(self, job_ids: Collection[int]) -> None:
        """Free the room of jobs that ended."""
        if self.candidate in job_ids:
            self.candidate = None
        for job_id in job_ids:
            self.jobs.pop(job_id, None)
            size = self._ahead_of.pop(job_id, 0)
            self.ahead_tokens -= size
            if job_id in self._to_generate:
                self._unread_prompts -= size
                self._generated_ahead -= self._to_generate.pop(job_id)


def choose_replica(blocks: Sequence[int], fit: Sequence[ReplicaLoad]) -> ReplicaLoad:
    """Return the replica with the lowest cost for a job of these blocks; the first of equals."""

    def cost(replica: ReplicaLoad) -> float:
        return replica.tokens - PREFIX_WORTH * BLOCK * replica.prefixes.count(blocks)

    return min(fit, key=cost)


@dataclass(slots=True)
class ReplicaJobs:
    """The ids of jobs to send to one replica, in order and by call."""

    order: list[int] = field(default_factory=list)
    by_call: dict[EngineCall, list[int]] = field(default_factory=dict)


class FairQueue:
    """Dequeue jobs of the waiting calls in fair order, while a replica has room.

    `choose_replica` chooses among the replicas with room for a job (`ReplicaLoad`). While a
    generation waits for room, jobs without generation pass it:

        cache of 1000 tokens          held  to come
        40 prompts of 20 tokens wait     0      540   27 are sent: 27 * (20 + 16) <= 1000
        each has generated 15          945        0   none is sent: 945 + 20 + 28 * 16 > 1000
        22 have ended                  175      400   20 are sent: 175 + 20 * 20 + 25 * 16 <= 1000

    A replica has at most one suspected job (`poison`) at a time, so that a second death identifies
    it. Other jobs pass the suspects that wait.
    """

    def __init__(
        self,
        room: EngineRoom | None = None,
        replicas: int = 1,
        poison: PoisonMemory | None = None,
    ) -> None:
        self.replicas = [ReplicaLoad(number, room) for number in range(replicas)]
        self.poison = poison or PoisonMemory()
        self._waiting = CallQueue()

    @property
    def num_waiting(self) -> int:
        """Jobs not sent to a replica yet."""
        return sum(len(call.unsent) for call in self._waiting)

    def put(self, call: EngineCall) -> None:
        """Append a call to the queue."""
        if call.unsent:
            self._waiting.put(call)

    def put_back(self, call: EngineCall, ids: Sequence[int]) -> None:
        """Return jobs of a call from a replica to the queue, as its next."""
        is_waiting = bool(call.unsent)
        call.unsent.extendleft(reversed(ids))
        if not is_waiting:
            self._waiting.put(call)

    def dequeue(self) -> dict[int, ReplicaJobs]:
        """Dequeue the jobs that replicas have room for, by the replica's number."""
        found: dict[int, ReplicaJobs] = {}
        held: set[EngineCall] = set()
        reading = False
        while (call := self._waiting.peek(reading, held)) is not None:
            fit = self._find_room(call)
            if not fit:
                break
            if call.generates and not (fit := [own for own in fit if own.may_generate(call)]):
                reading = True
                continue
            # Each look at a job takes time: none is needed while nothing is remembered.
            has_deaths = bool(self.poison.deaths)
            is_candidate = has_deaths and self.poison.remembers(call.job(call.unsent[0]))
            if is_candidate and not (fit := [own for own in fit if own.candidate is None]):
                held.add(call)
                continue
            replica = fit[0] if len(self.replicas) == 1 else self._choose(call, fit)
            others = islice(self._waiting, 1, None)
            is_alone = len(self.replicas) == 1 and not has_deaths and next(others, None) is None
            count = replica.count_due(call) if is_alone and call.only_reads else 1
            ids = self._waiting.pop(call, count)
            replica.add(call, ids)
            if is_candidate:
                replica.candidate = ids[0]
            jobs = found.setdefault(replica.number, ReplicaJobs())
            jobs.order += ids
            jobs.by_call.setdefault(call, []).extend(ids)
        return found

    def _find_room(self, call: EngineCall) -> list[ReplicaLoad]:
        """Return the replicas with room for a call's next job."""
        return [replica for replica in self.replicas if replica.may_read(call)]

    def _choose(self, call: EngineCall, fit: Sequence[ReplicaLoad]) -> ReplicaLoad:
        """Choose one of these replicas for a call's next job."""
        job_id = call.unsent[0]
        is_short = call.sizes[job_id - call.first_id] < BLOCK
        blocks = [] if is_short else hash_blocks(call.job(job_id))
        replica = choose_replica(blocks, fit)
        replica.prefixes.record(blocks, replica.room.cache_tokens)
        return replica

    def update(self, load: EngineLoad, replica: int = 0) -> None:
        """Record what generation holds in a replica, and which prompts were read."""
        self.replicas[replica].update(load)

    def finish(self, job_ids: Collection[int], replica: int = 0) -> None:
        """Free the room of jobs that ended in a replica."""
        self.replicas[replica].finish(job_ids)

    def drop(self, call: EngineCall) -> dict[int, list[int]]:
        """Remove a call; return the ids of its sent jobs, by the replica's number.

        These keep their room until they finish: the engine may be running them.
        """
        self._waiting.drop(call)
        ids = range(call.first_id, call.first_id + len(call.jobs))
        found = {own.number: [n for n in ids if n in own.jobs] for own in self.replicas}
        return {number: own for number, own in found.items() if own}

    def lose(self, replica: int) -> dict[int, EngineCall]:
        """Reset a replica whose process has exited, its cache included; return its jobs."""
        lost = self.replicas[replica]
        self.replicas[replica] = ReplicaLoad(replica, lost.room, is_open=lost.is_open)
        return lost.jobs

    def clear(self) -> None:
        """Remove all calls and jobs."""
        self._waiting = CallQueue()
        for replica in self.replicas:
            self.lose(replica.number)
