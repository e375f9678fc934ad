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
            taken = time_call(work)
            if index:
                seconds[name].append(taken)
    return seconds


def time_call(work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def summarize(seconds: dict[str, list[float]], amount: float, unit: str) -> dict[str, Any]:
    """Rate of each way, and how many times as fast the first way is, pair by pair.

    Each as [minimum, median, maximum].
    """
    first = next(iter(seconds.values()))
    ways = {}
    for name, times in seconds.items():
        ways[name] = {
            f"{unit}_per_s": spread([amount / t for t in times]),
            "first_is_faster_by": spread([t / f for t, f in zip(times, first, strict=True)]),
        }
    return {"runs": len(first), "amount": amount, "unit": unit, "ways": ways}


def compare_with_first(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """How many times as fast the first way is as each of the others: `first / other`."""
    first, *others = seconds
    return {f"{first} / {name}": divide(seconds[name], seconds[first]) for name in others}


def divide(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """How many times as large values are as others, pair by pair: [minimum, median, maximum]."""
    return spread([value / other for value, other in zip(values, others, strict=True)])


def join_results(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Results of several circumstances as one; the circumstance stands in front of each way."""
    joined: dict[str, Any] = {"ways": {}, "ratios": {}}
    for name, result in results.items():
        joined["runs"], joined["unit"] = result["runs"], result["unit"]
        for part in ("ways", "ratios"):
            joined[part] |= {f"{name}, {way}": found for way, found in result[part].items()}
    return joined


def spread(values: Sequence[float]) -> list[float]:
    """[minimum, median, maximum], with four digits."""
    return [float(f"{f(values):.4g}") for f in (min, statistics.median, max)]
