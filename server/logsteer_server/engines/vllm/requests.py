"""Jobs as vLLM requests: prefill of a prompt, or generation."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from logsteer_server.contract.batches import describe_non_finite
from logsteer_server.contract.jobs import (
    CaptureJob,
    CaptureOutput,
    GenerateJob,
    Job,
    JobFailure,
    JobResult,
    ScoreJob,
    ScoreOutput,
)
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
    """A job with its slots and, once submitted, the id of its request in vLLM.

    `num_generated`: tokens generated so far. `num_reported`: `num_read` at the last output.
    """

    job_id: int
    job: Any
    slot: SteeringSlot
    adapter: AdapterSlot | None
    request_id: str = ""
    num_generated: int = 0
    num_reported: int = 0

    @property
    def num_read(self) -> int:
        """Tokens that the model has computed: the prompt and all generated except the last."""
        return len(self.job.tokens) + max(0, self.num_generated - 1)

    @property
    def lora_request(self) -> Any:
        """vLLM's `LoRARequest` of the job's adapter, or None."""
        return self.adapter and self.adapter.lora_request

    @property
    def may_read_cache(self) -> bool:
        """Whether tokens may come from the prefix cache; not if probes read all of them."""
        return self.job.plan is None or self.job.plan.kept != "all"

    def submit(self, vllm: "VllmCore", eos_ids: tuple[int, ...]) -> None:
        """Submit the job to vLLM. Errors: whatever vLLM raises."""
        raise NotImplementedError

    def read(self, output: Any) -> JobResult | None:
        """Return the result in a step's output of the request, if any."""
        raise NotImplementedError

    def _prefill(self, vllm: "VllmCore", rows: dict[str, Any]) -> None:
        job, extra_args = self.job, self.slot.extra_args | rows
        self.request_id = vllm.schedule(
            job.tokens.tolist(),
            extra_args,
            self.lora_request,
            job.cache_namespace,
            self.may_read_cache,
        )


@dataclass(slots=True, eq=False)
class RunningScore(RunningJob):
    """A score job, whose rows arrive with its request's last output."""

    spec: RowSpec = field(init=False)

    def submit(self, vllm: "VllmCore", eos_ids: tuple[int, ...]) -> None:
        """Submit the job to vLLM."""
        self.spec = RowSpec.of(self.job, eos_ids)
        self._prefill(vllm, describe_rows(self.job, self.spec))

    def read(self, output: Any) -> JobResult | None:
        """Return the scores when the request has ended."""
        if not output.finished:
            return None
        values = output.prompt_token_id_logprobs
        if values is not None and values.shape == NO_MEMORY.shape:
            detail = "memory ran out over the rows of this request; ask for fewer columns or rows"
            return JobFailure("out_of_memory", detail)
        if values is not None and values.shape == NO_FILE.shape:
            detail = "a file of log-probabilities failed; the server's log says how"
            return JobFailure("internal", detail)
        if values is None or not values.numel():
            detail = f"vLLM ended the request without its rows ({output.finish_reason})"
            return JobFailure("internal", detail)
        return ScoreOutput(
            unpack(values.numpy().reshape(-1, self.spec.width), self.spec),
            cached_tokens=output.prefill_stats.num_cached_tokens if output.prefill_stats else 0,
        )


@dataclass(slots=True, eq=False)
class RunningCapture(RunningJob):
    """A job that only captures activations, which the workers' tables hold."""

    def submit(self, vllm: "VllmCore", eos_ids: tuple[int, ...]) -> None:  # noqa: ARG002
        """Submit the job to vLLM."""
        self._prefill(vllm, {})

    def read(self, output: Any) -> JobResult | None:
        """Return an empty output when the request has ended."""
        return CaptureOutput() if output.finished else None


@dataclass(slots=True, eq=False)
class RunningGeneration(RunningJob):
    """A job that generates."""

    drawn: DrawnTokens = field(init=False)
    cached_tokens: int = 0

    def submit(self, vllm: "VllmCore", eos_ids: tuple[int, ...]) -> None:
        """Submit the job to vLLM."""
        self.drawn = DrawnTokens(self.job, eos_ids, vllm.tokenizer)
        extra_args = self.slot.extra_args | describe_draw(self.job, self.drawn.spec)
        self.request_id = vllm.generate(
            self.job, extra_args, self.lora_request, eos_ids, self.may_read_cache
        )

    def read(self, output: Any) -> JobResult | None:
        """Return the continuation when it has ended, and each piece of a streamed one.

        It also ends at a stop string, which vLLM does not check, and at logits that are not finite.
        """
        if output.num_nans_in_logits:
            found = "after the tokens so far the logits are not finite"
            return describe_non_finite(self.job, found)
        if output.prefill_stats is not None:
            self.cached_tokens = output.prefill_stats.num_cached_tokens
        reason = self._add(output)
        if output.finished:
            if str(output.finish_reason) == "error":
                detail = "vLLM made no grammar of this form; simplify its JSON Schema"
                return JobFailure("invalid_request", detail)
            reason = reason or str(output.finish_reason)
        self.num_generated = self.drawn.num_tokens
        if not (reason or self.job.stream):
            return None
        return self.drawn.pop(reason, cached_tokens=self.cached_tokens)

    def _add(self, output: Any) -> str | None:
        """Add the tokens of a step; return the stop reason, or None."""
        logprobs = output.new_logprobs
        values_NW = None if logprobs is None else logprobs.logprobs
        for n, token in enumerate(output.new_token_ids):
            values_1W = None if values_NW is None else values_NW[n : n + 1]
            if reason := self.drawn.add(token, values_1W):
                return reason
        return None


RUNNING: dict[type[Job], type[RunningJob]] = {
    ScoreJob: RunningScore,
    CaptureJob: RunningCapture,
    GenerateJob: RunningGeneration,
}
