"""The steering of one rank's steps: which tokens each is for, and what was measured of them.

Free of vLLM, whose model runner says here which requests begin and end and where their tokens lie.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from logsteer_server.contract.plan import Readings
from logsteer_server.engines.vllm.captures import StepCaptures
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import CAPTURE, READ, STEER
from logsteer_server.engines.vllm.layout import Step
from logsteer_server.engines.vllm.readings import ReadingRecorder
from logsteer_server.engines.vllm.tables import SteeringTables
from logsteer_server.engines.vllm.traces import TraceRecorder

Indices = npt.NDArray[np.int64]

StageTrace = tuple[tuple[int, ...], dict[int, tuple[int, float]], tuple[int, ...]]
"""Of one request, at one pipeline stage: its steered tokens, by part of its plan; by layer, those
changed and their ratios' sum; by condition, those where it held."""


class StepSteering:
    """Mark the tokens of each step with the slots of their requests' plans and captures; record
    what was measured and read of them.

    `tokens`: how many a step has at most; `like`: a tensor of the activations' dtype and device.
    """

    def __init__(
        self, size: SteeringSize, layers: int, tokens: int, width: int, like: Tensor
    ) -> None:
        self.tables = SteeringTables(size, layers, tokens, width, like)
        self._recorder = TraceRecorder()
        self._readings = ReadingRecorder()
        self._entry_of: dict[str, int] = {}
        self._is_unrecorded = False
        self._captures = StepCaptures(self.tables.captures)

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
        """Write into the tables what the tokens of the next step are for.

        The arguments are those of `TraceRecorder.find`.
        """
        self.tables.serves = True
        if self._entry_of or self._captures:
            steered = self._recorder.find(req_ids, starts_R, computed_R)
            read = self._readings.find(req_ids, starts_R, computed_R)
            captured = self._captures.find(req_ids, starts_R, computed_R)
            self.tables.write(Step(steered, captured, read))
            self._is_unrecorded = True
        elif not self.tables.is_idle:
            self.tables.write(Step())

    def record(self) -> None:
        """Record what the last step read; its buffers are about to be written again.

        All of it stays on the device: nothing here waits for that.
        """
        if not self._is_unrecorded:
            return
        self._is_unrecorded = False
        self.tables.probes.decide_prompts()
        readings_kGR = self.tables.probes.gather()
        if readings_kGR is not None:
            self._readings.record(readings_kGR)

    def take_traces(self, req_ids: Sequence[str]) -> dict[str, StageTrace]:
        """Return what was measured of requests. Layers of other pipeline stages changed none."""
        self.record()
        sums_ELn = self.tables.take_sums([self._entry_of[req_id] for req_id in req_ids])
        return {
            req_id: (
                self._recorder.count(req_id),
                {
                    int(layer): (int(sums_Ln[layer, 0]), float(sums_Ln[layer, 1]))
                    for layer in sums_Ln[:, 0].nonzero()[0]
                },
                self._readings.read_passed(req_id),
            )
            for req_id, sums_Ln in zip(req_ids, sums_ELn, strict=True)
        }

    def take_readings(self, req_id: str) -> Readings | None:
        """Return what was read of a request and not taken before; None where nothing was."""
        self.record()
        return self._readings.take(req_id)
