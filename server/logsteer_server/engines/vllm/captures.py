"""Captured activations: the rows of one buffer that they are stored in, and who has which.

The buffer is persistent, because captured graphs write into it, and its rows are given out, so
that it is small. A request has a row for each token that it may come to capture and each layer, and
keeps them until it has ended and they are read. A token that is computed again, as after a
preemption, is stored again. A request of four tokens with layers 2 and 5 whose rows begin at 10, in
a step that reads its last three tokens behind seven of others, their places in the step 7, 8 and 9:

    read        each, or their mean      last
    layer 2     rows 12, 14, 16          row 10
    layer 5     rows 13, 15, 17          row 11

Axis letters: L layers, N rows of the buffer, T tokens of a step, D width; lower case t: tokens of a
step that are captured at a layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logsteer_server.engines.vllm import staging
from logsteer_server.engines.vllm.stream import read_stream

Indices = npt.NDArray[np.int64]

Captured = Mapping[tuple[int, bool], tuple[Indices, Indices]]
"""By layer, and whether it is before steering: places of tokens in a step, and the rows that their
activations are stored in."""


@dataclass(frozen=True, slots=True, eq=False)
class CaptureWish:
    """What a request captures: its first row, layers, the positions of its tokens, and whether the
    activations are those before steering.
    """

    first: int
    layers: tuple[int, ...]
    places: Indices
    before: bool


class RowPool:
    """Give out runs of neighbouring rows of a buffer, from 1 to `count`; row 0 is unused.

    pool = RowPool(10)
    pool.take(6)        range(1, 7)
    pool.take(6)        None: wait
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: list[range] = []

    def take(self, count: int) -> range | None:
        """Return the first run of so many free rows; None if all are taken."""
        first = 1
        for index, run in enumerate(self._taken):
            if run.start - first >= count:
                self._taken.insert(index, range(first, first + count))
                return self._taken[index]
            first = run.stop
        if self._count + 1 - first < count:
            return None
        self._taken.append(range(first, first + count))
        return self._taken[-1]

    def release(self, run: range) -> None:
        """Free a run of rows."""
        self._taken.remove(run)


class CaptureBuffer:
    """The rows, and in which of them each token of a step is stored, for one rank.

    `rows_LT` is 0 where a marked token is not captured: the kernel reads it, the plain form `find`.
    """

    def __init__(self, rows: int, layers: int, tokens: int, width: int, like: Tensor) -> None:
        shape = (rows + 1, width)
        if like.is_cuda:
            self.stored_ND = like.new_zeros(shape, dtype=torch.float32)
        else:  # of numpy's zeros only those that are written to take memory
            self.stored_ND = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        self.rows_LT = like.new_zeros((layers, tokens), dtype=torch.int32)
        self._captured: Captured = {}

    def mark(self, captured: Captured) -> None:
        """Say which tokens of the next step are captured. Call it between two steps."""
        if not captured and not self._captured:
            return
        self._captured = captured
        if self.rows_LT.is_cuda:
            self.fill_rows()

    def fill_rows(self) -> None:
        """Write the step's rows where the kernel reads them, as far as tokens are captured."""
        count = 1 + max((int(index_t.max()) for index_t, _ in self._captured.values()), default=-1)
        host_LT = np.zeros((len(self.rows_LT), count), dtype=np.int32)
        for (layer, _), (index_t, rows_t) in self._captured.items():
            host_LT[layer, index_t] = rows_t
        staging.write(self.rows_LT[:, :count], host_LT)

    def store(
        self, hidden_TD: Tensor, residual_TD: Tensor | None, layer: int, *, before: bool
    ) -> None:
        """Store the tokens of this step that are captured at a layer: the plain form, for CPUs."""
        if (captured := self._captured.get((layer, before))) is None:
            return
        index_t, rows_t = map(torch.from_numpy, captured)
        stream_tD = read_stream(hidden_TD, residual_TD, index_t)
        self.stored_ND.index_copy_(0, rows_t, stream_tD)

    def take(self, rows: range) -> npt.NDArray[np.float32]:
        """Return what rows hold: [N, D]."""
        found: npt.NDArray[np.float32] = self.stored_ND[rows.start : rows.stop].cpu().numpy().copy()
        return found


def find_captured(
    wishes: Sequence[CaptureWish | None], starts_R: Indices, computed_R: Indices
) -> Captured:
    """Return what is captured of a step, given the wish of each of its R requests.

    `starts_R` [R + 1]: the index of each request's first token in the step, then their number;
    `computed_R`: the positions of these tokens.
    """
    found: dict[tuple[int, bool], list[tuple[Indices, Indices]]] = {}
    for place, wish in enumerate(wishes):
        if wish is None:
            continue
        start, begin = int(starts_R[place]), int(computed_R[place])
        end = begin + int(starts_R[place + 1]) - start
        some = slice(*np.searchsorted(wish.places, (begin, end)))
        index_t = wish.places[some] - begin + start
        rows_t = np.arange(some.start, some.stop) * len(wish.layers) + wish.first
        for number, layer in enumerate(wish.layers if len(index_t) else ()):
            found.setdefault((layer, wish.before), []).append((index_t, rows_t + number))
    return {
        key: (np.concatenate([i for i, _ in parts]), np.concatenate([r for _, r in parts]))
        for key, parts in found.items()
    }
