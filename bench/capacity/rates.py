"""What has been measured, as the plan and the simulation take it."""

from collections.abc import Sequence
from typing import Any

from bench.capacity.engine import StepCost
from bench.capacity.steps import read_measured

MODELS = ("demo", "18 M")
"""Models whose steps are measured here, both in float32."""
WEIGHTS = {"demo": 4 * 1.02e6, "18 M": 4 * 18e6}
"""Bytes."""
TOKEN_BYTES = {"demo": 2 * 5 * 2 * 32 * 4, "18 M": 2 * 4 * 6 * 64 * 4}
"""Keys and values of a token: 2, by layers, heads that have them, numbers of a head, bytes."""


def read_cost(model: str) -> StepCost:
    """Return the fitted steps of a model."""
    found = read_measured()["steps"][model]
    return StepCost(
        1e-3 * found["fixed_ms"],
        1e-6 * found["token_us"],
        1e-6 * found["sequence_us"],
        1e-9 * found["pair_ns"],
    )


def read_lengths(name: str) -> Sequence[float]:
    """Return the quantiles of the lengths of a data set, in tokens of the demo's tokenizer."""
    found: list[float] = read_measured()["lengths"][name]["quantiles"]
    return found


def read_section(name: str) -> dict[str, Any]:
    """Return a section of the measurements."""
    found: dict[str, Any] = read_measured()[name]
    return found
