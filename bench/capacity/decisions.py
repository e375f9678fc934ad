"""What the queue in front of replicas costs as they become more: CPU time of one decision each.

    .venv/bin/python -m bench.capacity.decisions

Everything is the service's own code, called without processes: a fleet whose places have between
none and all of the tokens that they take in, and calls of 64 texts. The figures go to
`measured.json`.
"""

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.capacity.steps import write_measured
from bench.capacity.traffic import Mix, make_jobs
from logsteer_server.contract.engine import EngineRoom
from logsteer_server.engines.queue import FairQueue
from logsteer_server.engines.routing import BLOCK, UNKNOWN_CACHE, Router, hash_blocks
from logsteer_server.engines.turns import EngineCall

PLACES = (1, 10, 100, 1000)
TAKEN_IN = 2**24
"""Tokens that a place takes in: none of what is timed is full, unless it is to be."""
TEXTS = 64
"""Texts of a call."""
SECONDS = 0.3
"""For about so long each decision is timed, in rounds of which the fastest counts."""
ROUNDS = 5
SHORT = Mix(1, TEXTS, (25, 25))
LONG = Mix(1, TEXTS, (64, 64), prefix_tokens=320, groups=50)


def make_fleet(places: int, seed: int = 0) -> FairQueue:
    """Return a queue whose places have some of what they take in."""
    rng = np.random.default_rng(seed)
    queue = FairQueue(EngineRoom(TAKEN_IN), replicas=places)
    for place in queue.places:
        ids = [-1 - 64 * place.number - n for n in range(int(rng.integers(1, 60)))]
        place.add(ids, [256] * len(ids))
    return queue


def time_fastest(work: Callable[[], int]) -> float:
    """Return the CPU microseconds of one of the things that `work` does, which says how many."""
    found = []
    for _ in range(ROUNDS):
        count, began = 0, time.process_time()
        while (taken := time.process_time() - began) < SECONDS / ROUNDS:
            count += work()
        found.append(1e6 * taken / count)
    return min(found)


class Decisions:
    """Times what an ingress decides for a fleet of so many places."""

    def __init__(self, places: int) -> None:
        self._queue = make_fleet(places)
        self._next = 0
        rng = np.random.default_rng(1)
        prefixes = rng.integers(0, 30_000, (LONG.groups, LONG.prefix_tokens), dtype=np.int32)
        self._prefixes, self._rng = prefixes, rng

    def _make_calls(self, mix: Mix, count: int) -> list[EngineCall]:
        calls = []
        for _ in range(count):
            jobs = make_jobs(mix, np.full(TEXTS, int(mix.mean_length)), self._prefixes, self._rng)
            calls.append(EngineCall(jobs, self._next))
            self._next += TEXTS
        return calls

    def _end(self, calls: list[EngineCall]) -> None:
        for call in calls:
            for number, ids in self._queue.drop(call).items():
                self._queue.finish(ids, number)

    def time_routing(self, mix: Mix) -> float:
        """Return microseconds for a text that is given a replica."""
        queue, found = self._queue, []
        for _ in range(ROUNDS):
            calls = self._make_calls(mix, 8)
            began = time.process_time()
            for call in calls:
                queue.put(call)
                queue.take()
            found.append(1e6 * (time.process_time() - began) / (TEXTS * len(calls)))
            assert not queue.num_waiting
            self._end(calls)
        return min(found)

    def time_message(self) -> float:
        """Return microseconds for a message that a text has been answered, while others wait."""
        queue = self._queue
        places = list(queue.places)
        for place in places:  # none has room
            place.add([-(10**9) - place.number], [TAKEN_IN])
        waiting = self._make_calls(SHORT, 1)
        queue.put(waiting[0])
        order = [n for place in places for n in list(place._ahead_of)[:1]]
        at = 0

        def finish() -> int:
            nonlocal at
            number = at % len(places)
            at += 1
            queue.finish([order[number]], number)
            queue.take()
            return 1

        found = time_fastest(finish)
        queue.drop(waiting[0])
        for place in places:
            queue.finish([-(10**9) - place.number], place.number)
        return found

    def time_drop(self) -> float:
        """Return microseconds for a call that leaves when all of its texts have been answered."""
        calls = self._make_calls(SHORT, 8)

        def drop() -> int:
            for call in calls:
                self._queue.drop(call)
            return len(calls)

        return time_fastest(drop)


def measure_table() -> float:
    """Return the bytes that a router needs for one replica whose table is full."""
    queue = FairQueue(EngineRoom(2**40), replicas=2)
    router, place = Router(2, 4.0), queue.places[0]
    rng = np.random.default_rng(0)
    blocks = UNKNOWN_CACHE // BLOCK
    jobs = make_jobs(
        Mix(1), np.full(blocks // 32, 1024), rng.integers(0, 9, (1, 0), dtype=np.int32), rng
    )
    tracemalloc.start()
    for job in jobs:
        router.note(hash_blocks(job), place)
    found = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return float(found)


def measure(places: int) -> dict[str, float]:
    """Return microseconds of every decision with so many places."""
    decisions = Decisions(places)
    found = {
        "route_short_us": decisions.time_routing(SHORT),
        "route_long_us": decisions.time_routing(LONG),
        "message_us": decisions.time_message(),
        "drop_us": decisions.time_drop(),
    }
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def main() -> None:
    """Measure for each number of places, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="write nothing")
    given = parser.parse_args()
    found: dict[str, Any] = {str(places): measure(places) for places in PLACES}
    found["table_bytes"] = round(measure_table())
    if not given.print:
        write_measured("decisions", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
