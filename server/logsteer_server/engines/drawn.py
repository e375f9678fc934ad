"""What was read with the tokens of one continuation, from their draw to the outputs."""

from typing import Any

import numpy as np

from logsteer_server.numerics.rows import RowSpec, unpack


class DrawnValues:
    """Hold the values of tokens that no output has had yet; `spec` says what they are."""

    def __init__(self, spec: RowSpec) -> None:
        self._spec = spec
        self._dtype = np.float64 if spec.double else np.float32
        self._parts_NW: list[np.ndarray] = []

    def add(self, values_NW: np.ndarray) -> None:
        """Take in the values of the next N tokens; others may stand behind them in a row."""
        if self._spec.width:
            self._parts_NW.append(values_NW[:, : self._spec.width])

    def take(self, count: int) -> dict[str, Any]:
        """Return those of the next `count` tokens, as fields of a `GenerateOutput`.

        All of them have no entries where the job wants no log-probabilities.
        """
        empty_NW = np.zeros((0, self._spec.width), self._dtype)
        held_NW = np.concatenate([empty_NW, *self._parts_NW], dtype=self._dtype)
        values_NW, self._parts_NW = held_NW[:count], [held_NW[count:]]
        found, none_N0 = unpack(values_NW, self._spec), values_NW[:, :0]
        columns = dict(found.columns)
        return {
            "logprobs": columns.pop("logprob", none_N0.ravel()),
            "columns": columns,
            "top_ids": none_N0.astype(np.int32) if found.top_ids is None else found.top_ids,
            "top_logprobs": none_N0 if found.top_logprobs is None else found.top_logprobs,
        }
