"""Ways of doing the same work, timed in turn."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def time_in_turn(ways: dict[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Seconds of each run of each way, in turn: A B A B …, after one uncounted run of each."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(runs + 1):
        for name, work in ways.items():
            started = time.perf_counter()
            work()
            if index:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def summarize(seconds: dict[str, list[float]], amount: float, unit: str) -> dict[str, Any]:
    """Rate of each way, and how many times as fast the first way is, pair by pair.

    Each as [minimum, median, maximum].
    """
    first = next(iter(seconds.values()))
    ways = {}
    for name, times in seconds.items():
        ways[name] = {
            f"{unit}_per_s": _spread([amount / t for t in times]),
            "first_is_faster_by": _spread([t / f for t, f in zip(times, first, strict=True)]),
        }
    return {"runs": len(first), "amount": amount, "unit": unit, "ways": ways}


def compare(seconds: Sequence[float], others: Sequence[float]) -> list[float]:
    """How many times as fast a way is as another, pair by pair: [minimum, median, maximum]."""
    return _spread([other / own for own, other in zip(seconds, others, strict=True)])


def join_results(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Results of several circumstances as one; the circumstance stands in front of each way."""
    joined: dict[str, Any] = {"ways": {}, "ratios": {}}
    for name, result in results.items():
        joined["runs"], joined["unit"] = result["runs"], result["unit"]
        for part in ("ways", "ratios"):
            joined[part] |= {f"{name}, {way}": found for way, found in result[part].items()}
    return joined


def _spread(values: list[float]) -> list[float]:
    return [float(f"{f(values):.4g}") for f in (min, statistics.median, max)]
