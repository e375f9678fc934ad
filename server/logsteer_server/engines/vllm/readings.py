"""Which tokens of a step are read by probes, and what was read of them, by request.

Axis letters: R requests of a step, G probes, S steps; lower case r: the read tokens of a step.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from logsteer_server.contract.plan import Condition, Positions, Readings
from logsteer_server.engines.vllm.probe_tables import CLOSED, KNOWN, NONE_READ, ReadTokens
from logsteer_server.numerics.probes import READINGS, hold_all

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]

MAX_STEPS = 64
"""Steps whose readings are taken apart together."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What one request reads, as plain data: it goes to the workers.

    `first_kept`: the position from which on readings are kept; None: none are. `positions` and
    `conditions` are its plan's, for counting the tokens where they hold.
    """

    slot: int
    prompt_len: int
    num_probes: int
    first_kept: int | None
    positions: Positions
    conditions: tuple[Condition, ...]


@dataclass(slots=True, eq=False)
class _Entry:
    """A request that is read, as far as it has been: tokens in front of `counted` are counted."""

    request: ReadRequest
    counted: int
    passed_C: Indices
    known: int | None = None
    parts: list[tuple[int, Values]] = field(default_factory=list)

    def add(self, begin: int, values_TGR: Values) -> None:
        """Take in what was read of the tokens from `begin` on."""
        asked, end = self.request, begin + len(values_TGR)
        own_TGR = values_TGR[:, : asked.num_probes]
        if asked.conditions and end > self.counted:
            new = max(0, self.counted - begin)
            holds_TC = self._decide(begin, own_TGR)[new:]
            steered_T = asked.positions.mask(begin + new, end, asked.prompt_len)
            self.passed_C += (holds_TC & steered_T[:, None]).sum(0)
            self.counted = end
        if asked.first_kept is not None and end > asked.first_kept:
            first = max(begin, asked.first_kept)
            self.parts.append((first, own_TGR[first - begin :]))

    def _decide(self, begin: int, own_TGR: Values) -> npt.NDArray[np.bool_]:
        """Return where each condition holds, once that of the prompt is known: [T, C]."""
        conditions, last = self.request.conditions, self.request.prompt_len - 1
        holds_TC = hold_all(conditions, own_TGR)
        behind_T = np.arange(begin, begin + len(own_TGR)) >= last
        for c, condition in enumerate(conditions):
            if condition.of == "prompt":
                holds_TC[:, c] = behind_T & bool((self.known or 0) >> c & 1)
        return holds_TC

    def learn(self, values_GR: Values) -> None:
        """Take in what was read of the prompt's last token: what its conditions decide."""
        held_C = hold_all(self.request.conditions, values_GR[None])[0]
        self.known = sum(1 << c for c, holds in enumerate(held_C.tolist()) if holds)

    def take(self) -> Readings | None:
        """Return what is kept and was not taken before; a token that was read twice counts once."""
        if not self.parts:
            return None
        parts, self.parts = self.parts, []
        first = min(begin for begin, _ in parts)
        end = max(begin + len(values) for begin, values in parts)
        values_TGR = np.zeros((end - first, self.request.num_probes, READINGS), np.float32)
        for begin, values in parts:
            values_TGR[begin - first : begin - first + len(values)] = values
        return Readings(first, values_TGR)


@dataclass(frozen=True, slots=True)
class _Span:
    """The tokens of one request among the read ones of a step."""

    entry: _Entry
    start: int
    count: int
    position: int

    @property
    def end(self) -> int:
        return self.position + self.count


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
        find(["a"], [0, 1], [2])                index_r = [0], sources_r = [KNOWN], known_r = [...]
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._latest: _LatestRead | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, req_id: str, request: ReadRequest, num_cached: int) -> None:
        """Begin with a request whose first `num_cached` tokens the prefix cache holds."""
        self._take_apart()
        passed_C = np.zeros(len(request.conditions), np.int64)
        self._entries[req_id] = _Entry(request, num_cached, passed_C)

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
            spans.append(_Span(entry, num_read, end - start, position))
            num_read += end - start
            parts.append(_mark(entry, start, end, position))
        tokens = (
            ReadTokens(
                *(
                    np.concatenate([getattr(part, name) for part in parts])
                    for name in ("index_r", "slots_r", "sources_r", "known_r")
                )
            )
            if parts
            else NONE_READ
        )
        repeats = len(starts_R) - 1 == starts_R[-1] and all(
            span.position >= span.entry.request.prompt_len for span in spans
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
            last = span.entry.request.prompt_len - 1
            if span.position <= last < span.end:
                span.entry.learn(own_TGR[last - span.position, : span.entry.request.num_probes])
            span.entry.add(span.position, own_TGR)

    def read_passed(self, req_id: str) -> tuple[int, ...]:
        """Return, by condition, the tokens of a request at which it held."""
        self._take_apart()
        entry = self._entries.get(req_id)
        return tuple(entry.passed_C.tolist()) if entry else ()

    def take(self, req_id: str) -> Readings | None:
        """Return what was read of a request and not taken before, where its plan keeps any."""
        self._take_apart()
        entry = self._entries.get(req_id)
        return entry.take() if entry else None


def _mark(entry: _Entry, start: int, end: int, position: int) -> ReadTokens:
    """Return the tokens of one request in a step: places [start, end), from `position` on."""
    index_r = np.arange(start, end)
    last = entry.request.prompt_len - 1 - position
    known = entry.known or 0
    sources_r = np.full(end - start, CLOSED if last >= 0 else KNOWN)
    if 0 <= last < end - start:
        sources_r[last:] = start + last
    return ReadTokens(
        index_r, np.full(end - start, entry.request.slot), sources_r, np.full(end - start, known)
    )
