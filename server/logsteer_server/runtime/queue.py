"""The fair queue of an engine's calls, and the choice of a replica for each job.

Calls are scheduled at three levels, one job a turn:

    priority   `interactive` first; `batch` gets one of BATCH_EVERY turns while both wait
    tenant     within a priority: the tenant whose jobs had the fewest recent tokens
    call       within a tenant: round robin

Without keys, all calls have the same tenant and priority.

A job goes to the replica with the lowest cost:

    expected tokens of its jobs  -  PREFIX_WORTH * tokens of the job's context, if it read it last

A job waits for PREFIX_WORTH tokens of other work to save one token of its context, which are the
tokens before those scored or generated. Example: replica 0 has read a context of 384 tokens. Jobs
with that context go to 0 until it has 1536 tokens more to do than 1. Then 1 reads the context as
well, and jobs go there until it has as many more.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import get_args

import numpy as np

from logsteer.errors import APIError
from logsteer_server.contract.batches import ResultPart, ScoreJobs, count_positions, select_jobs
from logsteer_server.contract.engine import EngineLoad, EngineRoom
from logsteer_server.contract.jobs import GenerateJob, Job, Priority, Routing
from logsteer_server.runtime.poison import PoisonMemory

BATCH_EVERY = 16
"""Keeps priority `batch` progressing, slowly, under a constant load of `interactive`."""
PREFIX_WORTH = 4.0
BLOCK = 32
"""Tokens of a prefix block; engines share prefixes in blocks of 16 or 32."""
MAX_CONTEXTS = 4096
"""Contexts whose last reader is remembered; prefix caches hold fewer."""
LOOK_AHEAD = 16
"""Tokens reserved for the growth of each generation when another one is admitted."""


@dataclass(eq=False)
class EngineCall:
    """The jobs of one call, with their `sizes` in positions and the positions `expected` in use.

    `unsent`: ids of jobs not sent to the engine yet. `begun`: jobs with some results so far;
    `lost`: jobs that a replica died with. `unread` counts the `results` that wait for the caller.
    """

    jobs: Sequence[Job]
    first_id: int
    routing: Routing = field(default_factory=Routing)
    unsent: deque[int] = field(init=False)
    sizes: list[int] = field(init=False)
    expected: list[int] = field(init=False)
    only_reads: bool = field(init=False)
    """Whether the jobs are packed score jobs, so that none generates."""
    unread: int = 0
    begun: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    results: asyncio.Queue[ResultPart | APIError] = field(default_factory=asyncio.Queue)

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


def hash_context(job: Job) -> tuple[int, int]:
    """Return a hash of the full blocks of a job's context, and their tokens.

    Hashes differ between jobs with other model changes or cache namespaces.
    """
    size = job.prompt_len // BLOCK * BLOCK
    tokens = np.ascontiguousarray(job.tokens[:size], dtype=np.int32).tobytes()
    adapter = job.adapter and job.adapter.sha256
    override = job.override and job.override.identity
    changes = job.cache_namespace, adapter, override, job.plan_namespace
    return hash((changes, tokens)), size


class ReplicaLoad:
    """The jobs of one replica, by id with their calls, and the `tokens` that they are expected to
    take.

    Jobs not yet begun take at most `room.ahead_tokens`, or there is only one. If the replica
    reports what generation holds (`update`), a generating job counts there with its prompt until
    that has been read. Another one is admitted while what is still to be read fits into the cache
    beside what is held now, with room for all to grow by LOOK_AHEAD; if they grow more, the engine
    preempts some. A replica accepts jobs while it `is_open`. `candidate`: its one suspected poison
    job.
    """

    def __init__(
        self, number: int = 0, room: EngineRoom | None = None, *, is_open: bool = True
    ) -> None:
        self.number = number
        self.room = room or EngineRoom()
        self.is_open = is_open
        self.tokens = 0
        self.ahead_tokens = 0
        self.candidate: int | None = None
        self.jobs: dict[int, EngineCall] = {}
        self._ahead_of: dict[int, int] = {}
        """Job -> tokens not begun."""
        self._generating: set[int] = set()
        self._held_tokens = 0

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
        count = len(self._generating)
        if not count:
            return True
        if sequences is not None and count >= sequences:
            return False
        if cache_tokens is None:
            return True
        size = self.measure(call, call.unsent[0])
        to_come = self.ahead_tokens + size + LOOK_AHEAD * (count + 1)
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
        self.jobs |= dict.fromkeys(ids, call)
        for job_id in ids:
            self._ahead_of[job_id] = size = self.measure(call, job_id)
            self.ahead_tokens += size
            self.tokens += call.expected[job_id - call.first_id]
            if not call.only_reads and isinstance(call.job(job_id), GenerateJob):
                self._generating.add(job_id)

    def update(self, load: EngineLoad) -> None:
        """Record what generation holds, and which prompts were read."""
        for job_id in load.started:
            self.ahead_tokens -= self._ahead_of.pop(job_id, 0)
        self._held_tokens = load.held_tokens

    def finish(self, job_ids: Collection[int]) -> None:
        """Free the room of jobs that ended."""
        if self.candidate in job_ids:
            self.candidate = None
        for job_id in job_ids:
            if (call := self.jobs.pop(job_id, None)) is not None:
                self.tokens -= call.expected[job_id - call.first_id]
            self.ahead_tokens -= self._ahead_of.pop(job_id, 0)
            self._generating.discard(job_id)


@dataclass(slots=True)
class ReplicaJobs:
    """The ids of jobs to send to one replica, in order and by call."""

    order: list[int] = field(default_factory=list)
    by_call: dict[EngineCall, list[int]] = field(default_factory=dict)


class FairQueue:
    """Dequeue jobs of the waiting calls in fair order, while a replica has room.

    While a generation waits for room in the replicas (`ReplicaLoad`), jobs without generation pass
    it:

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
        self._readers: dict[int, ReplicaLoad] = {}
        """Hash of a context -> its last reader, oldest first."""

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
            fit = [replica for replica in self.replicas if replica.may_read(call)]
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

    def _choose(self, call: EngineCall, fit: Sequence[ReplicaLoad]) -> ReplicaLoad:
        """Choose the one of these replicas with the lowest cost for a call's next job."""
        job_id = call.unsent[0]
        is_short = call.sizes[job_id - call.first_id] < BLOCK
        context, size = (0, 0) if is_short else hash_context(call.job(job_id))
        last = self._readers.pop(context, None)
        worth = PREFIX_WORTH * size
        replica = min(fit, key=lambda own: own.tokens - (worth if own is last else 0.0))
        if size:
            self._readers[context] = replica
            if len(self._readers) > MAX_CONTEXTS:
                del self._readers[next(iter(self._readers))]
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
