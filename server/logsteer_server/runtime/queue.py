"""The queue of calls before an engine: whose turn it is, and which replica gets a job.

Turns are taken at three heights, each turn of one job:

    priority   `interactive` first; of BATCH_EVERY turns, `batch` has one where both wait
    tenant     within a priority: the one whose jobs had the fewest tokens of late
    call       within a tenant: one after another

Where no keys are in use, all calls have one tenant and one priority, and take turns.

A job goes to the replica with the least of

    tokens that it has still to read and generate  -  PREFIX_WORTH * tokens it need not read again

so a job waits for PREFIX_WORTH tokens of other work rather than have one token of its prefix
computed a second time. With a context of 384 tokens that replica 0 has read, jobs of that context
go to 0 until it has 1536 tokens more to do than 1; then 1 reads the context, too, and from then on
both know it, and share what comes.
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
"""So that work of priority batch is slow where others never pause, and does not stand still."""
PREFIX_WORTH = 4.0
BLOCK = 32
"""Tokens that are looked up together: engines share prefixes in blocks of 16 or 32."""
UNKNOWN_CACHE = 131_072
"""Tokens that a replica is taken to remember where its engine does not say."""
LOOK_AHEAD = 16
"""Tokens that each generation may still grow by when another one is let in."""


@dataclass(eq=False)
class EngineCall:
    """The jobs of one caller, of `sizes` positions, of which so many are `expected` to be used.

    `unsent` holds the ids of those that the engine does not have.
    """

    jobs: Sequence[Job]
    first_id: int
    routing: Routing = field(default_factory=Routing)
    unsent: deque[int] = field(init=False)
    sizes: list[int] = field(init=False)
    expected: list[int] = field(init=False)
    only_reads: bool = field(init=False)
    """Whether none of its jobs generates, as far as is known without a look at each."""

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
        """Whether the job that it sends in its next turn generates."""
        return not self.only_reads and isinstance(self.job(self.unsent[0]), GenerateJob)


class CallQueue:
    """All calls that wait for one engine, of which one has the next turn.

    Of a priority's tenants the one with the least `served` is next: the tokens of its jobs. One
    that comes, or comes back, begins where those stand that wait: what it left unused is not saved
    up, and what it took lately still counts.

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
        """Yield the calls, the one that has the next turn first; it stays so until `pop`."""
        order = reversed if self._turns_without_batch >= BATCH_EVERY - 1 else iter
        for priority in order(get_args(Priority)):
            calls = self._calls[priority]
            for tenant in sorted(calls, key=self._served[priority].__getitem__):
                yield from calls[tenant]

    def peek(self, reading: bool, held: Collection[EngineCall]) -> EngineCall | None:
        """Return the call whose turn it is, but for those held; with `reading`, of those whose next
        job does not generate.
        """
        for call in self:
            if not (call in held or (reading and call.generates)):
                return call
        return None

    def put(self, call: EngineCall) -> None:
        """Append a call to those of its tenant."""
        tenant, priority = call.routing.tenant, call.routing.priority
        calls, served = self._calls[priority], self._served[priority]
        if tenant not in calls:
            calls[tenant] = deque()
            served[tenant] = max(self._reached[priority], served[tenant])
        calls[tenant].append(call)

    def pop(self, call: EngineCall, count: int = 1) -> list[int]:
        """Take the next jobs of a call, and return their ids; it has its next turn later."""
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
    """Return for each whole block of a job's tokens what it and all before it are known by.

    Jobs that change the model in other ways, or of another cache namespace, have nothing in common.
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
    """The blocks that one replica was sent last, at most as many as its cache has tokens for."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def count(self, blocks: Sequence[int]) -> int:
        """Return how many of a job's first blocks it has."""
        return next((n for n, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def record(self, blocks: Sequence[int], cache_tokens: int | None) -> None:
        """Remember a job's blocks, the first one longest, as a cache does."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > (cache_tokens or UNKNOWN_CACHE) // BLOCK:
            self._blocks.popitem(last=False)


class ReplicaLoad:
    """The jobs that one replica has, by id with their calls, and the tokens that they take.

    Of what it has not begun, it has at most `room.ahead_tokens`, or one job. Where it says what
    generation holds (`update`), a job that generates counts there with its prompt, until that has
    been read. A further one is let in while the prompts to come fit into the cache beside what is
    held now, and all may grow by LOOK_AHEAD. The engine preempts some where they grow more. It
    takes nothing unless it `is_open`. `candidate` is the one job of it that an engine died with.
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
        """Job -> its tokens that count as not begun."""
        self._to_generate: dict[int, int] = {}
        """Job that generates -> tokens that are expected of it."""
        self._generated_ahead = 0
        self._unread_prompts = 0
        self._held_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens that it has still to read and to generate, as far as is known of the latter."""
        return self.ahead_tokens + self._generated_ahead

    def measure(self, call: EngineCall, job_id: int) -> int:
        """Return the tokens of a job that count as not begun."""
        if self.room.cache_tokens is None or call.only_reads:
            return call.sizes[job_id - call.first_id]
        return len(call.job(job_id).tokens)

    def may_read(self, call: EngineCall) -> bool:
        """Return whether a call's next job may be sent, as far as what has to be read counts."""
        if not self.is_open:
            return False
        return not self.ahead_tokens or (
            self.ahead_tokens + self.measure(call, call.unsent[0]) <= self.room.ahead_tokens
        )

    def may_generate(self, call: EngineCall) -> bool:
        """Return whether there is room for what a call's next job generates."""
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
        """Return how many of a call's next jobs, which all read, have room: one at least."""
        room, count = self.room.ahead_tokens - self.ahead_tokens, 0
        for job_id in call.unsent:
            room -= call.sizes[job_id - call.first_id]
            if room < 0:
                break
            count += 1
        return max(1, count)

    def add(self, call: EngineCall, ids: Sequence[int]) -> None:
        """Count jobs of a call as its own."""
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
        """Count what generation holds, and which prompts have been read."""
        for job_id in load.started:
            if job_id in self._to_generate:
                size = self._ahead_of.get(job_id, 0)
                self.ahead_tokens -= size
                self._unread_prompts -= size
                self._ahead_of[job_id] = 0
        self._held_tokens = load.held_tokens

    def finish(self, job_ids: Collection[int]) -> None:
        """Free the room of jobs that the replica no longer has."""
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
    """Return which of these replicas a job of these blocks goes to; the first of equals."""

    def cost(replica: ReplicaLoad) -> float:
        return replica.tokens - PREFIX_WORTH * BLOCK * replica.prefixes.count(blocks)

    return min(fit, key=cost)


@dataclass(slots=True)
class ReplicaJobs:
    """The ids of the jobs that one replica is sent now, in order and by their calls."""

    order: list[int] = field(default_factory=list)
    by_call: dict[EngineCall, list[int]] = field(default_factory=dict)


class FairQueue:
    """Send an engine's replicas the next jobs of the calls that wait, in turn, while there is room.

    A job goes where `choose_replica` says, of the replicas that have room for it (`ReplicaLoad`).
    While generation waits for room, jobs that are only read go past it:

        cache of 1000 tokens          held  to come
        40 prompts of 20 tokens wait     0      540   27 are sent: 27 * (20 + 16) <= 1000
        each has generated 15          945        0   none is sent: 945 + 20 + 28 * 16 > 1000
        22 have ended                  175      400   20 are sent: 175 + 20 * 20 + 25 * 16 <= 1000

    Of the jobs that an engine died with (`poison`), a replica has one at a time, so that the second
    death of one says nothing of others. What is sent beside it goes past those that wait for their
    turn.
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
        """Jobs that no replica has been sent."""
        return sum(len(call.unsent) for call in self._waiting)

    def put(self, call: EngineCall) -> None:
        """Append a call to those that take turns."""
        if call.unsent:
            self._waiting.put(call)

    def put_back(self, call: EngineCall, ids: Sequence[int]) -> None:
        """Have jobs of a call that a replica had wait again, as its next."""
        is_waiting = bool(call.unsent)
        call.unsent.extendleft(reversed(ids))
        if not is_waiting:
            self._waiting.put(call)

    def dequeue(self) -> dict[int, ReplicaJobs]:
        """Return the jobs that replicas, by number, have room for now; count them as theirs."""
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
        """Return the replicas that a call's next job may be sent to."""
        return [replica for replica in self.replicas if replica.may_read(call)]

    def _choose(self, call: EngineCall, fit: Sequence[ReplicaLoad]) -> ReplicaLoad:
        """Return the replica that a call's next job goes to, of these."""
        job_id = call.unsent[0]
        is_short = call.sizes[job_id - call.first_id] < BLOCK
        blocks = [] if is_short else hash_blocks(call.job(job_id))
        replica = choose_replica(blocks, fit)
        replica.prefixes.record(blocks, replica.room.cache_tokens)
        return replica

    def update(self, load: EngineLoad, replica: int = 0) -> None:
        """Count what generation holds in a replica, and which prompts have been read."""
        self.replicas[replica].update(load)

    def finish(self, job_ids: Collection[int], replica: int = 0) -> None:
        """Free the room of jobs that a replica no longer has."""
        self.replicas[replica].finish(job_ids)

    def drop(self, call: EngineCall) -> dict[int, list[int]]:
        """Remove a call; return the ids of its jobs that replicas have, by the replica's number.

        Those keep their room until they are finished: an engine may be at work on them.
        """
        self._waiting.drop(call)
        ids = range(call.first_id, call.first_id + len(call.jobs))
        found = {own.number: [n for n in ids if n in own.jobs] for own in self.replicas}
        return {number: own for number, own in found.items() if own}

    def lose(self, replica: int) -> dict[int, EngineCall]:
        """Remove what a replica has, its cache too: its process is gone. Return its jobs."""
        lost = self.replicas[replica]
        self.replicas[replica] = ReplicaLoad(replica, lost.room, is_open=lost.is_open)
        return lost.jobs

    def clear(self) -> None:
        """Remove all calls and jobs."""
        self._waiting = CallQueue()
        for replica in self.replicas:
            self.lose(replica.number)
