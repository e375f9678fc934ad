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


def summarize(
    seconds: Mapping[str, Sequence[float]],
    amount: float,
    unit: str,
    pairs: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Rate of each way, and how many times as fast the first of each pair is, run by run.

    Each as [minimum, median, maximum]. Without `pairs` the first way is compared with each other.
    """
    first, *others = seconds
    rates = {name: spread([amount / taken for taken in times]) for name, times in seconds.items()}
    return {
        "runs": len(seconds[first]),
        "amount": amount,
        "unit": unit,
        "ways": {name: {f"{unit}_per_s": rate} for name, rate in rates.items()},
        "ratios": {
            f"{own} / {other}": divide(seconds[other], seconds[own])
            for own, other in pairs or [(first, other) for other in others]
        },
    }


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
