"""What one replica of an engine has of the jobs that wait, and what it has room for."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.engine import EngineLoad, EngineRoom
from logsteer_server.runtime.turns import EngineCall

LOOK_AHEAD = 16
"""Tokens that each generation may still grow by when another one is let in."""
FULL = 2**62
"""The load of a replica that may not be sent a job; and the room of one that has nothing."""

Tokens = npt.NDArray[np.int64]


class Loads:
    """Of all N replicas, as arrays [N]: `work`, the tokens that each has to do, and `room`, the
    largest job that it may be sent. So a place is found among a thousand by a few operations.
    """

    def __init__(self, replicas: int) -> None:
        self.work: Tokens = np.zeros(replicas, np.int64)
        self.room: Tokens = np.full(replicas, FULL)
        self.counts_cache = np.zeros(replicas, np.bool_)
        """Whether a job that generates counts with its prompt alone."""

    def find(self, call: EngineCall) -> Tokens:
        """Return the work of each replica; FULL of those that may not be sent a call's next job,
        as too much of what they have has not been begun.
        """
        size: int | Tokens = call.size(call.unsent[0])
        if call.generates and self.counts_cache.any():
            size = np.where(self.counts_cache, len(call.job(call.unsent[0]).tokens), size)
        return np.where(self.room >= size, self.work, FULL)


def is_full(work: Tokens) -> bool:
    """Return whether no replica may be sent a job; `work` is as `Loads.find` says it."""
    return bool(work[work.argmin()] == FULL)  # takes half of what `min` does


class Occupancy:
    """The jobs that one replica has, by id, and the tokens that they take.

    Of what it has not begun, it has at most `room.ahead_tokens`, or one job. Where it says what
    generation holds (`note_load`), a job that generates counts there with its prompt, until that
    has been read. A further one is let in while the prompts to come fit into the cache beside what
    is held now, and all may grow by LOOK_AHEAD. The engine preempts some where they grow more. It
    takes nothing unless it `is_open`. What it comes to stands in `loads`, too.
    """

    def __init__(
        self, number: int = 0, room: EngineRoom | None = None, loads: Loads | None = None
    ) -> None:
        self.number = number
        self._room = room or EngineRoom()
        self._is_open = True
        self._loads = loads or Loads(number + 1)
        self.ahead_tokens = 0
        self._elsewhere_tokens = 0
        self._sharers = 1
        self._ahead_of: dict[int, int] = {}
        """Job -> its tokens that count as not begun."""
        self._to_generate: dict[int, int] = {}
        """Job that generates -> tokens that are expected of it."""
        self._generated_ahead = 0
        self._unread_prompts = 0
        self._held_tokens = 0
        self.room = self._room

    @property
    def room(self) -> EngineRoom:
        """What it takes in."""
        return self._room

    @room.setter
    def room(self, room: EngineRoom) -> None:
        self._room = room
        self._loads.counts_cache[self.number] = room.cache_tokens is not None
        self._tell()

    @property
    def is_open(self) -> bool:
        """Whether it takes jobs."""
        return self._is_open

    @is_open.setter
    def is_open(self, is_open: bool) -> None:
        self._is_open = is_open
        self._tell()

    @property
    def ids(self) -> Iterable[int]:
        """The jobs that it has."""
        return self._ahead_of.keys()

    def _tell(self) -> None:
        """Write down what it has to do and may be sent, after any change of it."""
        loads, number, ahead = self._loads, self.number, self.ahead_tokens
        room = self._room_ahead - ahead if ahead else FULL
        loads.room[number] = room if self._is_open else -1
        loads.work[number] = self.load

    def __len__(self) -> int:
        return len(self._ahead_of)

    @property
    def load(self) -> int:
        """Tokens that it has still to read and to generate, as far as is known of the latter."""
        return self.ahead_tokens + self._generated_ahead + self._elsewhere_tokens

    def measure(self, call: EngineCall) -> int:
        """Return the tokens of a call's next job that count as not begun."""
        job_id = call.unsent[0]
        if self.room.cache_tokens is None or call.only_reads:
            return call.size(job_id)
        return len(call.job(job_id).tokens)

    @property
    def _room_ahead(self) -> int:
        """What it may have ahead: what others leave of the room, an equal part of it at least."""
        room = self._room.ahead_tokens
        return max(room - self._elsewhere_tokens, room // self._sharers)

    def count_due(self, sizes: Sequence[int]) -> int:
        """Return how many of the next jobs, of these sizes, it has room for: one at least."""
        room = self._room_ahead - self.ahead_tokens
        return max(1, bisect_right(list(accumulate(sizes)), room))

    def may_generate(self, call: EngineCall) -> bool:
        """Return whether there is room for what a call's next job generates, if it does."""
        cache_tokens, sequences = self.room.cache_tokens, self.room.sequences
        count = len(self._to_generate)
        if not count or not call.generates:
            return True
        if sequences is not None and count >= sequences:
            return False
        if cache_tokens is None:
            return True
        to_come = self._unread_prompts + self.measure(call) + LOOK_AHEAD * (count + 1)
        return self._held_tokens + to_come <= cache_tokens

    def add(self, ids: Sequence[int], sizes: Sequence[int]) -> None:
        """Count jobs of these tokens as its own."""
        self._ahead_of.update(zip(ids, sizes, strict=True))
        self.ahead_tokens += sum(sizes)
        self._tell()

    def expect(self, job_id: int, size: int, num_generated: int) -> None:
        """Count tokens that a job which it has, of this size, is expected to generate."""
        self._to_generate[job_id] = num_generated
        self._generated_ahead += num_generated
        self._unread_prompts += size
        self._tell()

    def note_load(self, load: EngineLoad) -> None:
        """Note what generation holds, and which prompts have been read."""
        for job_id in load.started:
            if job_id in self._to_generate:
                self._begin(job_id)
                self._ahead_of[job_id] = 0
        self._held_tokens = load.held_tokens
        self._tell()

    def note_others(self, tokens: int, queues: int) -> None:
        """Note tokens of work that the replica has of so many other queues."""
        self._elsewhere_tokens, self._sharers = tokens, 1 + queues
        self._tell()

    def _begin(self, job_id: int) -> None:
        """Count a job's tokens no longer as not begun."""
        size = self._ahead_of.get(job_id, 0)
        self.ahead_tokens -= size
        if job_id in self._to_generate:
            self._unread_prompts -= size

    def finish(self, job_ids: Collection[int]) -> None:
        """Free the room of jobs that the replica no longer has."""
        for job_id in self._to_generate.keys() & job_ids if self._to_generate else ():
            self._unread_prompts -= self._ahead_of.get(job_id, 0)
            self._generated_ahead -= self._to_generate.pop(job_id)
        self.ahead_tokens -= sum(self._ahead_of.pop(job_id, 0) for job_id in job_ids)
        self._tell()

    def clear(self) -> None:
        """Remove all jobs: the replica's process is gone."""
        self._ahead_of.clear()
        self._to_generate.clear()
        self.ahead_tokens = self._generated_ahead = self._unread_prompts = self._held_tokens = 0
        self._tell()
