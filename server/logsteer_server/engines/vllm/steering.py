"""The steering of one rank's steps: which tokens each is for, and what was measured of them.

Free of vLLM, whose model runner says here which requests begin and end and where their tokens lie.
A step reads tokens of many requests, one request after another: parts of prompts, and one token of
each request that is being decoded. So all of it is arithmetic on arrays over the step's tokens T.
Axis letters: R requests of a step, E entries; lower case t: the steered tokens of a step.
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
"""Slots and the tokens that each is for; no token is at two of these positions."""

StageTrace = tuple[tuple[int, ...], dict[int, tuple[int, float, float]], tuple[int, ...]]
"""Of one request, at one pipeline stage: its steered tokens, by part of its plan; by layer, those
changed, their ratios' sum, and the first token's ratio; by condition, those where it held."""


_ENTRY = np.dtype([("first", "i8"), ("end", "i8"), ("slot", "i8"), ("recorded", "i8")])
_ENDLESS = 2**62


@dataclass(slots=True)
class _LatestMarked(LatestStep):
    """What was found in the latest step; `steps`: how many there were that went on from it, itself
    included.
    """

    tokens: SteeredTokens
    positions_t: Indices
    steps: int = 1


class TraceRecorder(StepEntries[_LatestMarked]):
    """Find the steered tokens of each step, and count them by request.

    It serves one rank. Each steered request has an entry: the positions [first, end) around its
    steered tokens and its slot in the steering tables; where its tokens are scattered, or have
    slots by part of its plan, its parts say which. What was measured of tokens in front of
    `recorded` is in the tables' sums: preemption makes the model read them again.
    Of two requests, `b` is not steered, and `a` is by the plan in slot 2, everywhere, with entry 1.
    A step reads tokens 5 and 6 of `b` and the first three of `a`:

        begin("a", 1, [(2, Positions("all"))], prompt_len=4, num_cached=0)

        tokens T         b5   b6   a0   a1   a2      starts_R = [0, 2, 5], computed_R = [5, 0]
        entry             0    0    1    1    1
        find(["b", "a"], starts_R, computed_R):      index_t = [2, 3, 4], slots_t = [2, 2, 2],
                                                     is_new_t = [True, True, True]
        count("a", end=3):                           (3,)

    Were `a` preempted here, the next step would read a0 to a3: `find` names all four, which are
    steered again, and of which a3 alone is new.
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
        """Begin the entry of a request whose first `num_cached` tokens the prefix cache holds.

        Those were steered when they were computed.
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
        """Remove the entry of a request that has ended, if it has one."""
        self._add_up()
        entry = self._entry_of.pop(req_id, None)
        if entry is not None:
            del self._parts[entry]
            self._scattered.discard(entry)

    def find(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> SteeredTokens:
        """Return the steered tokens of a step, which counts them; arguments as of `_place`."""
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
        # The first token is measured apart.
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
        """Count the steered tokens of the latest steps, and forget them."""
        latest, self._latest = self._latest, None
        if latest is not None:
            tokens, steps = latest.tokens, latest.steps
            np.maximum.at(self._entries["recorded"], tokens.entries_t, latest.positions_t + steps)

    def is_beyond(self, req_id: str, end: int) -> bool:
        """Return whether the token at `end` of a request was steered, or one after it."""
        self._add_up()
        return bool(self._entries["recorded"][self._entry_of[req_id]] > end)

    def count(self, req_id: str, end: int) -> tuple[int, ...]:
        """Return how many tokens of a request before `end` were steered, by part of its plan.

        Those that the prefix cache had are included.
        """
        self._add_up()
        entry = self._entry_of[req_id]
        parts, prompt_len = self._parts[entry]
        num_read = min(int(self._entries["recorded"][entry]), end)
        return tuple(positions.count(num_read, prompt_len) for _, positions in parts)


class StepSteering:
    """Mark the tokens of each step with the slots of their requests' plans and captures; record
    what was measured and read of them.

    `tokens`: how many a step has at most; `like`: a tensor of the activations' dtype and device;
    `lags`: whether a request may be in one step more when its end is known.
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
        """Begin with a request whose first `num_cached` tokens the prefix cache holds."""
        if STEER in extra_args or READ in extra_args:
            entry = self._entry_of[req_id] = self.tables.sums.take()
        if STEER in extra_args:
            parts, prompt_len = extra_args[STEER]
            self._recorder.begin(req_id, entry, parts, prompt_len, num_cached)
        if READ in extra_args:
            read_slot, request = extra_args[READ]
            self._readings.begin(req_id, entry, read_slot, request, num_cached)
        if CAPTURE in extra_args:
            self._captures.begin(req_id, extra_args[CAPTURE])

    def end(self, req_id: str) -> None:
        """Forget a request that has ended."""
        self._recorder.end(req_id)
        self._readings.end(req_id)
        self._captures.end(req_id)
        entry = self._entry_of.pop(req_id, None)
        if entry is not None:
            self.tables.add_up()
            self.tables.sums.release(entry)

    def mark(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> None:
        """Write the uses of the next step's tokens into the tables.

        The arguments are those of `StepEntries._place`.
        """
        self.tables.serves = True
        if self._entry_of or self._captures:
            steered = self._recorder.find(req_ids, starts_R, computed_R)
            read = self._readings.find(req_ids, starts_R, computed_R)
            captured = self._captures.find(req_ids, starts_R, computed_R)
            self.tables.write(Step(steered, captured, read))
            if self._lags and len(steered.index_t):
                self.tables.keep_sums()
            self._is_unrecorded = True
        elif not self.tables.is_idle:
            self.tables.write(Step())

    def record(self) -> None:
        """Record the last step's readings before its buffers are overwritten.

        All of it stays on the device: nothing here waits for that.
        """
        if not self._is_unrecorded:
            return
        self._is_unrecorded = False
        self.tables.probes.decide_prompts()
        readings_kGR = self.tables.probes.gather()
        if readings_kGR is not None:
            self._readings.record(readings_kGR)

    def take_traces(self, ends: Mapping[str, int]) -> dict[str, StageTrace]:
        """Return what was measured of the first tokens of requests, by request so many.

        There is at most one token more, of the latest step. Layers of other pipeline stages changed
        none.
        """
        self.record()
        late = [req_id for req_id, end in ends.items() if self._recorder.is_beyond(req_id, end)]
        entries, before = ([self._entry_of[req_id] for req_id in some] for some in (ends, late))
        sums_ELn = self.tables.take_sums(entries, before)
        return {
            req_id: (
                self._recorder.count(req_id, end),
                {
                    int(layer): (int(sums_Ln[layer, 0]), *sums_Ln[layer, 1:].tolist())
                    for layer in sums_Ln[:, 0].nonzero()[0]
                },
                self._readings.read_passed(req_id, end),
            )
            for (req_id, end), sums_Ln in zip(ends.items(), sums_ELn, strict=True)
        }

    def take_readings(self, req_id: str) -> Readings | None:
        """Return a request's readings since the last call; None if there are none."""
        self.record()
        return self._readings.take(req_id)
