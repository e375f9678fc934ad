"""Requests of a workload, drawn by a seed: when they come, how long they are, what they share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from logsteer_server.contract.batches import ScoreJobs, find_starts
from logsteer_server.contract.jobs import ScoreJob

BURST_SHARE = 0.2
"""Share of the time in which requests come `burst` times as often as in the mean."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What is asked: requests of `items` texts each, in the mean `per_s` requests a second.

    `lengths` are quantiles of a text's own tokens, all of which are scored: the smallest, others in
    equal steps of probability, the largest. In front of them, the texts of a request have a prefix
    of `prefix_tokens`, which is one of `groups`, all equally often; without groups they have none.

    Requests come as a Poisson process. With `burst` b above 1 its rate changes: for spells of
    `burst_s` seconds in the mean, a fifth of the time, it is b times the mean, else less.
    """

    per_s: float
    items: int = 1
    lengths: Sequence[float] = (100, 100)
    prefix_tokens: int = 0
    groups: int = 0
    burst: float = 1.0
    burst_s: float = 20.0
    vocab: int = 30_000

    @property
    def mean_length(self) -> float:
        """A text's own tokens in the mean."""
        return float(np.trapezoid(self.lengths) / (len(self.lengths) - 1))

    @property
    def scored_per_s(self) -> float:
        """Tokens that are to be scored a second, in the mean."""
        return self.per_s * self.items * self.mean_length


@dataclass(frozen=True, slots=True)
class Request:
    """What comes at a moment: jobs, and how many tokens at the beginning of each are shared."""

    at: float
    jobs: ScoreJobs
    shared_tokens: int


def draw_lengths(quantiles: Sequence[float], count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw so many lengths in tokens, one at least, by linear interpolation of quantiles."""
    at = np.linspace(0, 1, len(quantiles))
    return np.maximum(1, np.rint(np.interp(rng.random(count), at, quantiles)).astype(np.int64))


def draw_times(mix: Mix, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Draw when requests come, of so many seconds."""
    if mix.burst <= 1:
        gaps = rng.exponential(1 / mix.per_s, int(mix.per_s * seconds * 1.2) + 100)
        times = np.cumsum(gaps)
        return times[times < seconds]
    low = (1 - BURST_SHARE * mix.burst) / (1 - BURST_SHARE)
    if low < 0:
        raise ValueError(f"burst is at most {1 / BURST_SHARE:g}")
    found, now, high = [], 0.0, False
    while now < seconds:
        spell = rng.exponential(mix.burst_s * (1 if high else (1 - BURST_SHARE) / BURST_SHARE))
        count = rng.poisson(mix.per_s * (mix.burst if high else low) * spell)
        found.append(now + np.sort(rng.random(count)) * spell)
        now, high = now + spell, not high
    times = np.concatenate(found)
    return times[times < seconds]


def draw_requests(mix: Mix, seconds: float, seed: int) -> Iterator[Request]:
    """Draw the requests of so many seconds; the same seed gives the same ones."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(10, mix.vocab, (max(1, mix.groups), mix.prefix_tokens), dtype=np.int32)
    for at in draw_times(mix, seconds, rng).tolist():
        lengths = draw_lengths(mix.lengths, mix.items, rng)
        yield Request(at, make_jobs(mix, lengths, prefixes, rng), mix.prefix_tokens)


def make_jobs(
    mix: Mix, lengths: np.ndarray, prefixes: np.ndarray, rng: np.random.Generator
) -> ScoreJobs:
    """Return jobs whose own texts have these lengths, behind one of the prefixes."""
    prefix = prefixes[rng.integers(len(prefixes))] if mix.groups else prefixes[0, :0]
    own = rng.integers(10, mix.vocab, int(lengths.sum()), dtype=np.int32)
    parts = np.split(own, np.cumsum(lengths)[:-1])
    tokens = np.concatenate([piece for part in parts for piece in (prefix, part)])
    like = ScoreJob(tokens[:1], tokens[:1])
    return ScoreJobs(
        like,
        tokens,
        find_starts(lengths + len(prefix)),
        own,
        find_starts(lengths),
        np.zeros(len(lengths), dtype=np.bool_),
    )
