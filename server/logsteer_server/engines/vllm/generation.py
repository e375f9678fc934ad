"""Generation in vLLM: sampled continuations, with vLLM's own detokenizer and stop strings.

The log-probabilities of sampled tokens are taken from the engine's arrays before vLLM's output
processor sees them, which would make a Python object of each.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.llm_engine import LLMEngine

from logsteer_server.contract.jobs import GenerateJob, GenerateOutput


@dataclass(slots=True)
class _Sample:
    """A running request, and the columns of tokens that have not been handed on: [1, 1 + top]."""

    name: str
    job: GenerateJob
    cached_tokens: int = 0
    ids: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids and log-probabilities of the next tokens: the sampled one, then alternatives."""
        width = 1 + self.job.top
        ids_NK = np.concatenate([*self.ids, np.zeros((0, width), np.int32)])
        logprobs_NK = np.concatenate([*self.logprobs, np.zeros((0, width), np.float32)])
        self.ids, self.logprobs = [ids_NK[count:]], [logprobs_NK[count:]]
        return ids_NK[:count].astype(np.int32), logprobs_NK[:count].astype(np.float32)


class Generation:
    """The jobs of one vLLM engine that generate."""

    def __init__(self, vllm: LLMEngine) -> None:
        self._vllm = vllm
        self._running: dict[str, _Sample] = {}
        self._request_ids: dict[str, str] = {}

    def add(
        self,
        name: str,
        job: GenerateJob,
        extra_args: dict[str, Any],
        adapter: LoRARequest | None,
    ) -> str:
        """Hand a job to vLLM; the id that vLLM gives to the request of this name.

        Errors: ValueError for what vLLM does not sample with.
        """
        params = SamplingParams(
            max_tokens=job.max_tokens,
            temperature=job.policy.temperature,
            top_p=job.policy.top_p,
            top_k=job.policy.top_k,
            min_p=job.policy.min_p,
            seed=job.seed,
            stop=list(job.stop),
            include_stop_str_in_output=job.include_stop,
            ignore_eos=job.ignore_eos,
            logprobs=job.top if job.logprobs else None,
            output_kind=RequestOutputKind.DELTA if job.stream else RequestOutputKind.FINAL_ONLY,
            extra_args=extra_args,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": job.tokens.tolist()}
        if job.plan is not None:
            prompt["cache_salt"] = job.plan.digest(job.prompt_len).hex()
        request_id: str = self._vllm.add_request(name, prompt, params, lora_request=adapter)
        self._running[request_id] = _Sample(name, job)
        self._request_ids[name] = request_id
        return request_id

    def cancel(self, request_id: str) -> None:
        """Abort a job."""
        del self._request_ids[self._running.pop(request_id).name]
        self._vllm.abort_request([request_id], internal=True)

    def collect(self, outputs: Sequence[EngineCoreOutput]) -> list[tuple[str, GenerateOutput]]:
        """What one step's outputs mean, by request."""
        if not outputs:
            return []
        for output in outputs:
            sample = self._running.get(output.request_id)
            if sample is None:
                continue
            if output.prefill_stats is not None:
                sample.cached_tokens = output.prefill_stats.num_cached_tokens
            if output.new_logprobs is not None:
                sample.ids.append(output.new_logprobs.logprob_token_ids)
                sample.logprobs.append(output.new_logprobs.logprobs)
                output.new_logprobs = None
        processed = self._vllm.output_processor.process_outputs(
            list(outputs), engine_core_timestamp=time.monotonic()
        )
        self._vllm.engine_core.abort_requests(processed.reqs_to_abort)
        return [self._hand_on(output) for output in processed.request_outputs]

    def _hand_on(self, output: Any) -> tuple[str, GenerateOutput]:
        request_id = self._request_ids[output.request_id]
        sample = self._running[request_id]
        completion = output.outputs[0]
        ids_NK, logprobs_NK = sample.take(len(completion.token_ids))
        if output.finished:
            del self._running[request_id], self._request_ids[sample.name]
        return request_id, GenerateOutput(
            np.array(completion.token_ids, dtype=np.int32),
            completion.text,
            logprobs_NK[:, 0],
            ids_NK[:, 1:],
            logprobs_NK[:, 1:],
            (completion.finish_reason or "stop") if output.finished else None,
            cached_tokens=sample.cached_tokens,
        )
