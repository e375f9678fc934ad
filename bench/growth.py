"""Pairs scored per second as contexts, targets, callers and the vocabulary grow."""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from logsteer import Client
from models import read_vocab
from scoring import make_choices
from timing import summarize, time_in_turn
from workplace import Workplace

SEED = 20_000
"""The first seed: no row that shares the server may find the contexts of another cached."""
LENGTHS = (50, 100, 200, 400, 800)
TARGETS = (1, 2, 4, 8, 16)
CALLERS = (1, 2, 4, 8, 16)
VOCABS = (4_096, 131_072)
"""Of models that are made for it, beside the one of 26,552 that other rows have."""


def measure_growth(place: Workplace, runs: int) -> dict[str, Any]:
    """Measure the four kinds of growth; that with the vocabulary not where the model is given."""
    seeds = itertools.count(SEED)
    vocab = read_vocab(place.find_model())
    found = {}
    with Client(place.share(), timeout=600) as client:
        clock = GrowthClock(client, vocab, runs, seeds)
        for length in LENGTHS:
            name = f"context of {length} tokens, 4 targets"
            found[name] = clock.measure(8, length, 4)
        for targets in TARGETS:
            name = f"{targets} targets, context of 400 tokens"
            found[name] = clock.measure(8, 400, targets)
        for callers in CALLERS:
            name = f"{callers} callers, 4 contexts of 100 tokens each"
            found[name] = clock.measure(4, 100, 4, callers)
        found[_name_vocab(vocab)] = clock.measure(8, 100, 4)
    if place.given is None:
        for size in VOCABS:
            path = place.find_model(vocab=size)
            with place.serve(path) as url, Client(url, timeout=600) as client:
                clock = GrowthClock(client, size, runs, seeds)
                found[_name_vocab(size)] = clock.measure(8, 100, 4)
    return {"ways": found}


def _name_vocab(size: int) -> str:
    return f"vocabulary of {size} tokens, 8 contexts of 100, 4 targets"


class GrowthClock:
    """Times the scoring of fresh contexts on one server."""

    def __init__(
        self, client: Client, vocab: int, runs: int, seeds: "itertools.count[int]"
    ) -> None:
        self._client = client
        self._vocab = vocab
        self._runs = runs
        self._seeds = seeds

    def measure(
        self, contexts: int, length: int, targets: int, callers: int = 1
    ) -> dict[str, Sequence[float]]:
        """Return the rate of so many contexts a caller, each with targets of 6 tokens."""

        def ask(seed: int) -> None:
            items = make_choices(self._vocab, contexts, length, targets, 6, seed)
            self._client.logprob(items, per_token=False)

        def work() -> None:
            with ThreadPoolExecutor(callers) as pool:
                list(pool.map(ask, itertools.islice(self._seeds, callers)))

        seconds = time_in_turn({"own": work}, self._runs)
        rates: dict[str, Sequence[float]] = summarize(
            seconds, callers * contexts * targets, "pairs"
        )["ways"]["own"]
        return {"pairs_per_s": rates["pairs_per_s"]}
