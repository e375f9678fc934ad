"""Columns read from rows of logits. Every engine reads its rows here, so they agree.

A row is the logits z over the vocabulary that a model puts out after one token; the token that
follows it in the text is the row's target x. Axis letters: R rows, V vocabulary, K alternatives.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

MAX_EXACT_ID = 2**24
"""Token ids and ranks travel in float32 beside the scores; up to here they are exact."""


class Rows:
    """R rows of logits with their targets; what several columns need is computed once.

    Args:
        logits_RV: logits of any floating dtype, converted to float32.
        targets_R: int64, the token that follows each row.
        reference_RV: float32 log-probabilities of another model at the same rows, for the columns
            that compare with it.

    """

    def __init__(
        self, logits_RV: Tensor, targets_R: Tensor, reference_RV: Tensor | None = None
    ) -> None:
        self.logits_RV = logits_RV.float()
        self.targets_R = targets_R
        self._reference_RV = reference_RV

    @cached_property
    def log_normalizer_R(self) -> Tensor:
        """The log of each row's sum of exponentials."""
        return torch.logsumexp(self.logits_RV, dim=-1)

    @cached_property
    def log_probs_RV(self) -> Tensor:
        """log p of every token, per row."""
        return self.logits_RV - self.log_normalizer_R[:, None]

    @property
    def reference_RV(self) -> Tensor:
        """The other model's log-probabilities. Errors: ValueError where there are none."""
        if self._reference_RV is None:
            raise ValueError("this column compares with another model's log-probabilities")
        return self._reference_RV

    @cached_property
    def target_logits_R(self) -> Tensor:
        """The logit of each row's target."""
        return self.logits_RV.gather(-1, self.targets_R[:, None]).squeeze(-1)


def logprob(rows: Rows) -> Tensor:
    """log p(x) per row, in nats, with p = softmax(z)."""
    return rows.target_logits_R - rows.log_normalizer_R


def rank(rows: Rows) -> Tensor:
    """1 + the number of tokens with a strictly larger logit than x, per row."""
    return 1 + (rows.logits_RV > rows.target_logits_R[:, None]).sum(-1)


def entropy(rows: Rows) -> Tensor:
    """-sum p log p per row, in nats."""
    return -_expect(rows.log_probs_RV, rows.log_probs_RV)


def kl(rows: Rows) -> Tensor:
    """KL(reference || model) = sum p_ref (log p_ref - log p) per row, in nats."""
    return _expect(rows.reference_RV, rows.reference_RV - rows.log_probs_RV)


def top1_agrees(rows: Rows) -> Tensor:
    """1 where the most probable token is also the reference's, else 0."""
    return rows.logits_RV.argmax(-1) == rows.reference_RV.argmax(-1)


def _expect(log_p_RV: Tensor, values_RV: Tensor) -> Tensor:
    """sum p v per row; a token with p = 0 adds nothing, whatever its v."""
    return (log_p_RV.exp() * values_RV).nan_to_num(nan=0.0).sum(-1)


COLUMNS: dict[str, Callable[[Rows], Tensor]] = {
    "logprob": logprob,
    "rank": rank,
    "entropy": entropy,
    "kl": kl,
    "top1_agrees": top1_agrees,
}
PUBLIC_COLUMNS = ("logprob", "rank", "entropy")
"""The columns that a request may name; the others serve comparisons."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read from each row: columns by name, and K most probable alternatives."""

    columns: tuple[str, ...] = ("logprob",)
    top: int = 0

    @property
    def width(self) -> int:
        """Numbers per row: one per column, an id and a log-probability per alternative."""
        return len(self.columns) + 2 * self.top


def read_rows(rows: Rows, reading: Reading) -> Tensor:
    """The reading of each row: float32 [R, width], columns, then K ids, then K log-probabilities.

    Errors: ValueError where the vocabulary is too large for ids to be exact in float32.
    """
    if rows.logits_RV.shape[-1] > MAX_EXACT_ID:
        raise ValueError(f"a vocabulary of more than {MAX_EXACT_ID} tokens cannot be ranked")
    parts = [COLUMNS[name](rows).float()[:, None] for name in reading.columns]
    if reading.top:
        top = rows.logits_RV.topk(min(reading.top, rows.logits_RV.shape[-1]), dim=-1)
        parts += [top.indices.float(), top.values - rows.log_normalizer_R[:, None]]
    return torch.cat(parts, dim=-1)


def split_chunks(count: int, bytes_per_row: int, chunk_bytes: int) -> Iterator[slice]:
    """Slices that cover `count` rows, each of at most `chunk_bytes` and at least one row."""
    step = max(1, chunk_bytes // max(1, bytes_per_row))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


BYTES_PER_LOGIT = 16
"""Peak bytes per logit while a chunk is read: logits in float32 and up to three temporaries."""


class ReferenceFile:
    """Log-probabilities of R rows over V tokens, passed from one engine to another on disk."""

    def __init__(self, path: str, num_rows: int, vocab_size: int) -> None:
        self._shape = (num_rows, vocab_size)
        self._path = path

    def write(self, first: int, log_probs_rV: Tensor) -> None:
        """Store rows `first` onward. Errors: OSError."""
        table_RV = np.memmap(self._path, np.float32, "r+", shape=self._shape)
        table_RV[first : first + len(log_probs_rV)] = log_probs_rV.cpu().numpy()

    def read(self, first: int, count: int, device: torch.device) -> Tensor:
        """Rows [first, first + count) on a device. Errors: OSError."""
        table_RV = np.memmap(self._path, np.float32, "r", shape=self._shape)
        return torch.from_numpy(np.array(table_RV[first : first + count])).to(device)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Where log-probabilities go to or come from; `first` is the first row's place in the file."""

    export: ReferenceFile | None = None
    reference: ReferenceFile | None = None
    first: int = 0


def read_hidden(
    hidden_RD: Tensor,
    targets_R: Tensor,
    project: Callable[[Tensor], Tensor],
    vocab_size: int,
    reading: Reading,
    chunk_bytes: int,
    exchange: Exchange | None = None,
) -> Tensor:
    """The reading of R hidden states: float32 [R, width].

    `project` maps hidden states [r, D] to logits [r, V]; it is called on chunks whose logits take
    at most `chunk_bytes`, so nothing of size rows x vocabulary outlives a chunk.
    """
    exchange = exchange or Exchange()
    out_RW = torch.empty((len(targets_R), reading.width), device=hidden_RD.device)
    for part in split_chunks(len(targets_R), vocab_size * BYTES_PER_LOGIT, chunk_bytes):
        first, count = exchange.first + part.start, part.stop - part.start
        reference_rV = None
        if exchange.reference:
            reference_rV = exchange.reference.read(first, count, hidden_RD.device)
        rows = Rows(project(hidden_RD[part]), targets_R[part], reference_rV)
        if exchange.export:
            exchange.export.write(first, rows.log_probs_RV)
        out_RW[part] = read_rows(rows, reading)
    return out_RW


@dataclass(frozen=True, slots=True)
class RowValues:
    """The reading of R rows, as arrays on the host."""

    columns: dict[str, np.ndarray]
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


def unpack(values_RW: np.ndarray, reading: Reading) -> RowValues:
    """The columns and alternatives that `read_rows` put side by side; ranks and ids as int32."""
    names: Sequence[str] = reading.columns
    columns = {
        name: values_RW[:, i].astype(np.int32) if name == "rank" else values_RW[:, i]
        for i, name in enumerate(names)
    }
    if not reading.top:
        return RowValues(columns, None, None)
    first, middle = len(names), len(names) + reading.top
    return RowValues(columns, values_RW[:, first:middle].astype(np.int32), values_RW[:, middle:])
