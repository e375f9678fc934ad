"""Columns of one sequence as a few numbers."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


def aggregate_columns(
    columns: Iterable[tuple[str, npt.NDArray[Any]]], window: int
) -> dict[str, dict[str, float | None]]:
    """The `Aggregate` of each column over a sequence's tokens, and of `surprisal`, -logprob.

    `early` and `late` are means over the first and the last `window` tokens.
    """
    given = dict(columns)
    if "logprob" in given:
        given["surprisal"] = -given["logprob"]
    return {
        name: _aggregate(values.astype(np.float64), window)
        for name, values in given.items()
        if len(values)
    }


def _aggregate(values: npt.NDArray[np.float64], window: int) -> dict[str, float | None]:
    numbers = {
        "sum": values.sum(),
        "mean": values.mean(),
        "min": values.min(),
        "max": values.max(),
        "early": values[:window].mean(),
        "late": values[-window:].mean(),
    }
    return {name: float(n) if math.isfinite(n) else None for name, n in numbers.items()}
