"""Counts that are added to on the way of a request and read when somebody asks.

They are plain numbers of one thread: adding to one takes some 50 ns, where a counter of Prometheus'
client takes 1 µs and a lock. `LiveCollector` makes metrics of them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
)  # fmt: skip
"""Upper bounds of a histogram of times: a millisecond to the default request_timeout_s."""


@dataclass(slots=True, eq=False)
class Spread:
    """How many values lie below each of the bounds, and their sum.

    `counts` has one more entry than there are bounds: values beyond the last one.

        bounds 1, 2; values 0.5, 2, 2, 7     counts 1, 2, 1     total 11.5
    """

    bounds: Sequence[float] = SECONDS
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def note(self, value: float, times: int = 1) -> None:
        """Count a value in, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True, eq=False)
class ModelTally:
    """What one model has done so far; times in seconds."""

    prompt_tokens: int = 0
    scored_tokens: int = 0
    generated_tokens: int = 0
    prefix_cached_tokens: int = 0
    steered_tokens: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    queue: Spread = field(default_factory=Spread)
    engine: Spread = field(default_factory=Spread)
    first_token: Spread = field(default_factory=Spread)
    between_tokens: Spread = field(default_factory=Spread)


@dataclass(slots=True, eq=False)
class KeyTally:
    """What was done for one key so far."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    scored_tokens: int = 0
    generated_tokens: int = 0


@dataclass(slots=True, eq=False)
class TokenTimes:
    """When the tokens of one streamed call came, for the two times that its reader feels.

    `accepted`: when the call was taken on, in the clock of `note`.
    """

    tally: ModelTally
    accepted: float
    _latest: dict[int, float] = field(default_factory=dict)

    def note(self, number: int, tokens: int, now: float) -> None:
        """Count in that so many tokens of a sequence have come, which is one of the call's."""
        latest = self._latest
        before = latest.get(number)
        if before is not None:
            self.tally.between_tokens.note((now - before) / tokens, tokens)
        elif not latest:
            self.tally.first_token.note(now - self.accepted)
        latest[number] = now
