"""Which tokens of a step are read by probes, and what was read of them, by request.

Axis letters: R requests of a step, G probes, S steps; lower case r: the read tokens of a step.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.plan import Readings
from logsteer_server.engines.readings import ReadRequest, SequenceReadings
from logsteer_server.engines.vllm.probe_tables import CLOSED, DECIDED, NONE_READ, ReadTokens

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]

MAX_STEPS = 64
"""Steps whose readings are taken apart together."""


@dataclass(frozen=True, slots=True)
class _ReadEntry:
    """A request that is read: its slot in the probe tables, and what was read of it."""

    slot: int
    sequence: SequenceReadings


@dataclass(frozen=True, slots=True)
class _Span:
    """The tokens of one request among the read ones of a step."""

    sequence: SequenceReadings
    start: int
    count: int
    position: int


@dataclass(slots=True)
class _LatestRead:
    """A step that was looked at, and what was read in it and in steps like it that followed."""

    req_ids: list[str]
    starts_R: Indices
    next_R: Indices
    tokens: ReadTokens
    spans: list[_Span]
    repeats: bool
    readings: list[Values] = field(default_factory=list)


class ReadingRecorder:
    """Find the tokens of each step that are read, and keep what was read by request.

    Of two requests, `b` is not read, and `a` is by the plan in slot 2, whose prompt has 2 tokens. A
    step reads token 5 of `b` and the first two of `a`:

        find(["b", "a"], [0, 1, 3], [5, 0])     index_r = [1, 2], slots_r = [2, 2],
                                                sources_r = [CLOSED, 2]
        record(readings of these two tokens)    the second one's decides for what follows
        find(["a"], [0, 1], [2])                index_r = [0], sources_r = [DECIDED],
                                                decided_r: the bits of what was decided
    """

    def __init__(self) -> None:
        self._entries: dict[str, _ReadEntry] = {}
        self._latest: _LatestRead | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, req_id: str, slot: int, request: ReadRequest, num_cached: int) -> None:
        """Begin with a request whose first `num_cached` tokens the prefix cache holds."""
        self._take_apart()
        self._entries[req_id] = _ReadEntry(slot, SequenceReadings(request, num_cached))

    def end(self, req_id: str) -> None:
        """Forget a request that has ended, if it is read."""
        self._take_apart()
        self._entries.pop(req_id, None)

    def find(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> ReadTokens:
        """Return the tokens of a step that are read. The arguments are `TraceRecorder.find`'s."""
        if not self._entries:
            return NONE_READ
        latest = self._latest
        if (
            latest is not None
            and latest.repeats
            and latest.req_ids == req_ids
            and np.array_equal(latest.starts_R, starts_R)
            and np.array_equal(latest.next_R, computed_R)
        ):
            latest.next_R = latest.next_R + 1
            return latest.tokens
        self._take_apart()
        parts: list[ReadTokens] = []
        spans: list[_Span] = []
        num_read = 0
        for row, req_id in enumerate(req_ids):
            entry = self._entries.get(req_id)
            if entry is None:
                continue
            start, end, position = int(starts_R[row]), int(starts_R[row + 1]), int(computed_R[row])
            spans.append(_Span(entry.sequence, num_read, end - start, position))
            num_read += end - start
            parts.append(_mark(entry, start, end, position))
        tokens = (
            ReadTokens(
                *(
                    np.concatenate([getattr(part, name) for part in parts])
                    for name in ("index_r", "slots_r", "sources_r", "decided_r")
                )
            )
            if parts
            else NONE_READ
        )
        repeats = len(starts_R) - 1 == starts_R[-1] and all(
            span.position >= span.sequence.request.prompt_len for span in spans
        )
        self._latest = _LatestRead(
            list(req_ids), starts_R, computed_R + 1, tokens, spans, bool(repeats)
        )
        return tokens

    def record(self, readings_rGR: Values) -> None:
        """Record what was read of the tokens that were found last."""
        assert self._latest is not None
        self._latest.readings.append(readings_rGR)
        if not self._latest.repeats or len(self._latest.readings) == MAX_STEPS:
            self._take_apart()

    def _take_apart(self) -> None:
        """Give what was read to the requests, and forget the step."""
        latest, self._latest = self._latest, None
        if latest is None or not latest.readings:
            return
        values_SrGR = np.stack(latest.readings)
        for span in latest.spans:
            own_SrGR = values_SrGR[:, span.start : span.start + span.count]
            own_TGR = own_SrGR.reshape(-1, *own_SrGR.shape[2:])  # a step each, or one step of many
            span.sequence.add(span.position, own_TGR)

    def read_passed(self, req_id: str) -> tuple[int, ...]:
        """Return, by condition, the tokens of a request at which it held."""
        self._take_apart()
        entry = self._entries.get(req_id)
        return entry.sequence.passed if entry else ()

    def take(self, req_id: str) -> Readings | None:
        """Return what was read of a request and not taken before, where its plan keeps any."""
        self._take_apart()
        entry = self._entries.get(req_id)
        return entry.sequence.take() if entry else None


def _mark(entry: _ReadEntry, start: int, end: int, position: int) -> ReadTokens:
    """Return the tokens of one request in a step: places [start, end), from `position` on."""
    index_r = np.arange(start, end)
    last = entry.sequence.request.prompt_len - 1 - position
    decided = entry.sequence.decided or 0
    sources_r = np.full(end - start, CLOSED if last >= 0 else DECIDED)
    if 0 <= last < end - start:
        sources_r[last:] = start + last
    return ReadTokens(
        index_r, np.full(end - start, entry.slot), sources_r, np.full(end - start, decided)
    )
