"""vLLM's V2 model runner, extended to score rows, mark steered tokens and sample by policies.

Compared with V1, its batch has the requests' rows, offsets and positions as arrays; a preempted
request leaves the runner and returns as a new one with a longer prompt; and V2 itself copies a
step's results, rows included, to the host.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from logsteer_server.engines.vllm.extra_args import SCORE, RowRequest
from logsteer_server.engines.vllm.runner import (
    LogsteerRunner,
    StepDraws,
    read_extra_args,
    warm_up,
    write_values,
)
from logsteer_server.engines.vllm.scoring import PromptPart


class V2Sampler:
    """Sample a step's rows, in place of vLLM's sampler.

    vLLM's sampler keeps an unused table of [requests, V] for penalties.
    """

    penalties_state = SimpleNamespace(output_bin_counts=None)

    def __init__(self, draws: StepDraws, prefill_len: Any) -> None:
        self._draws = draws
        self._prefill_len = prefill_len

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Do nothing: a request's policy is in its extra arguments."""

    def apply_staged_writes(self) -> None:
        """Write nothing."""

    def __call__(self, logits: Tensor, batch: Any) -> SamplerOutput:
        """Return each row's token and the values that its request asks for."""
        drawn = self._draws.draw(logits) or warm_up(logits)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self._prefill_len.gpu,
        )
        return SamplerOutput(
            drawn.ids_R[:, None],
            write_values(drawn),
            (~drawn.finite_R).int(),
            num_sampled,
            num_rejected,
        )


class UncompiledModel:
    """A model that runs uncompiled and without captured graphs."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        """Run the model."""
        get_forward_context().skip_compiled = True
        return self._model(**inputs)


class V2Runner(LogsteerRunner, GPUModelRunner):  # type: ignore[misc]
    """Connect `LogsteerRunner` to the steps of vLLM's V2 runner.

    `params`: sampling parameters of the requests that have not ended. `scored`: the scoring
    arguments among their extra arguments.
    """

    model: Any
    sampler: Any
    params: dict[str, Any]
    scored: dict[str, RowRequest]

    def prepare_sampling(self) -> None:
        """Replace vLLM's sampler and its prompt log-probabilities with ours."""
        self.params, self.scored = {}, {}
        if self.sampler is not None:  # it is on the last pipeline stage
            self.sampler = V2Sampler(self.draws, self.req_states.prefill_len)
            self.prompt_logprobs_worker.compute_prompt_token_id_logprobs = self.read_prompts

    def _sync_device(self) -> None:
        torch.accelerator.synchronize()

    def _init_kv_zero_meta(self) -> None:
        """Set up the zeroing of cache blocks; on CPUs, of all attention groups."""
        if self.device.type == "cpu":
            self.kv_block_zeroer = SimpleNamespace(zero_block_ids=self.clear_blocks)
        else:
            super()._init_kv_zero_meta()

    def capture_model(self, **named: Any) -> Any:
        """Capture graphs as vLLM does, with the steering kernel launched beforehand.

        vLLM's warm-up requests came before. While requests are served, an idle kernel is not
        launched, so that its first launch, which compiles it, would fall into the capture.
        """
        if self.steering is not None:
            self.steering.tables.serves = False
        return super().capture_model(**named)

    def finish_requests(self, scheduler_output: Any) -> None:
        """Record which requests end, also in steps without tokens."""
        self.end_requests(scheduler_output.finished_req_ids)
        for req_id in scheduler_output.finished_req_ids:
            self.params.pop(req_id, None)
            self.scored.pop(req_id, None)
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: Any) -> None:
        """Record which requests begin; a request that returns after a preemption is known."""
        for request in scheduler_output.scheduled_new_reqs:
            if request.req_id not in self.params:
                self.params[request.req_id] = request.sampling_params
                if rows := read_extra_args(request.sampling_params).get(SCORE):
                    self.scored[request.req_id] = rows
                self.begin_request(request)
        super().add_requests(scheduler_output)

    def prepare_inputs(self, *args: Any) -> Any:
        """Prepare a step as vLLM does, then mark its tokens. vLLM calls this once a step."""
        batch = super().prepare_inputs(*args)
        if self.steering is not None:
            self.steering.mark(
                batch.req_ids,
                batch.query_start_loc_np[: batch.num_reqs + 1].astype(np.int64),
                batch.num_computed_tokens_np.astype(np.int64),
            )
        return batch

    def execute_model(self, *args: Any, **named: Any) -> Any:
        """Run a step as vLLM does; with a probe, uncompiled and without captured graphs."""
        if self.stream_probe is None:
            return super().execute_model(*args, **named)
        model, graphs = self.model, self.cudagraph_manager
        are_captured, graphs._graphs_captured = graphs._graphs_captured, False
        self.model = UncompiledModel(model)
        try:
            with self.stream_probe.attached():
                return super().execute_model(*args, **named)
        finally:
            self.model, graphs._graphs_captured = model, are_captured

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """Set the requests of these rows for our sampler, then sample as vLLM does.

        It also samples for unfinished prompts; vLLM discards those tokens.
        """
        batch, rows = input_batch, input_batch.num_reqs
        prompt_R = self.req_states.prompt_len.np[batch.idx_mapping_np]
        index_R = np.maximum(batch.seq_lens_cpu_upper_bound.numpy()[:rows] - prompt_R, 0)
        self.draws.expect(batch.req_ids, self.params.__getitem__, index_R)
        # Our sampler applies the masks, so that the values it reads are those of unmasked logits.
        self.draws.grammars = grammar_output
        return super().sample(hidden_states, input_batch, None)

    def read_prompts(
        self,
        logits_fn: Any,  # noqa: ARG002
        hidden_states: Tensor,
        input_batch: Any,
        prompt_lens: np.ndarray,
    ) -> dict[str, Tensor]:
        """Compute the rows of a step's prompts; return those of the prompts that it completed.

        It replaces vLLM's function for log-probabilities of given tokens; its results return to the
        engine the same way.
        """
        batch, parts = input_batch, []
        for place, req_id in enumerate(batch.req_ids if self.scored else ()):
            rows = self.scored.get(req_id)
            begin = int(batch.num_computed_tokens_np[place])
            prompt_len = int(prompt_lens[batch.idx_mapping_np[place]])
            if rows is not None and begin < prompt_len:
                end = min(begin + int(batch.num_scheduled_tokens[place]), prompt_len)
                offset = int(batch.query_start_loc_np[place])
                parts.append(PromptPart(req_id, rows, begin, end, prompt_len, offset))
        self.read_rows(parts, hidden_states, self.params.keys())
        return self.row_reader.pop_finished()
