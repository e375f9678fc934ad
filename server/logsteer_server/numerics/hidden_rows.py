"""Compute rows' columns from hidden states, a few rows at a time: first the head, then columns.

The two steps have separate bounds: a product with the head reads all of its weights, for one row or
for hundreds; columns need many times the memory of the logits.
Axis letters: R rows, T targets, V vocabulary, D hidden size, W values of a row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from logsteer_server.numerics.adjustments import TokenHistory
from logsteer_server.numerics.rows import RowFiles, Rows, RowSpec, read_rows
from logsteer_server.numerics.sampling import log_softmax

BYTES_PER_MADE_LOGIT = 4
"""Most bytes of a logit from the head: float32."""

ENOUGH_ROWS = 256
"""Rows beyond which a CPU's product with the head gets no cheaper per row."""
CACHED_LOGITS = 2**19
"""Logits whose columns a CPU computes at once: 2 MiB, and as much for each temporary, which fit its
cache. A product has more only to reach ENOUGH_ROWS.
"""


@dataclass(frozen=True, slots=True)
class RowBounds:
    """Bounds on the memory of scoring, in bytes; at least one row is computed at a time.

    Args:
        logits: for the logits of one product with the head.
        columns: for the temporaries of columns.

    """

    logits: int
    columns: int

    def rows_per_product(self, vocab_size: int, spec: RowSpec, device: torch.device) -> int:
        """Return the number of rows in one product with the head."""
        size = 2 * BYTES_PER_MADE_LOGIT if spec.double else BYTES_PER_MADE_LOGIT
        rows = self.logits // (size * vocab_size)
        if device.type == "cpu":
            rows = min(rows, max(ENOUGH_ROWS, CACHED_LOGITS // vocab_size))
        elif rows > GPU_ROWS:
            rows -= rows % GPU_ROWS
        return max(1, rows)

    def rows_per_pass(self, vocab_size: int, spec: RowSpec, device: torch.device) -> int:
        """Return the number of rows whose columns are computed at once."""
        rows = self.columns // (spec.bytes_per_logit(device) * vocab_size)
        if device.type == "cpu":
            rows = min(rows, CACHED_LOGITS // vocab_size)
        return max(1, rows)


WIDENED_BYTES = 32 * 2**20
"""Part of a half-precision head that is converted to float32 at once: enough that a CPU's product
is as fast as with a float32 copy of the whole head."""


def multiply_wide(hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """Return the product with a head [R, V] in float32, for a head of any dtype.

    The head is converted a part of the vocabulary at a time.
    """
    step = max(1, WIDENED_BYTES // (4 * weight_VD.shape[1]))
    wide_RD = hidden_RD.float()
    logits_RV = wide_RD.new_empty((*wide_RD.shape[:-1], len(weight_VD)))
    for start in range(0, len(weight_VD), step):
        part = slice(start, start + step)
        logits_RV[..., part] = linear(wide_RD, weight_VD[part].float())
    return logits_RV if bias_V is None else logits_RV + bias_V.float()


GPU_ROWS = 128
"""Rows of a tile of a GPU's product; chunks that are no multiples of it waste part of a tile."""


def split_chunks(count: int, step: int, tile: int = 1) -> Iterator[slice]:
    """Yield slices that cover `count` rows, each of at most `step`, of nearly equal sizes.

    A small rest would have other rounding than the other chunks, and cost more a row. If `step` is
    a multiple of `tile`, so are all slices except the last.
    """
    chunks = -(-count // step)
    if chunks > 1 and step % tile == 0 and tile > 1:
        size = -(-count // (chunks * tile)) * tile
        yield from (slice(start, min(count, start + size)) for start in range(0, count, size))
        return
    for i in range(chunks):
        yield slice(count * i // chunks, count * (i + 1) // chunks)


def join_equal(index_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices [R] without consecutive duplicates, and the row of each target [T].

    [7, 7, 7, 3, 4] gives [7, 3, 4], and the targets have rows 0, 0, 0, 1 and 2.
    """
    is_new_T = np.ones(len(index_T), dtype=bool)
    is_new_T[1:] = index_T[1:] != index_T[:-1]
    return index_T[is_new_T], np.cumsum(is_new_T) - 1


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """R hidden states [R, D], and T targets: target t follows row `row_T[t]`, in order of rows.

    `before` and `alternatives_TK`: as `Rows` takes them, for each target.
    """

    hidden_RD: Tensor
    targets_T: Tensor
    row_T: np.ndarray
    before: Sequence[tuple[TokenHistory, int]] = ()
    alternatives_TK: Tensor | None = None

    @classmethod
    def take(
        cls,
        hidden_ND: Tensor,
        index_T: np.ndarray,
        targets_T: np.ndarray,
        before: Sequence[tuple[TokenHistory, int]] = (),
        alternatives: Sequence[np.ndarray] = (),
    ) -> "HiddenRows":
        """Gather the hidden states of targets at `index_T`; targets that share one share a row.

        `alternatives`: the targets' alternatives in parts, [T, K] in all, or empty.
        """
        index_R, row_T = join_equal(index_T)
        device = hidden_ND.device
        others_TK = torch.from_numpy(np.concatenate(alternatives)) if alternatives else None
        return cls(
            hidden_ND[torch.from_numpy(index_R).to(device)],
            torch.from_numpy(targets_T).to(device, torch.int64),
            row_T,
            before,
            None if others_TK is None else others_TK.to(device, torch.int64),
        )

    @classmethod
    def of(cls, hidden_RD: Tensor, targets_R: Tensor) -> "HiddenRows":
        """Give each target a row of its own."""
        return cls(hidden_RD, targets_R, np.arange(len(targets_R)))

    def find_targets(self, rows: slice) -> slice:
        """Return the targets that follow some rows."""
        first, last = np.searchsorted(self.row_T, [rows.start, rows.stop])
        return slice(int(first), int(last))

    def pick(self, logits_rV: Tensor, first: int, targets: slice) -> Tensor:
        """Return the logits [t, V] before some targets, from those of rows `first` onward."""
        row_t = self.row_T[targets] - first
        begin, end = int(row_t[0]), int(row_t[-1]) + 1
        if end - begin == len(row_t):
            return logits_rV[begin:end]
        return logits_rV[torch.from_numpy(row_t).to(logits_rV.device)]


def read_hidden(
    rows: HiddenRows,
    project: Callable[[Tensor], Tensor],
    vocab_size: int,
    spec: RowSpec,
    bounds: RowBounds,
    files: RowFiles | None = None,
) -> Tensor:
    """Compute the values that `spec` names for T targets [T, W].

    `project` maps hidden states [r, D] to logits [r, V]; it gets as many rows at once as the bounds
    allow, so nothing of size rows x vocabulary outlives a chunk. All values of a non-finite row are
    NaN. Errors: OSError of the files; a failed write is raised only at the end, because several
    ranks compute together.
    """
    files = files or RowFiles()
    device = rows.hidden_RD.device
    out_TW = torch.empty((len(rows.targets_T), spec.width), device=device, dtype=spec.dtype)
    per_product = bounds.rows_per_product(vocab_size, spec, device)
    per_pass = bounds.rows_per_pass(vocab_size, spec, device)
    if device.type == "cuda" and spec.is_fused and not files.export:
        per_pass = per_product  # the kernel needs no room
    tile = 1 if device.type == "cpu" else GPU_ROWS
    for chunk in split_chunks(len(rows.hidden_RD), per_product, tile):
        hidden_rD = rows.hidden_RD[chunk]
        logits_rV = project(hidden_rD)
        finite_r = hidden_rD.isfinite().all(-1)
        owners = rows.find_targets(chunk)
        for part in split_chunks(owners.stop - owners.start, per_pass):
            targets = slice(owners.start + part.start, owners.start + part.stop)
            values_tW, finite_t = _read_targets(
                rows, logits_rV, chunk, targets, spec, files, project
            )
            finite_t &= rows.pick(finite_r, chunk.start, targets)
            out_TW[targets] = values_tW.masked_fill_(~finite_t[:, None], torch.nan)
        del logits_rV  # before the next product makes as many
    if files.export and files.export.error:
        raise files.export.error
    return out_TW


def _read_targets(
    rows: HiddenRows,
    logits_rV: Tensor,
    chunk: slice,
    targets: slice,
    spec: RowSpec,
    files: RowFiles,
    project: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the values of some targets [t, W], from the logits of a chunk's rows, and whether each
    target's row is finite [t].
    """
    place, count = files.first + targets.start, targets.stop - targets.start
    reference_tV = None
    if files.reference:
        reference_tV = files.reference.read(place, count, logits_rV.device)
        if files.are_hidden:
            reference_tV = log_softmax(project(reference_tV.to(rows.hidden_RD)).to(spec.dtype))
    logits_tV = rows.pick(logits_rV, chunk.start, targets)
    kind, others_TK = Rows, rows.alternatives_TK
    if logits_tV.is_cuda and not spec.double:  # imported here, because a CPU may have no Triton
        from logsteer_server.numerics.row_kernel import FusedRows

        kind = FusedRows
    found = kind(
        logits_tV,
        rows.targets_T[targets],
        reference_tV,
        spec.policy,
        spec.eos_ids,
        spec.double,
        before=rows.before[targets],
        alternatives_RK=None if others_TK is None else others_TK[targets],
        beta=spec.beta,
    )
    if files.export and files.are_hidden:
        files.export.write(place, rows.pick(rows.hidden_RD[chunk], chunk.start, targets))
    elif files.export:
        files.export.write(place, found.log_probs_RV)
    return read_rows(found, spec), found.finite_R
