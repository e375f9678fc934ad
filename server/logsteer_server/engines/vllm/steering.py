"""The steering of one rank's steps: which tokens each is for, and what was measured of them.

Free of vLLM, whose model runner says here which requests begin and end and where their tokens lie.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from logsteer_server.contract.plan import Positions, Readings
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import CAPTURE, READ, STEER
from logsteer_server.engines.vllm.readings import ReadingRecorder
from logsteer_server.engines.vllm.tables import SteeringTables, Step
from logsteer_server.engines.vllm.traces import SteeredTokens, TraceRecorder

Indices = npt.NDArray[np.int64]

StageTrace = tuple[int, dict[int, tuple[int, float]], tuple[int, ...]]
"""Of one request, at one pipeline stage: its steered tokens; by layer, those changed and their
ratios' sum; by condition, those where it held."""


class StepSteering:
    """Mark the tokens of each step with the slots of their requests' plans and captures; record
    what was measured and read of them.

    `tokens`: how many a step has at most; `like`: a tensor of the activations' dtype and device.
    """

    def __init__(
        self, size: SteeringSize, layers: int, tokens: int, width: int, like: Tensor
    ) -> None:
        self.tables = SteeringTables(size, layers, tokens, width, like)
        self._recorder = TraceRecorder(layers)
        self._readings = ReadingRecorder()
        self._unrecorded: SteeredTokens | None = None
        self._captures: dict[str, tuple[int, bool, int]] = {}

    def begin(self, req_id: str, extra_args: Mapping[str, Any], num_cached: int) -> None:
        """Begin with a request whose first `num_cached` tokens the prefix cache holds."""
        if STEER in extra_args:
            slot, kind, slices, prompt_len = extra_args[STEER]
            positions = Positions(kind, slices)
            self._recorder.begin(req_id, slot, positions, prompt_len, num_cached)
        if READ in extra_args:
            read_slot, request = extra_args[READ]
            self._readings.begin(req_id, read_slot, request, num_cached)
        if CAPTURE in extra_args:
            self._captures[req_id] = extra_args[CAPTURE]

    def end(self, req_id: str) -> None:
        """Forget a request that has ended."""
        self._recorder.end(req_id)
        self._readings.end(req_id)
        self._captures.pop(req_id, None)

    def mark(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> None:
        """Write into the tables what the tokens of the next step are for.

        The arguments are those of `TraceRecorder.find`.
        """
        if len(self._recorder) or len(self._readings) or self._captures:
            self.tables.write(self._find(req_ids, starts_R, computed_R))
        elif not self.tables.is_idle:
            self.tables.write(Step())

    def _find(self, req_ids: list[str], starts_R: Indices, computed_R: Indices) -> Step:
        steered = self._unrecorded = self._recorder.find(req_ids, starts_R, computed_R)
        read = self._readings.find(req_ids, starts_R, computed_R)
        if not self._captures:
            return Step(steered.index_t, steered.slots_t, read=read)
        captured, slots = [], []
        for row, req_id in enumerate(req_ids):
            if req_id not in self._captures:
                continue
            slot, every_token, prompt_len = self._captures[req_id]
            begin, start = int(computed_R[row]), int(starts_R[row])
            if begin == 0:  # preempted requests begin again, too
                self.tables.clear_captures(slot)
            last = prompt_len - 1
            first = begin if every_token else max(begin, last)
            end = min(begin + int(starts_R[row + 1]) - start, last + 1)
            captured.append(np.arange(first, end) + (start - begin))
            slots.append(np.full(max(0, end - first), slot))
        none = np.zeros(0, np.int64)
        return Step(
            steered.index_t,
            steered.slots_t,
            np.concatenate([none, *captured]),
            np.concatenate([none, *slots]),
            read,
        )

    def record(self) -> None:
        """Record what the last step measured; its buffers are about to be written again."""
        if self._unrecorded is not None and len(self._unrecorded.index_t):
            self._recorder.record(self.tables.read_ratios())
        if self._unrecorded is not None and not self.tables.probes.is_idle:
            self._readings.record(self.tables.probes.take())
        self._unrecorded = None

    def take_trace(self, req_id: str) -> StageTrace:
        """Return what was measured of a request. Layers of other pipeline stages changed none."""
        self.record()
        return (*self._recorder.read(req_id), self._readings.read_passed(req_id))

    def take_readings(self, req_id: str) -> Readings | None:
        """Return what was read of a request and not taken before; None where nothing was."""
        self.record()
        return self._readings.take(req_id)
