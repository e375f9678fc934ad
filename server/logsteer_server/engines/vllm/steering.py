"""Steering of one rank's steps: which tokens to steer, and their measurements by request.

The module does not import vLLM: the model runner reports which requests begin and end, and where
their tokens are. A step has tokens of many requests, request by request: chunks of prompts, and one
token of each decoding request. So the code is arithmetic on arrays over the step's tokens T. Axis
letters: R requests of a step, E entries; lower case t: the steered tokens of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from logsteer_server.contract.plan import Positions, Readings
from logsteer_server.engines.vllm.captures import StepCaptures
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import CAPTURE, READ, STEER
from logsteer_server.engines.vllm.layout import (
    NONE_STEERED,
    LatestStep,
    SteeredTokens,
    Step,
    StepEntries,
)
from logsteer_server.engines.vllm.readings import ReadingRecorder
from logsteer_server.engines.vllm.tables import SteeringTables

Indices = npt.NDArray[np.int64]

Parts = Sequence[tuple[int, Positions]]
"""Slots with the positions that each steers; no token is in two of them."""

StageTrace = tuple[tuple[int, ...], dict[int, tuple[int, float, float]], tuple[int, ...]]
"""One request's measurements at one pipeline stage: the number of steered tokens, by part of its
plan; by layer, the number of changed tokens, the sum of their ratios |change| / |activation|, and
the first token's ratio; by condition, the number of tokens at which it held."""


_ENTRY = np.dtype([("first", "i8"), ("end", "i8"), ("slot", "i8"), ("recorded", "i8")])
_ENDLESS = 2**62


@dataclass(slots=True)
class _LatestMarked(LatestStep):
    """The steered tokens of the latest step, and the number of `steps`: 1 and its repeats."""

    tokens: SteeredTokens
    positions_t: Indices
    steps: int = 1


class TraceRecorder(StepEntries[_LatestMarked]):
    """Locate the steered tokens of each step, and count them by request, on one rank.

    Each steered request has an entry: the range of positions [first, end) that contains its steered
    tokens, and its slot in the steering tables. If the tokens are scattered, or the plan has
    several parts, `_parts` has the exact positions and slots. Tokens before `recorded` are already
    in the tables' sums: after a preemption the model computes them again, and they count once.
    Example: request `b` is not steered; request `a` has the plan in slot 2 at all positions, and
    entry 1. A step computes tokens 5 and 6 of `b` and the first three of `a`:

        begin("a", 1, [(2, Positions("all"))], prompt_len=4, num_cached=0)

        tokens T         b5   b6   a0   a1   a2      starts_R = [0, 2, 5], computed_R = [5, 0]
        entry             0    0    1    1    1
        find(["b", "a"], starts_R, computed_R):      index_t = [2, 3, 4], slots_t = [2, 2, 2],
                                                     is_new_t = [True, True, True]
        count("a", end=3):                           (3,)

    If `a` is preempted here, the next step computes a0 to a3: `find` returns all four, which are
    steered again, and only a3 is new.
    """

    def __init__(self) -> None:
        super().__init__(_ENTRY)
        self._parts: dict[int, tuple[Parts, int]] = {}
        self._scattered: set[int] = set()

    def begin(
        self,
        req_id: str,
        entry: int,
        parts: Parts,
        prompt_len: int,
        num_cached: int,
    ) -> None:
        """Add a request, whose first `num_cached` tokens come from the prefix cache.

        They were steered and counted when they were computed.
        """
        self._add_up()
        bounds = [positions.bounds(prompt_len) for _, positions in parts]
        ends = [_ENDLESS if end is None else end for _, end in bounds]
        first = min(start for start, _ in bounds)
        self._enter(req_id, entry, first, max(ends), parts[0][0], num_cached)
        self._parts[entry] = parts, prompt_len
        if len(parts) > 1 or not parts[0][1].is_range:
            self._scattered.add(entry)

    def end(self, req_id: str) -> None:
        """Remove a request that has ended, if it is steered."""
        self._add_up()
        entry = self._entry_of.pop(req_id, None)
        if entry is not None:
            del self._parts[entry]
            self._scattered.discard(entry)

    def find(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> SteeredTokens:
        """Return the steered tokens of a step, and count them; arguments as in `_place`."""
        if (latest := self._repeat(req_ids, starts_R, computed_R)) is not None:
            latest.steps += 1
            return latest.tokens
        self._add_up()
        if not self._entry_of:
            return NONE_STEERED
        entries_T, positions_T, _ = self._place(req_ids, starts_R, computed_R)
        fields_T = self._entries[entries_T]
        steered_T = (positions_T >= fields_T["first"]) & (positions_T < fields_T["end"])
        slots_T = fields_T["slot"]
        is_even_T = np.ones(len(positions_T), dtype=bool)
        for entry in self._scattered:
            own_t = np.nonzero(entries_T == entry)[0]
            parts, prompt_len = self._parts[entry]
            slots_T[own_t], is_even_T[own_t] = 0, False
            for slot, positions in parts:
                slots_T[own_t[positions.contain(positions_T[own_t], prompt_len)]] = slot
            steered_T[own_t] = slots_T[own_t] > 0
        index_t = np.nonzero(steered_T)[0]
        entries_t = entries_T[index_t]
        positions_t = positions_T[index_t]
        is_new_t = positions_t >= self._entries["recorded"][entries_t]
        ends_T = fields_T["end"]
        # A sequence's first token has its own sum, so its step cannot repeat.
        stays_T = steered_T & is_even_T & (ends_T == _ENDLESS) & (positions_T > 0) | (
            positions_T >= ends_T
        )
        repeats = len(positions_T) == len(req_ids) and bool(stays_T.all() and is_new_t.all())
        found = SteeredTokens(index_t, slots_T[index_t], entries_t, is_new_t, positions_t == 0)
        self._latest = _LatestMarked(
            list(req_ids), starts_R, computed_R + 1, repeats, found, positions_t
        )
        return found

    def _add_up(self) -> None:
        """Count the steered tokens of the latest step and its repeats, and close it."""
        latest, self._latest = self._latest, None
        if latest is not None:
            tokens, steps = latest.tokens, latest.steps
            np.maximum.at(self._entries["recorded"], tokens.entries_t, latest.positions_t + steps)

    def is_beyond(self, req_id: str, end: int) -> bool:
        """Return whether a request's token at position `end`, or a later one, was counted."""
        self._add_up()
        return bool(self._entries["recorded"][self._entry_of[req_id]] > end)

    def count(self, req_id: str, end: int) -> tuple[int, ...]:
        """Return the number of a request's steered tokens before `end`, by part of its plan.

        It includes tokens from the prefix cache.
        """
        self._add_up()
        entry = self._entry_of[req_id]
        parts, prompt_len = self._parts[entry]
        num_read = min(int(self._entries["recorded"][entry]), end)
        return tuple(positions.count(num_read, prompt_len) for _, positions in parts)


class StepSteering:
    """Mark each step's tokens with their requests' slots and captures; record their measurements.

    `tokens`: the most tokens of a step; `like`: a tensor with the activations' dtype and device;
    `lags`: whether one more step of a request may have begun when its end becomes known.
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
        self._recorder = TraceRecorder()
        self._readings = ReadingRecorder()
        self._entry_of: dict[str, int] = {}
        self._is_unrecorded = False
        self._captures = StepCaptures()

    def begin(self, req_id: str, extra_args: Mapping[str, Any], num_cached: int) -> None:
        """Add a request, whose first `num_cached` tokens come from the prefix cache."""
        if STEER in extra_args or READ in extra_args:
            entry = self._entry_of[req_id] = self.tables.sums.acquire()
        if STEER in extra_args:
            parts, prompt_len = extra_args[STEER]
            self._recorder.begin(req_id, entry, parts, prompt_len, num_cached)
        if READ in extra_args:
            read_slot, request = extra_args[READ]
            self._readings.begin(req_id, entry, read_slot, request, num_cached)
        if CAPTURE in extra_args:
            self._captures.begin(req_id, extra_args[CAPTURE])

    def end(self, req_id: str) -> None:
        """Remove a request that has ended."""
        self._recorder.end(req_id)
        self._readings.end(req_id)
        self._captures.end(req_id)
        entry = self._entry_of.pop(req_id, None)
        if entry is not None:
            self.tables.add_up()
            self.tables.sums.release(entry)

    def mark(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> None:
        """Write the marks of the next step's tokens into the tables.

        Arguments as in `StepEntries._place`.
        """
        self.tables.serves = True
        if self._entry_of or self._captures:
            steered = self._recorder.find(req_ids, starts_R, computed_R)
            read = self._readings.find(req_ids, starts_R, computed_R)
            captured = self._captures.find(req_ids, starts_R, computed_R)
            self.tables.write(Step(steered, captured, read))
            if self._lags and len(steered.index_t):
                self.tables.snapshot_sums()
            self._is_unrecorded = True
        elif not self.tables.is_idle:
            self.tables.write(Step())

    def record(self) -> None:
        """Record the last step's readings, before the next step overwrites their buffers.

        They stay on the device, and the host does not wait.
        """
        if not self._is_unrecorded:
            return
        self._is_unrecorded = False
        self.tables.probes.decide_prompts()
        readings_kGR = self.tables.probes.gather()
        if readings_kGR is not None:
            self._readings.record(readings_kGR)

    def take_traces(self, ends: Mapping[str, int]) -> dict[str, StageTrace]:
        """Return each request's measurements of its first tokens; `ends`: their number, by request.

        The latest step may have one token beyond the end, which is left out. Layers of other
        pipeline stages are absent.
        """
        self.record()
        late = [req_id for req_id, end in ends.items() if self._recorder.is_beyond(req_id, end)]
        entries, before = ([self._entry_of[req_id] for req_id in some] for some in (ends, late))
        sums_ELn = self.tables.fetch_sums(entries, before)
        return {
            req_id: (
                self._recorder.count(req_id, end),
                {
                    int(layer): (int(sums_Ln[layer, 0]), *sums_Ln[layer, 1:].tolist())
                    for layer in sums_Ln[:, 0].nonzero()[0]
                },
                self._readings.count_passed(req_id, end),
            )
            for (req_id, end), sums_Ln in zip(ends.items(), sums_ELn, strict=True)
        }

    def take_readings(self, req_id: str) -> Readings | None:
        """Return a request's readings since the last call; None if there are none."""
        self.record()
        return self._readings.pop(req_id)
