"""Which tokens of a step are read by probes, and what was read of them, by request.

Axis letters: R requests of a step, G probes, E entries; lower case r: the read tokens of a step, k
those of them whose readings are kept.
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

HELD = 2**22
"""Numbers of readings that wait on the device before they are fetched unasked."""

_ENTRY = np.dtype(
    [("slot", "i8"), ("last", "i8"), ("kept", "i8"), ("asks", "?"), ("is_given", "?")]
)
"""Of a request: its slot; where its prompt ends and from where on readings are kept; whether a
condition asks for the reading of the prompt's last token; whether readings are given to anybody, or
conditions alone read."""
_ENDLESS = 2**62


@dataclass(frozen=True, slots=True)
class _Span:
    """The tokens of one request among the kept ones of a step."""

    sequence: SequenceReadings
    start: int
    count: int
    position: int


@dataclass(slots=True)
class _LatestRead(LatestStep):
    """What was found in the latest step, and read in it and in steps like it that followed."""

    tokens: ReadTokens
    spans: list[_Span]
    readings: list[Tensor] = field(default_factory=list)


class ReadingRecorder(StepEntries[_LatestRead]):
    """Find the tokens of each step that are read, and keep what was read by request.

    What was read waits on the device until somebody asks for it; `take` and `read_passed` then
    fetch all that waits at once. Of two requests, `b` is not read, and `a` is by the plan in slot
    2, whose prompt has 2 tokens; its entry is 1. A step reads token 5 of `b` and the first two of
    `a`:

        begin("a", 1, 2, request, num_cached=0)
        find(["b", "a"], [0, 1, 3], [5, 0])     index_r = [1, 2], slots_r = [2, 2],
                                                sources_r = [CLOSED, 2], is_end_r = [False, True]
        record(readings of these two tokens)    the second one's decides for what follows
        find(["a"], [0, 1], [2])                index_r = [0], sources_r = [DECIDED]
    """

    def __init__(self) -> None:
        super().__init__(_ENTRY)
        self._sequences: dict[int, SequenceReadings] = {}
        self._waiting: list[_LatestRead] = []
        self._held = 0

    def begin(
        self, req_id: str, entry: int, slot: int, request: ReadRequest, num_cached: int
    ) -> None:
        """Begin with a request whose first `num_cached` tokens the prefix cache holds."""
        self._set_aside()
        kept = _ENDLESS if request.first_kept is None else request.first_kept
        asks = any(condition.of == "prompt" for condition in request.conditions)
        last = request.prompt_len - 1
        first, is_given = 0 if request.conditions else kept, request.first_kept is not None
        self._enter(req_id, entry, slot, last, first, asks, is_given)
        self._sequences[entry] = SequenceReadings(request, num_cached)

    def end(self, req_id: str) -> None:
        """Forget a request that has ended, if it is read."""
        self._set_aside()
        entry = self._entry_of.pop(req_id, None)
        if entry is not None:
            del self._sequences[entry]
        if not self._entry_of:
            self._waiting, self._held = [], 0

    def find(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> ReadTokens:
        """Return the tokens of a step that are read; arguments as of `_place`."""
        if not self._entry_of:
            return NONE_READ
        if (latest := self._repeat(req_ids, starts_R, computed_R)) is not None:
            return latest.tokens
        self._set_aside()
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
        """Return the kept tokens of a step by request: those of one lie together."""
        if not len(entries_k):
            return []
        edges = [0, *(np.flatnonzero(np.diff(entries_k)) + 1).tolist(), len(entries_k)]
        return [
            _Span(self._sequences[int(entries_k[i])], i, end - i, int(positions_k[i]))
            for i, end in pairwise(edges)
        ]

    def record(self, readings_kGR: Tensor) -> None:
        """Record what was read of the kept tokens that were found last; it may be on a device."""
        assert self._latest is not None
        self._latest.readings.append(readings_kGR)
        self._held += readings_kGR.numel()
        if self._held > HELD:
            self._fetch()

    def _set_aside(self) -> None:
        """Keep what was read for later, and forget the step."""
        latest, self._latest = self._latest, None
        if latest is not None and latest.readings:
            self._waiting.append(latest)

    def _fetch(self) -> None:
        """Give what was read to the requests, all of it by one copy, and forget the step."""
        self._set_aside()
        waiting, self._waiting, self._held = self._waiting, [], 0
        if not waiting:
            return
        all_NGR = staging.fetch(torch.cat([part for step in waiting for part in step.readings]))
        start, read = 0, dict[SequenceReadings, list[tuple[int, Values]]]()
        for step in waiting:
            shape = len(step.readings), len(step.readings[0]), *all_NGR.shape[1:]
            end = start + shape[0] * shape[1]
            values_SkGR = all_NGR[start:end].reshape(shape)
            start = end
            for span in step.spans:
                own_SkGR = values_SkGR[:, span.start : span.start + span.count]
                own_TGR = own_SkGR.reshape(-1, *shape[2:])  # a step each, or one step of many
                read.setdefault(span.sequence, []).append((span.position, own_TGR))
        for sequence, parts in read.items():
            for position, values_TGR in _join(parts):
                sequence.add(position, values_TGR)

    def read_passed(self, req_id: str, end: int) -> tuple[int, ...]:
        """Return, by condition, the tokens of a request before `end` at which it held."""
        entry = self._entry_of.get(req_id)
        if entry is None or not self._sequences[entry].request.conditions:
            return ()
        self._fetch()
        return self._sequences[entry].passed_before(end)

    def take(self, req_id: str) -> Readings | None:
        """Return what was read of a request and not taken before, where its plan keeps any."""
        entry = self._entry_of.get(req_id)
        if entry is None or self._sequences[entry].request.first_kept is None:
            return None
        self._fetch()
        return self._sequences[entry].take()


def _join(parts: Sequence[tuple[int, Values]]) -> Iterator[tuple[int, Values]]:
    """Join what was read of a sequence where one part follows another; preemption begins anew.

    Tokens [0, 3), [3, 4), [4, 5) and then [0, 5) once more are two parts: [0, 5), [0, 5).
    """
    first = 0
    for number, (position, values_TGR) in enumerate(parts, start=1):
        if number == len(parts) or parts[number][0] != position + len(values_TGR):
            yield parts[first][0], np.concatenate([values for _, values in parts[first:number]])
            first = number
