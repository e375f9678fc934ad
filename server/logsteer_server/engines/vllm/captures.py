"""Captured activations: the rows of one buffer that they are added up in, and who has which.

The buffer is persistent, because captured graphs write into it, and its rows are given out, so
that it is small. A request has a row for each layer and each token that it reads, and keeps them
until it has ended and they are read. A request of four tokens with layers 2 and 5 whose rows begin
at 10, in a step that reads its last three tokens behind seven of others, their places in the step
7, 8 and 9:

    read        each, or their mean      last
    layer 2     rows 11, 12, 13          row 10
    layer 5     rows 15, 16, 17          row 11

Axis letters: L layers, N rows of the buffer, T tokens of a step, D width; lower case t: tokens of a
step that are captured at a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logsteer_server.engines.vllm import staging

Indices = npt.NDArray[np.int64]

Captured = Mapping[int, tuple[Indices, Indices]]
"""By layer: places of tokens in a step, and the rows that their activations are added to."""

CaptureWish = tuple[int, tuple[int, ...], bytes]
"""What a request wants, as plain data: its first row, its layers, and the int64 places of the
tokens that are read."""


class RowPool:
    """Give out runs of neighbouring rows of a buffer, from 1 to `count`; row 0 is nobody's.

    pool = RowPool(10)
    pool.take(6)        range(1, 7)
    pool.take(6)        None: wait
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: list[range] = []

    def take(self, count: int) -> range | None:
        """Return the first run of so many free rows; None where there is none now."""
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
        """Free a run that was taken."""
        self._taken.remove(run)


class CaptureBuffer:
    """The rows, and which of them each token of a step is added to, for one rank.

    `rows_LT` is 0 where nothing is captured: the kernel reads it, the plain form `find`.
    """

    def __init__(self, rows: int, layers: int, tokens: int, width: int, like: Tensor) -> None:
        shape = (rows + 1, width)
        if like.is_cuda:
            self.sums_ND = like.new_zeros(shape, dtype=torch.float32)
        else:  # of numpy's zeros only those that are written to take memory
            self.sums_ND = torch.from_numpy(np.zeros(shape, dtype=np.float32))
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
        """Write the step's rows where the kernel reads them."""
        host_LT = np.zeros(self.rows_LT.shape, dtype=np.int32)
        for layer, (index_t, rows_t) in self._captured.items():
            host_LT[layer, index_t] = rows_t
        staging.write(self.rows_LT, host_LT)

    def find(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return the tokens of this step that are captured at a layer, and their rows."""
        if (captured := self._captured.get(layer)) is None:
            return None
        index_t, rows_t = captured
        return torch.from_numpy(index_t), torch.from_numpy(rows_t)

    def clear(self, rows: range) -> None:
        """Set rows to zero."""
        self.sums_ND[rows.start : rows.stop] = 0

    def take(self, rows: range) -> npt.NDArray[np.float32]:
        """Return what rows hold: [N, D]."""
        found: npt.NDArray[np.float32] = self.sums_ND[rows.start : rows.stop].cpu().numpy().copy()
        return found


@dataclass(frozen=True, slots=True)
class _Capture:
    """A request's rows, so many for each layer; by token, which of those it is added to, or -1."""

    rows: range
    layers: tuple[int, ...]
    per_layer: int
    row_T: Indices


class StepCaptures:
    """Find which tokens of each step are captured, for one rank."""

    def __init__(self, buffer: CaptureBuffer) -> None:
        self._buffer = buffer
        self._captures: dict[str, _Capture] = {}

    def __len__(self) -> int:
        return len(self._captures)

    def begin(self, req_id: str, wish: CaptureWish) -> None:
        """Begin with a request."""
        first, layers, places = wish
        read_t = np.frombuffer(places, np.int64)
        row_T = np.full(int(read_t[-1]) + 1, -1)
        row_T[read_t] = np.arange(len(read_t))
        rows = range(first, first + len(read_t) * len(layers))
        self._captures[req_id] = _Capture(rows, layers, len(read_t), row_T)

    def end(self, req_id: str) -> None:
        """Forget a request that has ended; its rows stay as they are."""
        self._captures.pop(req_id, None)

    def find(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> Captured:
        """Return what is captured of a step; the arguments are those of `TraceRecorder.find`."""
        if not self._captures:
            return {}
        found: dict[int, list[tuple[Indices, Indices]]] = {}
        for place, req_id in enumerate(req_ids):
            capture = self._captures.get(req_id)
            if capture is None:
                continue
            start, begin = int(starts_R[place]), int(computed_R[place])
            if begin == 0:  # also where a preempted request begins again
                self._buffer.clear(capture.rows)
            row_t = capture.row_T[begin : begin + int(starts_R[place + 1]) - start]
            read_t = np.flatnonzero(row_t >= 0)
            if len(read_t):
                for index, layer in enumerate(capture.layers):
                    first = capture.rows.start + index * capture.per_layer
                    found.setdefault(layer, []).append((read_t + start, row_t[read_t] + first))
        return {
            layer: (np.concatenate([i for i, _ in parts]), np.concatenate([r for _, r in parts]))
            for layer, parts in found.items()
        }
