"""vLLM's V2 model runner, which also reads scored rows, marks steered tokens, draws by policies.

V2 differs from V1 in what it tells of a step. Its batch has the requests' rows, places and
positions as arrays. A preempted request leaves the runner, and comes back as a new one whose prompt
is longer. What a step gives reaches the host by copies that V2 makes itself, rows among them.
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

from logsteer_server.engines.vllm.extra_args import SCORE
from logsteer_server.engines.vllm.runner import (
    LogsteerRunner,
    StepDraws,
    read_extra_args,
    warm_up,
    write_values,
)
from logsteer_server.engines.vllm.scoring import PromptPart


class V2Sampler:
    """Return a step's draws to vLLM, in place of vLLM's sampler.

    That one keeps a table of [requests, V] for penalties, which nobody asks for.
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
        """Return the token of each row, and the values that its request asks for."""
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
    """A model that runs as its layers are written, neither compiled nor as a captured graph."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        """Run the model."""
        get_forward_context().skip_compiled = True
        return self._model(**inputs)


class V2Runner(LogsteerRunner, GPUModelRunner):  # type: ignore[misc]
    """Tell what our runners have in common of the steps of vLLM's V2 runner.

    `params`: the sampling parameters of the requests that have not ended. `scored`: what those of
    them want whose rows are read.
    """

    model: Any
    sampler: Any
    params: dict[str, Any]
    scored: dict[str, dict[str, Any]]

    def prepare_sampling(self) -> None:
        """Put our sampler and our rows in the places of vLLM's."""
        self.params, self.scored = {}, {}
        if self.sampler is not None:  # it is on the last pipeline stage
            self.sampler = V2Sampler(self.draws, self.req_states.prefill_len)
            self.prompt_logprobs_worker.compute_prompt_token_id_logprobs = self.read_prompts

    def _sync_device(self) -> None:
        torch.accelerator.synchronize()

    def _init_kv_zero_meta(self) -> None:
        """Make ready to clear blocks as vLLM does; on CPUs those of every kind of attention."""
        if self.device.type == "cpu":
            self.kv_block_zeroer = SimpleNamespace(zero_block_ids=self.clear_blocks)
        else:
            super()._init_kv_zero_meta()

    def capture_model(self, **named: Any) -> Any:
        """Capture graphs as vLLM does, the steering operation having been launched before.

        Requests of a warm-up have been served by then, and an operation that is idle while requests
        are served is left out: it would be compiled while a graph is captured.
        """
        if self.steering is not None:
            self.steering.tables.serves = False
        return super().capture_model(**named)

    def finish_requests(self, scheduler_output: Any) -> None:
        """Note which requests end, as vLLM does, in steps without tokens, too."""
        self.end_requests(scheduler_output.finished_req_ids)
        for req_id in scheduler_output.finished_req_ids:
            self.params.pop(req_id, None)
            self.scored.pop(req_id, None)
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: Any) -> None:
        """Record which requests begin, without those that return after a preemption."""
        for request in scheduler_output.scheduled_new_reqs:
            if request.req_id not in self.params:
                self.params[request.req_id] = request.sampling_params
                if wanted := read_extra_args(request.sampling_params).get(SCORE):
                    self.scored[request.req_id] = wanted
                self.begin_request(request)
        super().add_requests(scheduler_output)

    def prepare_inputs(self, *args: Any) -> Any:
        """Prepare a step as vLLM does, then mark its tokens: vLLM calls this once a step."""
        batch = super().prepare_inputs(*args)
        if self.steering is not None:
            self.steering.mark(
                batch.req_ids,
                batch.query_start_loc_np[: batch.num_reqs + 1].astype(np.int64),
                batch.num_computed_tokens_np.astype(np.int64),
            )
        return batch

    def execute_model(self, *args: Any, **named: Any) -> Any:
        """Run a step as vLLM does; with a probe, neither compiled nor as a captured graph."""
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
        """Sample as vLLM does, by our sampler, which is told whose rows these are.

        The tokens of requests whose prefill goes on are drawn too, and vLLM discards them.
        """
        batch, rows = input_batch, input_batch.num_reqs
        prompt_R = self.req_states.prompt_len.np[batch.idx_mapping_np]
        index_R = np.maximum(batch.seq_lens_cpu_upper_bound.numpy()[:rows] - prompt_R, 0)
        self.draws.expect(batch.req_ids, self.params.__getitem__, index_R)
        # Our draw looks at them: what is read of the model is not cut by them.
        self.draws.grammars = grammar_output
        return super().sample(hidden_states, input_batch, None)

    def read_prompts(
        self,
        logits_fn: Any,  # noqa: ARG002
        hidden_states: Tensor,
        input_batch: Any,
        prompt_lens: np.ndarray,
    ) -> dict[str, Tensor]:
        """Read the rows of a step's prompts; return those of requests whose prompt it finished.

        It takes the place of vLLM's function for log-probabilities of given tokens, and its results
        go the same way back.
        """
        batch, parts = input_batch, []
        for place, req_id in enumerate(batch.req_ids if self.scored else ()):
            wanted = self.scored.get(req_id)
            begin = int(batch.num_computed_tokens_np[place])
            prompt_len = int(prompt_lens[batch.idx_mapping_np[place]])
            if wanted is not None and begin < prompt_len:
                end = min(begin + int(batch.num_scheduled_tokens[place]), prompt_len)
                offset = int(batch.query_start_loc_np[place])
                parts.append(PromptPart(req_id, wanted, begin, end, prompt_len, offset))
        self.read_rows(parts, hidden_states, self.params.keys())
        return self.row_reader.take_finished()
