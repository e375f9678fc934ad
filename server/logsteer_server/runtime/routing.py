"""Which replica a job goes to: where its first tokens have been read lately, or has less to do.

The rule: the least of

    tokens that the replica has still to read and generate  -  worth * tokens it need not read again

so a job waits for `worth` tokens of other work rather than have one token of its prefix computed a
second time. With worth 4 and a context of 384 tokens that replica 0 has read, jobs of that context
go to 0 until it has 1536 tokens more to do than 1; then 1 reads the context, too, and from then on
both know it, and share what comes.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from logsteer_server.contract.jobs import Job
from logsteer_server.runtime.occupancy import FULL, Occupancy, Tokens

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
    before = hash((job.salt, adapter, override))
    first, plan = job.plan_salt or (len(tokens), "")
    found = []
    for start in range(0, len(tokens) - size + 1, size):
        is_steered = first < start // 4 + BLOCK
        before = hash((before, tokens[start : start + size], plan if is_steered else ""))
        found.append(before)
    return found


class _Known:
    """The blocks that one replica was given last, at most as many as its cache has tokens for."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def count(self, blocks: Sequence[int]) -> int:
        """Return how many of a job's first blocks it knows."""
        return next((n for n, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def note(self, blocks: Sequence[int], limit: int) -> list[int]:
        """Remember a job's blocks, the first one longest, as a cache does; return the forgotten."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        too_many = len(self._blocks) - limit
        return [self._blocks.popitem(last=False)[0] for _ in range(too_many)]


class Router:
    """Chooses among replicas, and remembers what each was given.

    Of those that know nothing of a job, the one with the least work is best; those that know
    something know its first block, so they are found by that.
    """

    def __init__(self, replicas: int, worth: float) -> None:
        self._known = [_Known() for _ in range(replicas)]
        self._holders: dict[int, set[int]] = {}
        """First block of jobs -> replicas that know it."""
        self._worth = worth

    def choose(self, blocks: Sequence[int], work: Tokens) -> int:
        """Return the number of the replica that a job of these blocks goes to, of those whose work
        is below FULL, of which there is one at least; the first of equals.
        """
        number = int(work.argmin())
        cost = float(work[number])
        holders = self._holders.get(blocks[0], ()) if blocks and self._worth else ()
        worth = self._worth * BLOCK
        most = worth * len(blocks)
        for holder in holders:
            own = float(work[holder])
            if own < FULL and own - most <= cost:
                own -= worth * self._known[holder].count(blocks)
                cost, number = min((cost, number), (own, holder))
        return number

    def note(self, blocks: Sequence[int], place: Occupancy) -> None:
        """Note that a replica was given a job of these blocks."""
        if not blocks:
            return
        self._holders.setdefault(blocks[0], set()).add(place.number)
        limit = (place.room.cache_tokens or UNKNOWN_CACHE) // BLOCK
        for block in self._known[place.number].note(blocks, limit):
            self._forget_holder(block, place.number)

    def _forget_holder(self, block: int, number: int) -> None:
        if (holders := self._holders.get(block)) is not None:
            holders.discard(number)
            if not holders:
                del self._holders[block]

    def forget(self, number: int) -> None:
        """Note that a replica's cache is gone."""
        for block in self._known[number]:
            self._forget_holder(block, number)
        self._known[number] = _Known()
