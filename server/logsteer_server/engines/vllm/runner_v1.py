"""vLLM's V1 model runner, extended to score rows, mark steered tokens and sample by policies."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from logsteer_server.engines.vllm import staging
from logsteer_server.engines.vllm.extra_args import SCORE
from logsteer_server.engines.vllm.runner import (
    LogsteerRunner,
    StepDraws,
    read_extra_args,
    warm_up,
    write_values,
)
from logsteer_server.engines.vllm.scoring import PromptPart


class V1Sampler(Sampler):  # type: ignore[misc]
    """Sample a step's rows for vLLM, and record which rows are not finite."""

    def __init__(self, draws: StepDraws) -> None:
        super().__init__()
        self._draws = draws
        self._finite_R: staging.Arriving | None = None

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,  # noqa: ARG002
        predict_bonus_token: bool = False,  # noqa: ARG002
        logprobs_mode_override: Any = None,  # noqa: ARG002
    ) -> SamplerOutput:
        """Return each row's token and the values that its request asks for."""
        drawn = self._draws.draw(logits)
        if drawn is None:
            drawn = warm_up(logits)
        else:
            # It reaches the host before the tokens, which vLLM waits for.
            self._finite_R = staging.Arriving(drawn.finite_R)
        return SamplerOutput(drawn.ids_R.to(torch.int32)[:, None], write_values(drawn))

    def pop_non_finite(self) -> dict[str, int]:
        """Return {request id: 1} for the sampled rows whose logits are not finite."""
        arriving, self._finite_R = self._finite_R, None
        if arriving is None or (finite_R := arriving.read()).all():
            return {}
        pairs = zip(self._draws.req_ids, finite_R.tolist(), strict=True)
        return {req_id: 1 for req_id, is_finite in pairs if not is_finite}


class V1Runner(LogsteerRunner, GPUModelRunner):  # type: ignore[misc]
    """Connect `LogsteerRunner` to the steps of vLLM's V1 runner."""

    def prepare_sampling(self) -> None:
        """Replace vLLM's sampler with ours."""
        self.sampler = V1Sampler(self.draws)

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Zero cache blocks as vLLM does; on CPUs, of all attention groups at once."""
        if self.device.type == "cpu":
            self.clear_blocks(block_ids)
        else:
            super()._zero_block_ids(block_ids)

    def _update_states(self, scheduler_output: Any) -> Any:
        """Record which requests end and begin, also in steps without tokens."""
        self.end_requests(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            self.begin_request(request)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Prepare a step as vLLM does, then mark its tokens. vLLM calls this once a step."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if self.steering is None:
            return prepared
        rows = self.input_batch.num_reqs
        self.steering.mark(
            self.input_batch.req_ids,
            self.query_start_loc.np[: rows + 1].astype(np.int64),
            self.input_batch.num_computed_tokens_cpu[:rows].astype(np.int64),
        )
        return prepared

    def _model_forward(self, *args: Any, **inputs: Any) -> Any:
        """Run the model as vLLM does; with a probe, uncompiled and without captured graphs."""
        if self.stream_probe is None:
            return super()._model_forward(*args, **inputs)
        context = get_forward_context()
        context.skip_compiled, context.cudagraph_runtime_mode = True, CUDAGraphMode.NONE
        with self.stream_probe.attached():
            return super()._model_forward(*args, **inputs)

    def _get_prompt_logprobs_dict(
        self, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        """Also compute rows. vLLM calls this on the last stage, before requests advance."""
        parts = self._find_parts(num_scheduled_tokens)
        self.read_rows(parts, hidden_states, self.requests.keys())
        prompt_logprobs: dict[str, Any] = super()._get_prompt_logprobs_dict(
            hidden_states, num_scheduled_tokens
        )
        return prompt_logprobs

    def _find_parts(self, num_scheduled_tokens: dict[str, int]) -> list[PromptPart]:
        """Return the chunks of scored requests' prompts in a step."""
        parts = []
        for req_id, num_tokens in num_scheduled_tokens.items():
            request = self.requests[req_id]
            scored = read_extra_args(request.sampling_params).get(SCORE)
            begin, prompt_len = request.num_computed_tokens, request.num_prompt_tokens
            if scored is None or begin >= prompt_len:
                continue
            end = min(begin + num_tokens, prompt_len)
            offset = int(self.query_start_loc.np[self.input_batch.req_id_to_index[req_id]])
            parts.append(PromptPart(req_id, scored, begin, end, prompt_len, offset))
        return parts

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Return vLLM's output of the step, with the rows of the prompts that it completed."""
        self.row_reader.begin_step()
        # Our sampler applies the masks, so that the values it reads are those of unmasked logits.
        self.draws.grammars = grammar_output
        output = super().sample_tokens(None)
        if finished := self.row_reader.pop_finished():
            if not isinstance(output, ModelRunnerOutput):
                raise TypeError(f"rows need synchronous scheduling, got {type(output).__name__}")
            self._sync_device()
            output.prompt_token_id_logprobs_dict = finished
        if isinstance(output, ModelRunnerOutput):
            output.num_nans_in_logits = self.sampler.pop_non_finite()
        return output

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        """Set the requests of these rows for our sampler, then sample as vLLM does.

        It also samples for unfinished prompts; vLLM discards those tokens.
        """
        batch = self.input_batch
        rows = batch.num_reqs
        index_R = batch.num_tokens_no_spec[:rows] - batch.num_prompt_tokens[:rows]
        self.draws.expect(
            batch.req_ids, lambda req_id: self.requests[req_id].sampling_params, index_R
        )
        return super()._sample(logits, spec_decode_metadata)
