"""Generation in vLLM: continuations, with vLLM's own detokenizer and stop strings.

What was read with the tokens is taken from the engine's arrays before vLLM's output processor sees
them, which would make a Python object of each number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from logsteer_server.contract.finite import describe_non_finite
from logsteer_server.contract.jobs import GenerateJob, GenerateOutput
from logsteer_server.engines.drawn import DrawnValues
from logsteer_server.engines.vllm.extra_args import describe_draw
from logsteer_server.engines.vllm.requests import Collected, RunningJob
from logsteer_server.engines.vllm.steering_slots import SteeringSlot, SteeringSlots
from logsteer_server.numerics.drawing import spec_of_draw

if TYPE_CHECKING:
    from logsteer_server.engines.vllm.core import VllmCore


@dataclass(slots=True, eq=False)
class _Sample:
    """A request that generates, and what was read with its tokens and not given out yet."""

    running: RunningJob
    output_id: str
    values: DrawnValues
    cached_tokens: int = 0


class GenerationRequests:
    """Run the jobs of one vLLM engine that generate."""

    def __init__(self, vllm: "VllmCore", slots: SteeringSlots, eos_ids: tuple[int, ...]) -> None:
        self._vllm = vllm
        self._slots = slots
        self._eos_ids = eos_ids
        self._samples: dict[str, _Sample] = {}
        self._by_output_id: dict[str, _Sample] = {}
        self._started: list[int] = []

    @property
    def is_running(self) -> bool:
        """Whether a job has begun or waits to."""
        return bool(self._samples)

    def take_started(self) -> list[int]:
        """Return the ids of jobs whose prompts have been read since the last call."""
        started, self._started = self._started, []
        return started

    def take_slot(self, job: GenerateJob) -> SteeringSlot | None:
        """Take the slot of the job's plan, if it has one; None where it has to wait."""
        return self._slots.take_plan(job)

    def submit(self, running: RunningJob) -> str:
        """Hand a job to vLLM and return its request's id."""
        spec = spec_of_draw(running.job, self._eos_ids)
        extra_args = running.slot.extra_args | describe_draw(running.job, spec)
        request_id, output_id = self._vllm.generate(
            running.job, extra_args, running.lora_request, self._eos_ids, running.may_read_cache
        )
        sample = _Sample(running, output_id, DrawnValues(spec))
        self._samples[request_id] = self._by_output_id[output_id] = sample
        return request_id

    def cancel(self, request_id: str) -> None:
        """Abort a request."""
        del self._by_output_id[self._samples.pop(request_id).output_id]
        self._vllm.abort_generation(request_id)

    def collect(self, outputs: Sequence[tuple[RunningJob, Any]]) -> list[Collected]:
        """Make pieces of text of what a step of vLLM put out; end what is not finite."""
        ended: list[Collected] = []
        healthy = []
        for running, output in outputs:
            if output.num_nans_in_logits:
                self.cancel(running.request_id)
                found = "after the tokens so far the logits are not finite"
                ended.append((running, describe_non_finite(running.job, found)))
                continue
            healthy.append(output)
            sample = self._samples[running.request_id]
            if output.prefill_stats is not None:
                sample.cached_tokens = output.prefill_stats.num_cached_tokens
                self._started.append(running.job_id)
            if output.new_logprobs is not None:
                sample.values.add(output.new_logprobs.logprobs)
                output.new_logprobs = None
        processed = self._vllm.process(healthy)
        return ended + [self._make_piece(output) for output in processed]

    def _make_piece(self, output: Any) -> Collected:
        sample = self._by_output_id[output.request_id]
        completion = output.outputs[0]
        if output.finished:
            del self._by_output_id[sample.output_id], self._samples[sample.running.request_id]
        piece = GenerateOutput(
            np.array(completion.token_ids, dtype=np.int32),
            completion.text,
            finish_reason=(completion.finish_reason or "stop") if output.finished else None,
            cached_tokens=sample.cached_tokens,
            **sample.values.take(len(completion.token_ids)),
        )
        return sample.running, piece
