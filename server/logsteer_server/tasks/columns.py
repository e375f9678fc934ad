"""Row columns: which ones a request reads, how an answer shows them, and their aggregates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer.schemas import SamplingPolicy
from logsteer.schemas.common import Precision
from logsteer_server.contract.jobs import Policy

Column = npt.NDArray[Any]

ARRAY_NAMES = {"logprob": "logprobs", "rank": "ranks"}
"""Columns that stand beside `columns` in an answer, under these names."""


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """What is read from each scored row, as score jobs take it; `logprob` always.

    `reads_end`: the last token is read, too, which probes are to read there.
    """

    columns: tuple[str, ...] = ("logprob",)
    top: int = 0
    policy: Policy = field(default_factory=Policy)
    double: bool = False
    reads_end: bool = False

    @classmethod
    def of(
        cls,
        columns: Iterable[str],
        policy: SamplingPolicy | None = None,
        precision: Precision = "float32",
        top: int = 0,
        *,
        reads_end: bool = False,
    ) -> "ColumnOptions":
        """Return the options of a request's fields."""
        wanted = tuple(dict.fromkeys(["logprob", *columns]))
        cut = Policy(**policy.model_dump()) if policy else Policy()
        return cls(wanted, top, cut, precision == "float64", reads_end)


def show_columns(read: Mapping[str, Column], asked: Sequence[str]) -> dict[str, Any]:
    """Return the columns that were asked for, where every answer has them.

    For `["rank", "entropy"]`: `{"ranks": [...], "columns": {"entropy": [...]}}`.
    """
    shown: dict[str, Any] = {}
    for name, array in ARRAY_NAMES.items():
        if name in asked:
            shown[array] = read[name]
    others = {name: read[name] for name in asked if name not in ARRAY_NAMES}
    return shown | ({"columns": others} if others else {})


def aggregate_columns(
    columns: Mapping[str, Column], window: int
) -> dict[str, dict[str, float | None]]:
    """Return the `Aggregate` of each column over a sequence's tokens, and of surprisal, -logprob.

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
