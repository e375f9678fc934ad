"""The queue of calls before an engine, and which of its replicas gets a job.

A job goes to the replica with the least of

    tokens that it has still to read and generate  -  PREFIX_WORTH * tokens it need not read again

so a job waits for PREFIX_WORTH tokens of other work rather than have one token of its prefix
computed a second time. With a context of 384 tokens that replica 0 has read, jobs of that context
go to 0 until it has 1536 tokens more to do than 1; then 1 reads the context, too, and from then on
both know it, and share what comes.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from logsteer_server.contract.engine import EngineLoad, EngineRoom
from logsteer_server.contract.jobs import Job
from logsteer_server.runtime.turns import CallQueue, EngineCall

PREFIX_WORTH = 4.0
BLOCK = 32
"""Tokens that are looked up together: engines share prefixes in blocks of 16 or 32."""
UNKNOWN_CACHE = 131_072
"""Tokens that a replica is taken to remember where its engine does not say."""
LOOK_AHEAD = 16
"""Tokens that each generation may still grow by when another one is let in."""


def hash_blocks(job: Job) -> list[int]:
    """Return for each whole block of a job's tokens what it and all before it are known by.

    Jobs that change the model in other ways, or whose salt is another, have nothing in common.
    """
    tokens = np.ascontiguousarray(job.tokens, dtype=np.int32).tobytes()
    size = 4 * BLOCK
    if len(tokens) < size:
        return []
    adapter = job.adapter and job.adapter.sha256
    override = job.override and job.override.identity
    before = hash((job.salt, adapter, override))
    first, plan = job.plan_salt or (len(tokens), "")
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
    """The jobs that one replica has, by id, and the tokens that they take.

    Of what it has not begun, it has at most `room.ahead_tokens`, or one job. Where it says what
    generation holds (`update`), a job that generates counts there with its prompt, until that has
    been read. A further one is let in while the prompts to come fit into the cache beside what is
    held now, and all may grow by LOOK_AHEAD. The engine preempts some where they grow more. It
    takes nothing unless it `is_open`.
    """

    def __init__(
        self, number: int = 0, room: EngineRoom | None = None, *, is_open: bool = True
    ) -> None:
        self.number = number
        self.room = room or EngineRoom()
        self.is_open = is_open
        self.prefixes = PrefixMemory()
        self.ahead_tokens = 0
        self._ahead_of: dict[int, int] = {}
        """Job -> its tokens that count as not begun."""
        self._to_generate: dict[int, int] = {}
        """Job that generates -> tokens that are expected of it."""
        self._generated_ahead = 0
        self._unread_prompts = 0
        self._held_tokens = 0

    @property
    def ids(self) -> Iterable[int]:
        """The jobs that it has."""
        return self._ahead_of.keys()

    @property
    def tokens(self) -> int:
        """Tokens that it has still to read and to generate, as far as is known of the latter."""
        return self.ahead_tokens + self._generated_ahead

    def measure(self, call: EngineCall) -> int:
        """Return the tokens of a call's next job that count as not begun."""
        job_id = call.unsent[0]
        if self.room.cache_tokens is None or call.only_reads:
            return call.size(job_id)
        return len(call.job(job_id).tokens)

    def may_read(self, call: EngineCall) -> bool:
        """Return whether a call's next job may be sent, as far as what has to be read counts."""
        if not self.is_open:
            return False
        return not self.ahead_tokens or (
            self.ahead_tokens + self.measure(call) <= self.room.ahead_tokens
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
        to_come = self._unread_prompts + self.measure(call) + LOOK_AHEAD * (count + 1)
        return self._held_tokens + to_come <= cache_tokens

    def count_due(self, sizes: Sequence[int]) -> int:
        """Return how many of the next jobs, of these sizes, it has room for: one at least."""
        room = self.room.ahead_tokens - self.ahead_tokens
        return max(1, bisect_right(list(accumulate(sizes)), room))

    def add(self, ids: Sequence[int], sizes: Sequence[int]) -> None:
        """Count jobs of these tokens as its own."""
        self._ahead_of.update(zip(ids, sizes, strict=True))
        self.ahead_tokens += sum(sizes)

    def expect(self, job_id: int, size: int, num_generated: int) -> None:
        """Count tokens that a job which it has, of this size, is expected to generate."""
        self._to_generate[job_id] = num_generated
        self._generated_ahead += num_generated
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
        for job_id in self._to_generate.keys() & job_ids if self._to_generate else ():
            self._unread_prompts -= self._ahead_of.get(job_id, 0)
            self._generated_ahead -= self._to_generate.pop(job_id)
        self.ahead_tokens -= sum(self._ahead_of.pop(job_id, 0) for job_id in job_ids)


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

    def add(self, call: EngineCall, ids: Sequence[int]) -> None:
        """Append jobs of a call."""
        self.order += ids
        self.by_call.setdefault(call, []).extend(ids)


class FairQueue:
    """Send an engine's replicas the next jobs of the calls that wait, in turn, while there is room.

    A job goes where `choose_replica` says, of the replicas that have room for it (`ReplicaLoad`).
    While generation waits for room, jobs that are only read go past it:

        cache of 1000 tokens          held  to come
        40 prompts of 20 tokens wait     0      540   27 are sent: 27 * (20 + 16) <= 1000
        each has generated 15          945        0   none is sent: 945 + 20 + 28 * 16 > 1000
        22 have ended                  175      400   20 are sent: 175 + 20 * 20 + 25 * 16 <= 1000
    """

    def __init__(self, room: EngineRoom | None = None, replicas: int = 1) -> None:
        self.replicas = [ReplicaLoad(number, room) for number in range(replicas)]
        self._waiting = CallQueue()
        self._sent: dict[int, int] = {}
        """Job -> the replica that has it."""

    @property
    def num_waiting(self) -> int:
        """Jobs that no replica has been sent."""
        return self._waiting.num_jobs

    def put(self, call: EngineCall) -> None:
        """Append a call to those that take turns."""
        if call.unsent:
            self._waiting.put(call)

    def put_back(self, call: EngineCall, ids: Sequence[int]) -> None:
        """Have jobs of a call that a replica had wait again, as its next."""
        is_waiting = bool(call.unsent)
        call.put_back(ids)
        if not is_waiting:
            self._waiting.put(call)

    def dequeue(self) -> dict[int, ReplicaJobs]:
        """Return the jobs that replicas, by number, have room for now; count them as theirs."""
        found: dict[int, ReplicaJobs] = {}
        reading = False
        while (call := self._waiting.peek(reading)) is not None:
            fit = self._find_room(call)
            if not fit:
                break
            if call.generates and not (fit := [own for own in fit if own.may_generate(call)]):
                reading = True
                continue
            if len(self.replicas) == 1 and len(self._waiting) == 1 and call.only_reads:
                replica, ids = fit[0], self._pop_run(call, fit[0])
            else:
                replica, ids = self._pop_one(call, fit)
            found.setdefault(replica.number, ReplicaJobs()).add(call, ids)
            self._sent |= dict.fromkeys(ids, replica.number)
        return found

    def _find_room(self, call: EngineCall) -> list[ReplicaLoad]:
        """Return the replicas that a call's next job may be sent to; the one that the call names
        may always be sent it while it is open.
        """
        number = call.lane.replica
        if number is not None and self.replicas[number].is_open:
            return [self.replicas[number]]
        return [replica for replica in self.replicas if replica.may_read(call)]

    def _pop_one(
        self, call: EngineCall, fit: Sequence[ReplicaLoad]
    ) -> tuple[ReplicaLoad, list[int]]:
        """Remove a call's next job from those that wait, for one of these replicas."""
        generates, job_id, replica = call.generates, call.unsent[0], fit[0]
        if len(self.replicas) > 1:
            blocks = hash_blocks(call.job(job_id)) if call.size(job_id) >= BLOCK else []
            replica = choose_replica(blocks, fit)
            replica.prefixes.record(blocks, replica.room.cache_tokens)
        size = replica.measure(call)
        self._waiting.pop(call)
        if generates:
            job = call.job(job_id)
            replica.expect(job_id, size, job.num_expected - len(job.tokens))
        replica.add([job_id], [size])
        return replica, [job_id]

    def _pop_run(self, call: EngineCall, replica: ReplicaLoad) -> list[int]:
        """Remove the next jobs of the only call that waits, as many as there is room for."""
        sizes = call.unsent_sizes
        ids = self._waiting.pop_run(call, replica.count_due(sizes))
        replica.add(ids, sizes[: len(ids)])
        return ids

    def update(self, load: EngineLoad, replica: int = 0) -> None:
        """Count what generation holds in a replica, and which prompts have been read."""
        self.replicas[replica].update(load)

    def finish(self, job_ids: Collection[int], replica: int = 0) -> None:
        """Free the room of jobs that a replica no longer has."""
        for job_id in job_ids:
            if self._sent.get(job_id) == replica:  # else another one has been sent it since
                del self._sent[job_id]
        self.replicas[replica].finish(job_ids)

    def drop(self, call: EngineCall) -> dict[int, list[int]]:
        """Remove a call; return the ids of its jobs that replicas have, by the replica's number.

        Those keep their room until they are finished: an engine may be at work on them.
        """
        self._waiting.drop(call)
        found: dict[int, list[int]] = {}
        for job_id in range(call.first_id, call.first_id + len(call.jobs)):
            if (replica := self._sent.get(job_id)) is not None:
                found.setdefault(replica, []).append(job_id)
        return found

    def lose(self, replica: int) -> None:
        """Remove what a replica has, its cache too: its process is gone."""
        lost = self.replicas[replica]
        self.finish(list(lost.ids), replica)
        self.replicas[replica] = ReplicaLoad(replica, lost.room, is_open=lost.is_open)

    def clear(self) -> None:
        """Remove all calls and jobs."""
        self._waiting = CallQueue()
        for replica in self.replicas:
            self.lose(replica.number)
