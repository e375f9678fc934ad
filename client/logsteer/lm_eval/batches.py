"""How `logsteer.lm_eval` cuts its work into requests, and what it reads of their answers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel

from logsteer.schemas import UsedAdapter

Ids: TypeAlias = list[int]
T = TypeVar("T")
S = TypeVar("S")

TOKENS_PER_REQUEST = 131_072
IN_FLIGHT = 4


# The full schemas of the answers would cost more than the rest of the client's work; fields that
# are not named here are skipped.
class Score(BaseModel):
    """What is read of one target's score; `logprob` is None where it is not finite."""

    logprob: float | None
    is_greedy: bool


class Item(BaseModel):
    """One item of `/logprob`."""

    targets: list[Score]


class Scores(BaseModel):
    """The answer of `/logprob`."""

    results: list[Item]
    adapter: UsedAdapter | None = None


class Tokens(BaseModel):
    """One text of `/tokenize`."""

    token_ids: Ids


class Tokenized(BaseModel):
    """The answer of `/tokenize`."""

    results: list[Tokens]


@dataclass
class ScoreBatch:
    """Items of one `/logprob` request; `places[k]`: where target k's score belongs."""

    items: list[dict[str, Any]] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0


def make_batches(pairs: Iterable[tuple[Ids, Ids]]) -> list[ScoreBatch]:
    """Put pairs of context and target into requests; place k is pair k.

    Equal contexts share an item, so that the server reads them once, and equal pairs a target. A
    pair whose target is empty is in no batch.
    """
    groups: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for place, (context, target) in enumerate(pairs):
        if target:
            groups.setdefault(tuple(context), {}).setdefault(tuple(target), []).append(place)
    batches: list[ScoreBatch] = []
    for context_key, targets in groups.items():
        item: dict[str, Any] | None = None
        for target_key, places in targets.items():
            more = len(context_key) + len(target_key)
            if not batches or batches[-1].num_tokens + more > TOKENS_PER_REQUEST:
                batches.append(ScoreBatch())
                item = None
            if item is None:
                item = {"context_ids": context_key, "target_ids": []}
                batches[-1].items.append(item)
            item["target_ids"].append(target_key)
            batches[-1].places.append(places)
            batches[-1].num_tokens += more
    return batches


def cut_slices(values: Iterable[T], count: int, weigh: Callable[[T], int]) -> list[list[T]]:
    """Cut values into lists of at most `count`, each of one value or within a request's tokens."""
    slices: list[list[T]] = []
    weight = 0
    for value in values:
        more = weigh(value)
        if not slices or len(slices[-1]) >= count or weight + more > TOKENS_PER_REQUEST:
            slices.append([])
            weight = 0
        slices[-1].append(value)
        weight += more
    return slices


def run_concurrently(work: Callable[[T], S], batches: Sequence[T]) -> Iterator[tuple[T, S]]:
    """Yield each batch with what `work` makes of it, in order; a few run at any time."""
    if len(batches) == 1:
        yield batches[0], work(batches[0])
        return
    # Threads, as the caller may be a notebook, whose event loop runs already.
    pool = ThreadPoolExecutor(IN_FLIGHT)
    try:
        yield from zip(batches, pool.map(work, batches), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)
