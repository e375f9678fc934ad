"""The tokens of a step that probes read, and their probe values by request.

Axis letters: R requests of a step, G probes, E entries; lower case: r tokens of a step that probes
read, k tokens whose readings are kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logsteer_server.contract.plan import Readings
from logsteer_server.engines.readings import ReadRequest, SequenceReadings
from logsteer_server.engines.vllm import staging
from logsteer_server.engines.vllm.layout import (
    CLOSED,
    DECIDED,
    NONE_READ,
    LatestStep,
    ReadTokens,
    StepEntries,
)

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]

MAX_PENDING = 2**22
"""Probe values that may be pending on the device before they are copied to the host."""

_ENTRY = np.dtype(
    [("slot", "i8"), ("last", "i8"), ("kept", "i8"), ("asks", "?"), ("is_given", "?")]
)
"""A request's entry: its slot; positions of the prompt's last token and of the first token whose
readings are kept; whether a condition depends on the prompt's last token; whether the answer
returns readings, and not conditions alone use them."""
_ENDLESS = 2**62


@dataclass(frozen=True, slots=True)
class _Span:
    """One request's tokens among the kept tokens of a step."""

    sequence: SequenceReadings
    start: int
    count: int
    position: int


@dataclass(slots=True)
class _LatestRead(LatestStep):
    """The read tokens of the latest step, and the readings of it and of the repeats after it."""

    tokens: ReadTokens
    spans: list[_Span]
    readings: list[Tensor] = field(default_factory=list)


class ReadingRecorder(StepEntries[_LatestRead]):
    """Locate the tokens of each step that probes read, and collect their readings by request.

    Readings stay on the device until `pop` or `count_passed` copies all pending ones to the host.
    Example: request `b` has no probes; request `a` has the plan in slot 2, entry 1, and a prompt of
    2 tokens. A step computes token 5 of `b` and the first two tokens of `a`:

        begin("a", 1, 2, request, num_cached=0)
        find(["b", "a"], [0, 1, 3], [5, 0])     index_r = [1, 2], slots_r = [2, 2],
                                                sources_r = [CLOSED, 2], is_end_r = [False, True]
        record(readings of these two tokens)    the second decides for the tokens after it
        find(["a"], [0, 1], [2])                index_r = [0], sources_r = [DECIDED]
    """

    def __init__(self) -> None:
        super().__init__(_ENTRY)
        self._sequences: dict[int, SequenceReadings] = {}
        self._pending: list[_LatestRead] = []
        self._pending_size = 0

    def begin(
        self, req_id: str, entry: int, slot: int, request: ReadRequest, num_cached: int
    ) -> None:
        """Add a request, whose first `num_cached` tokens come from the prefix cache."""
        self._close_step()
        kept = _ENDLESS if request.first_kept is None else request.first_kept
        asks = any(condition.of == "prompt" for condition in request.conditions)
        last = request.prompt_len - 1
        first, is_given = 0 if request.conditions else kept, request.first_kept is not None
        self._enter(req_id, entry, slot, last, first, asks, is_given)
        self._sequences[entry] = SequenceReadings(request, num_cached)

    def end(self, req_id: str) -> None:
        """Remove a request that has ended, if it has probes."""
        self._close_step()
        entry = self._entry_of.pop(req_id, None)
        if entry is not None:
            del self._sequences[entry]
        if not self._entry_of:
            self._pending, self._pending_size = [], 0

    def find(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> ReadTokens:
        """Return the tokens of a step that probes read; arguments as in `_place`."""
        if not self._entry_of:
            return NONE_READ
        if (latest := self._repeat(req_ids, starts_R, computed_R)) is not None:
            return latest.tokens
        self._close_step()
        entries_T, positions_T, computed_T = self._place(req_ids, starts_R, computed_R)
        index_r = np.flatnonzero(entries_T)
        if not len(index_r):
            return NONE_READ
        entries_r, positions_r = entries_T[index_r], positions_T[index_r]
        fields_r = self._entries[entries_r]
        last_r = fields_r["last"]
        sources_r = np.where(last_r >= computed_T[index_r], index_r - positions_r + last_r, DECIDED)
        sources_r[positions_r < last_r] = CLOSED
        is_end_r = (positions_r == last_r) & fields_r["asks"]
        is_kept_r = positions_r >= fields_r["kept"]
        tokens = ReadTokens(
            index_r,
            fields_r["slot"],
            entries_r,
            sources_r,
            is_end_r,
            is_kept_r,
            bool(fields_r["is_given"].any()),
        )
        spans = self._find_spans(entries_r[is_kept_r], positions_r[is_kept_r])
        repeats = len(entries_T) == len(req_ids) and bool((sources_r == DECIDED).all())
        self._latest = _LatestRead(list(req_ids), starts_R, computed_R + 1, repeats, tokens, spans)
        return tokens

    def _find_spans(self, entries_k: Indices, positions_k: Indices) -> list[_Span]:
        """Split the kept tokens of a step by request; each request's tokens are adjacent."""
        if not len(entries_k):
            return []
        edges = [0, *(np.flatnonzero(np.diff(entries_k)) + 1).tolist(), len(entries_k)]
        return [
            _Span(self._sequences[int(entries_k[i])], i, end - i, int(positions_k[i]))
            for i, end in pairwise(edges)
        ]

    def record(self, readings_kGR: Tensor) -> None:
        """Record the readings of the latest step's kept tokens; the tensor may be on a device."""
        assert self._latest is not None
        self._latest.readings.append(readings_kGR)
        self._pending_size += readings_kGR.numel()
        if self._pending_size > MAX_PENDING:
            self._flush()

    def _close_step(self) -> None:
        """Queue the latest step's readings; the next step then cannot repeat it."""
        latest, self._latest = self._latest, None
        if latest is not None and latest.readings:
            self._pending.append(latest)

    def _flush(self) -> None:
        """Copy all pending readings to the host at once, and add them to their requests."""
        self._close_step()
        pending, self._pending, self._pending_size = self._pending, [], 0
        if not pending:
            return
        all_NGR = staging.fetch(torch.cat([part for step in pending for part in step.readings]))
        start, by_sequence = 0, dict[SequenceReadings, list[tuple[int, Values]]]()
        for step in pending:
            shape = len(step.readings), len(step.readings[0]), *all_NGR.shape[1:]
            end = start + shape[0] * shape[1]
            values_SkGR = all_NGR[start:end].reshape(shape)
            start = end
            for span in step.spans:
                own_SkGR = values_SkGR[:, span.start : span.start + span.count]
                # Repeated steps have one token of a request each; other steps may have several.
                own_TGR = own_SkGR.reshape(-1, *shape[2:])
                by_sequence.setdefault(span.sequence, []).append((span.position, own_TGR))
        for sequence, parts in by_sequence.items():
            for position, values_TGR in _join(parts):
                sequence.add(position, values_TGR)

    def count_passed(self, req_id: str, end: int) -> tuple[int, ...]:
        """Return, by condition, the number of a request's tokens before `end` at which it held."""
        entry = self._entry_of.get(req_id)
        if entry is None or not self._sequences[entry].request.conditions:
            return ()
        self._flush()
        return self._sequences[entry].passed_before(end)

    def pop(self, req_id: str) -> Readings | None:
        """Return a request's readings since the last call; None where its plan keeps none."""
        entry = self._entry_of.get(req_id)
        if entry is None or self._sequences[entry].request.first_kept is None:
            return None
        self._flush()
        return self._sequences[entry].pop()


def _join(parts: Sequence[tuple[int, Values]]) -> Iterator[tuple[int, Values]]:
    """Concatenate adjacent parts of a sequence's readings; a preemption starts a new part.

    Tokens [0, 3), [3, 4), [4, 5) and then [0, 5) again give two parts: [0, 5), [0, 5).
    """
    first = 0
    for number, (position, values_TGR) in enumerate(parts, start=1):
        if number == len(parts) or parts[number][0] != position + len(values_TGR):
            yield parts[first][0], np.concatenate([values for _, values in parts[first:number]])
            first = number
