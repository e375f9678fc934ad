"""How each kind of job runs as vLLM requests: prefill of a prompt, or generation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from logsteer_server.contract.batches import describe_non_finite
from logsteer_server.contract.jobs import (
    CaptureOutput,
    GenerateOutput,
    JobFailure,
    JobResult,
    Output,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.contract.plan import Readings, SteeringPlan
from logsteer_server.engines.drawn import DrawnTokens
from logsteer_server.engines.vllm.adapters import AdapterSlot
from logsteer_server.engines.vllm.extra_args import describe_draw, describe_rows
from logsteer_server.engines.vllm.scoring import NO_FILE, NO_MEMORY
from logsteer_server.engines.vllm.slots import SteeringSlot
from logsteer_server.numerics.rows import RowSpec, unpack

if TYPE_CHECKING:
    from logsteer_server.engines.vllm.core import VllmCore


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job in vLLM, with its kind of request, its slots and its request's id."""

    job_id: int
    job: Any
    kind: "JobRequests"
    slot: SteeringSlot
    adapter: AdapterSlot | None
    use_cache: bool = True
    request_id: str = ""
    readings: Readings | None = None
    """Probe readings of tokens that no output has contained yet."""
    num_generated: int = 0
    num_captured: int = 0
    """`num_read` at the last output with activations."""

    @property
    def num_read(self) -> int:
        """Tokens that the model has computed: the prompt and all generated except the last."""
        return len(self.job.tokens) + max(0, self.num_generated - 1)

    @property
    def lora_request(self) -> Any:
        """vLLM's `LoRARequest` of the job's adapter, or None."""
        return self.adapter and self.adapter.lora_request

    @property
    def streams_captures(self) -> bool:
        """Whether each output has the activations of its tokens, instead of the last having all."""
        return self.job.capture is not None and self.job.capture.read == "each"

    @property
    def keeps_readings(self) -> bool:
        """Whether outputs have the readings of the plan's probes."""
        return self.job.plan is not None and self.job.plan.kept != "none"

    @property
    def has_prompt_condition(self) -> bool:
        """Whether a condition of its plan reads the prompt's last token."""
        plan: SteeringPlan | None = self.job.plan
        return plan is not None and any(one.of == "prompt" for one in plan.conditions)

    @property
    def may_read_cache(self) -> bool:
        """Whether tokens may come from the prefix cache; not if probes read all of them."""
        return self.use_cache and (self.job.plan is None or self.job.plan.kept != "all")

    def add_readings(self, result: Output, new: Readings | None) -> Output:
        """Return a result with the readings of its tokens; keep later ones for the next result."""
        held = self.readings
        if held is None or new is None:
            held = held or new
        elif new.first + len(new.values_TGR) > held.first + len(held.values_TGR):
            # After a preemption, probes read tokens again.
            new_TGR = new.values_TGR[max(0, held.first + len(held.values_TGR) - new.first) :]
            held = Readings(held.first, np.concatenate([held.values_TGR, new_TGR]))
        if held is None:
            return result
        count = len(held.values_TGR)
        if isinstance(result, GenerateOutput):
            first_row = max(held.first, self.job.prompt_len - 1)
            count = first_row - held.first + result.num_generated
        own = Readings(held.first, held.values_TGR[:count])
        self.readings = Readings(held.first + count, held.values_TGR[count:])
        return replace(result, readings=own)


Collected = tuple[RunningJob, JobResult | None]
"""A job and its result; None if it has to run again without the prefix cache."""


class JobRequests(Protocol):
    """Run the jobs of one class."""

    def submit(self, running: RunningJob) -> str:
        """Submit a job to vLLM and return its request's id. Errors: whatever vLLM raises."""
        ...

    def collect(self, outputs: Sequence[tuple[RunningJob, Any]]) -> list[Collected]:
        """Convert the outputs of a step of vLLM to results."""
        ...

    def cancel(self, request_id: str) -> None:
        """Abort a request."""
        ...


class PrefillRequests:
    """Run jobs that compute a prompt and generate nothing."""

    def __init__(self, vllm: "VllmCore") -> None:
        self._vllm = vllm

    def _schedule(self, running: RunningJob, extra_args: dict[str, Any], use_cache: bool) -> str:
        job = running.job
        return self._vllm.schedule(
            job.tokens.tolist(), extra_args, running.lora_request, job.cache_namespace, use_cache
        )

    def collect(self, outputs: Sequence[tuple[RunningJob, Any]]) -> list[Collected]:
        """Return the results of the requests that have ended."""
        return [
            (running, self._result(running, output))
            for running, output in outputs
            if output.finished
        ]

    def _result(self, running: RunningJob, output: Any) -> JobResult | None:
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """Abort a request."""
        self._vllm.abort(request_id)


class ScoreRequests(PrefillRequests):
    """Run score jobs, whose rows arrive with their requests' outputs."""

    def __init__(self, vllm: "VllmCore", eos_ids: tuple[int, ...]) -> None:
        super().__init__(vllm)
        self._eos_ids = eos_ids

    def submit(self, running: RunningJob) -> str:
        """Submit a job to vLLM's scheduler and return its request's id."""
        job: ScoreJob = running.job
        rows = describe_rows(job, RowSpec.of(job, self._eos_ids))
        extra_args = running.slot.extra_args | rows
        return self._schedule(running, extra_args, running.may_read_cache)

    def _result(self, running: RunningJob, output: Any) -> JobResult | None:
        spec = RowSpec.of(running.job, self._eos_ids)
        values = output.prompt_token_id_logprobs
        if values is None:
            detail = f"vLLM ended the request without its rows ({output.finish_reason})"
            return JobFailure("internal", detail)
        if values.shape == NO_MEMORY.shape:
            detail = "memory ran out over the rows of this request; ask for fewer columns or rows"
            return JobFailure("out_of_memory", detail)
        if values.shape == NO_FILE.shape:
            detail = "a file of log-probabilities failed; the server's log says how"
            return JobFailure("internal", detail)
        if values.numel() == 0:
            # A prefix-cache hit went beyond the first scored row, which was not computed.
            return None
        return ScoreOutput(
            unpack(values.numpy().reshape(-1, spec.width), spec),
            cached_tokens=output.prefill_stats.num_cached_tokens if output.prefill_stats else 0,
        )


class CaptureRequests(PrefillRequests):
    """Run jobs that only capture activations, which the workers' tables hold."""

    def submit(self, running: RunningJob) -> str:
        """Submit a job to vLLM's scheduler and return its request's id."""
        return self._schedule(running, running.slot.extra_args, running.may_read_cache)

    def _result(self, running: RunningJob, output: Any) -> JobResult:  # noqa: ARG002
        return CaptureOutput()


@dataclass(slots=True, eq=False)
class _Reply:
    """The generated tokens of a request that are not in an output yet."""

    drawn: DrawnTokens
    cached_tokens: int = 0


class GenerationRequests:
    """Run the jobs that generate."""

    def __init__(self, vllm: "VllmCore", eos_ids: tuple[int, ...]) -> None:
        self._vllm = vllm
        self._eos_ids = eos_ids
        self._replies: dict[str, _Reply] = {}
        self._started: list[int] = []

    @property
    def is_running(self) -> bool:
        """Whether a job is in vLLM, running or waiting."""
        return bool(self._replies)

    def pop_started(self) -> list[int]:
        """Return the ids of the jobs whose prompts were completed since the last call."""
        started, self._started = self._started, []
        return started

    def submit(self, running: RunningJob) -> str:
        """Submit a job to vLLM and return its request's id."""
        reply = _Reply(DrawnTokens(running.job, self._eos_ids, self._vllm.tokenizer))
        extra_args = running.slot.extra_args | describe_draw(running.job, reply.drawn.spec)
        request_id = self._vllm.generate(
            running.job, extra_args, running.lora_request, self._eos_ids, running.may_read_cache
        )
        self._replies[request_id] = reply
        return request_id

    def cancel(self, request_id: str) -> None:
        """Abort a request."""
        del self._replies[request_id]
        self._vllm.abort(request_id)

    def collect(self, outputs: Sequence[tuple[RunningJob, Any]]) -> list[Collected]:
        """Return results of the requests that have ended, and pieces of streamed ones."""
        collected: list[Collected] = []
        for running, output in outputs:
            reply = self._replies[running.request_id]
            if output.num_nans_in_logits:
                self.cancel(running.request_id)
                found = "after the tokens so far the logits are not finite"
                collected.append((running, describe_non_finite(running.job, found)))
                continue
            if output.prefill_stats is not None:
                reply.cached_tokens = output.prefill_stats.num_cached_tokens
                self._started.append(running.job_id)
            reason = self._add(reply, output)
            if reason or output.finished or running.job.stream:
                collected.append((running, self._result(running, reply, output, reason)))
        return collected

    def _add(self, reply: _Reply, output: Any) -> str | None:
        """Add the tokens of a step to a reply; return its stop reason, or None."""
        logprobs = output.new_logprobs
        values_NW = None if logprobs is None else logprobs.logprobs
        for n, token in enumerate(output.new_token_ids):
            values_1W = None if values_NW is None else values_NW[n : n + 1]
            if reason := reply.drawn.add(token, values_1W):
                return reason
        return None

    def _result(
        self, running: RunningJob, reply: _Reply, output: Any, reason: str | None
    ) -> JobResult:
        """Return the reply's piece with the new tokens; with a stop reason, the last one."""
        if output.finished:
            del self._replies[running.request_id]
            if str(output.finish_reason) == "error":
                detail = "vLLM made no grammar of this form; simplify its JSON Schema"
                return JobFailure("invalid_request", detail)
            reason = reason or str(output.finish_reason)
        elif reason:  # a stop string, which vLLM does not check
            self.cancel(running.request_id)
        running.num_generated = reply.drawn.num_tokens
        return reply.drawn.pop(reason, cached_tokens=reply.cached_tokens)
