"""Steering of one rank's steps: which tokens are steered, read and captured, and what is measured.

The module does not import vLLM: the model runner reports which requests begin and end, and where
their tokens are. A step has tokens of many requests, request by request: chunks of prompts, and one
token of each decoding request. So the code is arithmetic on arrays over the step's tokens T. Axis
letters: R requests of a step, E entries, G probes; lower case: t the steered tokens of a step, r
the tokens that probes read, k the tokens whose readings are kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from logsteer_server.contract.plan import Positions, Readings
from logsteer_server.engines.readings import SequenceReadings
from logsteer_server.engines.vllm import staging
from logsteer_server.engines.vllm.captures import CaptureWish, Indices, find_captured
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import CAPTURE, READ, STEER
from logsteer_server.engines.vllm.layout import (
    CLOSED,
    DECIDED,
    NONE_READ,
    NONE_STEERED,
    ReadTokens,
    SteeredTokens,
    Step,
)
from logsteer_server.engines.vllm.tables import SteeringTables

Values = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

Parts = Sequence[tuple[int, Positions]]
"""Slots with the positions that each steers; no token is in two of them."""

MAX_PENDING = 2**22
"""Probe values that may be pending on the device before they are copied to the host."""


class MeasureWish(NamedTuple):
    """What to measure of a request's tokens before `end`: its trace, its new readings, and the rows
    of the capture buffer to read.
    """

    end: int
    traces: bool
    reads: bool
    rows: range | None


class StageMeasurements(NamedTuple):
    """One request's measurements at one pipeline stage, as far as they were asked for.

    `sums`: by layer, the number of changed tokens, the sum of their ratios |change| / |activation|,
    and the first token's ratio. `passed`: by condition, the number of tokens at which it held.
    """

    sums: dict[int, tuple[int, float, float]]
    passed: tuple[int, ...]
    readings: Readings | None
    captured_ND: Values | None


_ENTRY = np.dtype([
    ("slot", "i8"), ("first", "i8"), ("end", "i8"), ("recorded", "i8"), ("read_slot", "i8"),
    ("last", "i8"), ("kept", "i8"), ("asks", "?"), ("is_given", "?"),
])  # fmt: skip
"""A request's entry. Its slot in the steering tables, and the range of positions [first, end) that
contains its steered tokens; tokens before `recorded` are in the tables' sums. Its slot in the probe
tables; positions of the prompt's last token, and of the first token whose readings are kept;
whether a condition depends on the prompt's last token; whether the answer returns readings, and not
conditions alone use them."""
_ENDLESS = 2**62
_IDLE = Step()


@dataclass(slots=True, eq=False)
class _Request:
    """A request that is steered, read or captured. Its entry is 0 if it is captured alone."""

    entry: int = 0
    parts: Parts = ()
    prompt_len: int = 0
    sequence: SequenceReadings | None = None
    wish: CaptureWish | None = None


class _Span(NamedTuple):
    """One request's tokens among the kept tokens of a step; the first has `position`."""

    sequence: SequenceReadings
    start: int
    end: int
    position: int


@dataclass(slots=True)
class _LatestStep:
    """The marks of the latest step, which has R requests, and the number of `steps`: 1 and repeats.

    `starts_R`: starts of the requests' tokens [R + 1]. `next_R`: their next positions. `repeats`:
    the marks stay the same as long as each step has the next token of each of these requests, and
    no other token. `readings`: of the kept tokens, a tensor for each step.
    """

    req_ids: list[str]
    starts_R: Indices
    next_R: Indices
    repeats: bool
    step: Step
    positions_t: Indices
    spans: list[_Span]
    steps: int = 1
    readings: list[Tensor] = field(default_factory=list)

    def advance(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> bool:
        """Count a step that repeats this one; return False if it does not."""
        is_same = (
            self.repeats
            and self.req_ids == req_ids
            and np.array_equal(self.starts_R, starts_R)
            and np.array_equal(self.next_R, computed_R)
        )
        if is_same:
            self.next_R, self.steps = self.next_R + 1, self.steps + 1
        return is_same


class StepSteering:
    """Mark each step's tokens with their requests' slots and captures; record their measurements.

    `tokens`: the most tokens of a step; `like`: a tensor with the activations' dtype and device;
    `lags`: whether one more step of a request may have begun when its end becomes known.

    A request has one entry from its beginning to its end. Tokens that are computed again after a
    preemption are steered again, and count once. Readings stay on the device until somebody asks.
    Example: request `b` is not steered; request `a` has the plan in slot 2 at all positions, with a
    probe, and a prompt of 2 tokens. A step computes token 5 of `b` and the first two of `a`:

        begin("a", ...)                         entry 1
        mark(["b", "a"], [0, 1, 3], [5, 0])     steered: index_t = [1, 2], slots_t = [2, 2]
                                                read: index_r = [1, 2], sources_r = [CLOSED, 2]
        record()                                the second token decides for the tokens after it
        mark(["a"], [0, 1], [2])                steered: index_t = [0]; read: sources_r = [DECIDED]
    """

    def __init__(
        self,
        size: SteeringSize,
        layers: int,
        tokens: int,
        width: int,
        like: Tensor,
        *,
        lags: bool = False,
    ) -> None:
        self._lags = lags
        self.tables = SteeringTables(size, layers, tokens, width, like)
        self._entries = np.zeros(len(self.tables.sums.decided_E), _ENTRY)
        self._requests: dict[str, _Request] = {}
        self._scattered: dict[int, _Request] = {}
        """By entry: requests with several parts, or whose steered tokens are no range."""
        self._latest: _LatestStep | None = None
        self._is_unrecorded = False
        self._pending: list[_LatestStep] = []
        self._pending_size = 0

    def begin(self, req_id: str, extra_args: Mapping[str, Any], num_cached: int) -> None:
        """Add a request, whose first `num_cached` tokens come from the prefix cache.

        They were steered and counted when they were computed.
        """
        if extra_args.keys().isdisjoint((STEER, READ, CAPTURE)):
            return
        self._close_step()
        request = self._requests[req_id] = _Request(wish=extra_args.get(CAPTURE))
        fields = dict.fromkeys(_ENTRY.names or (), 0)
        if STEER in extra_args or READ in extra_args:
            request.entry = self.tables.sums.acquire()
        if STEER in extra_args:
            request.parts, request.prompt_len = parts, prompt_len = extra_args[STEER]
            bounds = [positions.bounds(prompt_len) for _, positions in parts]
            fields["slot"], fields["recorded"] = parts[0][0], num_cached
            fields["first"] = min(first for first, _ in bounds)
            fields["end"] = max(_ENDLESS if end is None else end for _, end in bounds)
            if len(parts) > 1 or not parts[0][1].is_range:
                self._scattered[request.entry] = request
        if READ in extra_args:
            fields["read_slot"], read = extra_args[READ]
            kept = _ENDLESS if read.first_kept is None else read.first_kept
            fields["last"], fields["kept"] = read.prompt_len - 1, 0 if read.conditions else kept
            fields["asks"] = any(condition.of == "prompt" for condition in read.conditions)
            fields["is_given"] = read.first_kept is not None
            request.sequence = SequenceReadings(read, num_cached)
        if request.entry:
            self._entries[request.entry] = tuple(fields.values())

    def end(self, req_id: str) -> None:
        """Remove a request that has ended; its captured rows stay as they are."""
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        self._close_step()
        if request.entry:
            self._scattered.pop(request.entry, None)
            self.tables.add_up()
            self.tables.sums.release(request.entry)
        if not self._requests:
            self._pending, self._pending_size = [], 0

    def mark(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> None:
        """Write the marks of the next step's tokens into the tables.

        Args:
            req_ids: the R requests of the step, in the order of their tokens.
            starts_R: [R + 1], the index of each request's first token in the step; then T.
            computed_R: the position of each request's first token in its sequence.

        """
        self.tables.serves = True
        if not self._requests:
            self.tables.write(_IDLE)
            return
        latest = self._latest
        if latest is None or not latest.advance(req_ids, starts_R, computed_R):
            self._close_step()
            latest = self._latest = self._find(req_ids, starts_R, computed_R)
        self.tables.write(latest.step)
        if self._lags and len(latest.positions_t):
            self.tables.snapshot_sums()
        self._is_unrecorded = True

    def _find(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> _LatestStep:
        """Locate the marked tokens of a step; arguments as in `mark`."""
        requests = [self._requests.get(req_id) for req_id in req_ids]
        counts_R = np.diff(starts_R)
        entries_T = np.repeat([own.entry if own else 0 for own in requests], counts_R)
        computed_T = np.repeat(computed_R, counts_R)
        positions_T = np.arange(starts_R[-1]) - np.repeat(starts_R[:-1], counts_R) + computed_T
        fields_T = self._entries[entries_T]
        steered, stays = self._find_steered(entries_T, positions_T, fields_T)
        read = self._find_read(entries_T, positions_T, fields_T, computed_T)
        wishes = [own.wish if own else None for own in requests]
        is_decode = len(positions_T) == len(req_ids) and bool((read.sources_r == DECIDED).all())
        kept_k = read.index_r[read.is_kept_r]
        return _LatestStep(
            list(req_ids),
            starts_R,
            computed_R + 1,
            stays and is_decode and not any(wishes),  # each step has other rows to store
            Step(steered, find_captured(wishes, starts_R, computed_R), read),
            positions_T[steered.index_t],
            self._find_spans(requests, starts_R, kept_k, positions_T[kept_k]),
        )

    def _find_steered(
        self, entries_T: Indices, positions_T: Indices, fields_T: npt.NDArray[Any]
    ) -> tuple[SteeredTokens, bool]:
        """Return the steered tokens, and whether they stay the same in decode steps."""
        ends_T, slots_T = fields_T["end"], fields_T["slot"]
        steered_T = (positions_T >= fields_T["first"]) & (positions_T < ends_T)
        is_even_T = np.ones(len(positions_T), dtype=bool)
        for entry, request in self._scattered.items():
            own_t = np.nonzero(entries_T == entry)[0]
            slots_T[own_t], is_even_T[own_t] = 0, False
            for slot, positions in request.parts:
                is_own_t = positions.contain(positions_T[own_t], request.prompt_len)
                slots_T[own_t[is_own_t]] = slot
            steered_T[own_t] = slots_T[own_t] > 0
        index_t = np.nonzero(steered_T)[0]
        positions_t = positions_T[index_t]
        is_new_t = positions_t >= fields_T["recorded"][index_t]
        # A sequence's first token has its own sum, so its step cannot repeat.
        stays_T = steered_T & is_even_T & (ends_T == _ENDLESS) & (positions_T > 0) | (
            positions_T >= ends_T
        )
        stays = bool(stays_T.all() and is_new_t.all())
        if not len(index_t):
            return NONE_STEERED, stays
        entries_t = entries_T[index_t]
        return SteeredTokens(
            index_t, slots_T[index_t], entries_t, is_new_t, positions_t == 0
        ), stays

    def _find_read(
        self,
        entries_T: Indices,
        positions_T: Indices,
        fields_T: npt.NDArray[Any],
        computed_T: Indices,
    ) -> ReadTokens:
        """Return the tokens that probes read."""
        index_r = np.flatnonzero(fields_T["read_slot"])
        if not len(index_r):
            return NONE_READ
        fields_r, positions_r = fields_T[index_r], positions_T[index_r]
        last_r = fields_r["last"]
        sources_r = np.where(last_r >= computed_T[index_r], index_r - positions_r + last_r, DECIDED)
        sources_r[positions_r < last_r] = CLOSED
        return ReadTokens(
            index_r,
            fields_r["read_slot"],
            entries_T[index_r],
            sources_r,
            (positions_r == last_r) & fields_r["asks"],
            positions_r >= fields_r["kept"],
            bool(fields_r["is_given"].any()),
        )

    def _find_spans(
        self,
        requests: Sequence[_Request | None],
        starts_R: Indices,
        kept_k: Indices,
        positions_k: Indices,
    ) -> list[_Span]:
        """Split the kept tokens of a step by request; each request's tokens are adjacent."""
        edges = np.searchsorted(kept_k, starts_R).tolist()
        return [
            _Span(own.sequence, start, end, int(positions_k[start]))
            for own, (start, end) in zip(requests, pairwise(edges), strict=True)
            if own and own.sequence and start < end
        ]

    def _close_step(self) -> None:
        """Count the tokens of the latest step and its repeats; the next step cannot repeat it."""
        latest, self._latest = self._latest, None
        if latest is None:
            return
        entries_t, ends_t = latest.step.steered.entries_t, latest.positions_t + latest.steps
        np.maximum.at(self._entries["recorded"], entries_t, ends_t)
        if latest.readings:
            self._pending.append(latest)

    def record(self) -> None:
        """Record the last step's readings, before the next step overwrites their buffers.

        They stay on the device, and the host does not wait.
        """
        if not self._is_unrecorded:
            return
        self._is_unrecorded = False
        self.tables.probes.decide_prompts()
        readings_kGR = self.tables.probes.gather()
        if readings_kGR is None:
            return
        assert self._latest is not None
        self._latest.readings.append(readings_kGR)
        self._pending_size += readings_kGR.numel()
        if self._pending_size > MAX_PENDING:
            self._flush()

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
                # Repeated steps have one token of a request each; other steps may have several.
                own_TGR = values_SkGR[:, span.start : span.end].reshape(-1, *shape[2:])
                by_sequence.setdefault(span.sequence, []).append((span.position, own_TGR))
        for sequence, parts in by_sequence.items():
            for position, values_TGR in _join(parts):
                sequence.add(position, values_TGR)

    def measure(self, wishes: Mapping[str, MeasureWish]) -> dict[str, StageMeasurements]:
        """Return measurements of requests. Layers of other pipeline stages are absent."""
        self.record()
        requests = {req_id: self._requests[req_id] for req_id in wishes}
        if any(request.sequence for request in requests.values()):
            self._flush()
        sums = self._fetch_sums({own: wish.end for own, wish in wishes.items() if wish.traces})
        found = {}
        for req_id, (end, _, reads, rows) in wishes.items():
            sequence = requests[req_id].sequence
            found[req_id] = StageMeasurements(
                sums.get(req_id, {}),
                sequence.passed_before(end) if sequence else (),
                sequence.pop(end) if sequence and reads else None,
                self.tables.captures.take(rows) if rows else None,
            )
        return found

    def _fetch_sums(
        self, ends: Mapping[str, int]
    ) -> dict[str, dict[int, tuple[int, float, float]]]:
        """Return the sums of requests' first tokens by layer; `ends`: their number, by request.

        The latest step may have one token beyond the end, which is left out.
        """
        if not ends:
            return {}
        self._close_step()
        by_entry = {self._requests[req_id].entry: end for req_id, end in ends.items()}
        recorded_E = self._entries["recorded"]
        late = [entry for entry, end in by_entry.items() if recorded_E[entry] > end]
        sums_ELn = self.tables.fetch_sums(list(by_entry), late)
        return {
            req_id: {
                int(layer): (int(sums_Ln[layer, 0]), *sums_Ln[layer, 1:].tolist())
                for layer in sums_Ln[:, 0].nonzero()[0]
            }
            for req_id, sums_Ln in zip(ends, sums_ELn, strict=True)
        }


def _join(parts: Sequence[tuple[int, Values]]) -> Iterator[tuple[int, Values]]:
    """Concatenate adjacent parts of a sequence's readings; a preemption starts a new part.

    Tokens [0, 3), [3, 4), [4, 5) and then [0, 5) again give two parts: [0, 5), [0, 5).
    """
    first = 0
    for number, (position, values_TGR) in enumerate(parts, start=1):
        if number == len(parts) or parts[number][0] != position + len(values_TGR):
            yield parts[first][0], np.concatenate([values for _, values in parts[first:number]])
            first = number
