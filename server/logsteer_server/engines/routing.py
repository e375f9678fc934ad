"""Which replica a job goes to: where its first tokens have been read lately, or has less to do.

The rule: the least of

    tokens that the replica has still to read and generate  -  worth * tokens it need not read again

so a job waits for `worth` tokens of other work rather than have one token of its prefix computed a
second time. With worth 4 and a context of 384 tokens that replica 0 has read, jobs of that context
go to 0 until it has 1536 tokens more to do than 1; then 1 reads the context, too, and from then on
both know it, and share what comes.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from logsteer_server.contract.jobs import Job
from logsteer_server.engines.occupancy import Occupancy

BLOCK = 32
"""Tokens that are looked up together: engines share prefixes in blocks of 16 or 32."""
UNKNOWN_CACHE = 131_072
"""Tokens that a replica is taken to remember where its engine does not say."""


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
    before = hash((job.prefix_salt, adapter, override))
    found = []
    for start in range(0, len(tokens) - size + 1, size):
        before = hash((before, tokens[start : start + size]))
        found.append(before)
    return found


class _Known:
    """The blocks that one replica was given last, at most as many as its cache has tokens for."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def count(self, blocks: Sequence[int]) -> int:
        """Return how many of a job's first blocks it knows."""
        return next((n for n, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def note(self, blocks: Sequence[int], limit: int) -> None:
        """Remember a job's blocks, the first one longest, as a cache does."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > limit:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


class Router:
    """Chooses among replicas, and remembers what each was given."""

    def __init__(self, replicas: int, worth: float) -> None:
        self._known = [_Known() for _ in range(replicas)]
        self._worth = worth

    def choose(self, blocks: Sequence[int], places: Sequence[Occupancy]) -> Occupancy:
        """Return where a job of these blocks goes, of one place or more; the first of equals."""

        def cost(place: Occupancy) -> float:
            return place.load - self._worth * BLOCK * self._known[place.number].count(blocks)

        return min(places, key=cost)

    def note(self, blocks: Sequence[int], place: Occupancy) -> None:
        """Note that a replica was given a job of these blocks."""
        limit = (place.room.cache_tokens or UNKNOWN_CACHE) // BLOCK
        self._known[place.number].note(blocks, limit)

    def forget(self, number: int) -> None:
        """Note that a replica's cache is gone."""
        self._known[number].clear()
