"""Generation in vLLM: continuations, with vLLM's own detokenizer and stop strings.

The log-probabilities of sampled tokens are taken from the engine's arrays before vLLM's output
processor sees them, which would make a Python object of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from logsteer_server.contract.finite import describe_non_finite
from logsteer_server.contract.jobs import GenerateJob, GenerateOutput
from logsteer_server.engines.vllm.extra_args import describe_draw
from logsteer_server.engines.vllm.requests import Collected, RunningJob
from logsteer_server.engines.vllm.steering_slots import SteeringSlot, SteeringSlots

if TYPE_CHECKING:
    from logsteer_server.engines.vllm.core import VllmCore


@dataclass(slots=True, eq=False)
class _Sample:
    """A request that generates, and the columns of tokens not yet given out: [1, 1 + top] each."""

    running: RunningJob
    output_id: str
    cached_tokens: int = 0
    ids: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and log-probabilities of the next tokens: the sampled one, alternatives."""
        width = 1 + self.running.job.top
        ids_NK = np.concatenate([*self.ids, np.zeros((0, width), np.int32)])
        logprobs_NK = np.concatenate([*self.logprobs, np.zeros((0, width), np.float32)])
        self.ids, self.logprobs = [ids_NK[count:]], [logprobs_NK[count:]]
        return ids_NK[:count].astype(np.int32), logprobs_NK[:count].astype(np.float32)


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
        extra_args = running.slot.extra_args | describe_draw(running.job)
        request_id, output_id = self._vllm.generate(
            running.job, extra_args, running.lora_request, self._eos_ids, running.may_read_cache
        )
        sample = _Sample(running, output_id)
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
                # As wide as the widest request of the step: the most probable come first.
                width = 1 + running.job.top
                sample.ids.append(output.new_logprobs.logprob_token_ids[:, :width])
                sample.logprobs.append(output.new_logprobs.logprobs[:, :width])
                output.new_logprobs = None
        processed = self._vllm.process(healthy)
        return ended + [self._make_piece(output) for output in processed]

    def _make_piece(self, output: Any) -> Collected:
        sample = self._by_output_id[output.request_id]
        completion = output.outputs[0]
        ids_NK, logprobs_NK = sample.take(len(completion.token_ids))
        if output.finished:
            del self._by_output_id[sample.output_id], self._samples[sample.running.request_id]
        piece = GenerateOutput(
            np.array(completion.token_ids, dtype=np.int32),
            completion.text,
            logprobs_NK[:, 0],
            ids_NK[:, 1:],
            logprobs_NK[:, 1:],
            (completion.finish_reason or "stop") if output.finished else None,
            cached_tokens=sample.cached_tokens,
        )
        return sample.running, piece
