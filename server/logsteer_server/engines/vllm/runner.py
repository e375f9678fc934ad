"""vLLM's V1 model runner, which also reads scored rows, marks steered tokens and draws by policies.

What is read and marked is free of vLLM (`scoring`, `steering`). A runner has to tell them: of each
step the parts of prompts and their hidden states (`RowReader.read`), the way back for finished
rows, which requests begin and end (`StepSteering.begin`, `end`), and in front of each forward pass
where the requests' tokens lie (`mark`); and the sampler, whose rows it gets (`expect`). Another
runner of vLLM's takes another module like this.

Our sampler replaces vLLM's by the draw that all engines share. Every request asks vLLM for
temperature 0, so that it makes no generators; what the request is drawn by stands in its extra
arguments, and what is read with a token travels the way of vLLM's own log-probabilities.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.forward_context import get_forward_context
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput, SamplerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from logsteer_server.contract.jobs import Policy
from logsteer_server.engines.vllm import staging
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import DRAW, SCORE
from logsteer_server.engines.vllm.operation import TABLES, append_operation, find_layers
from logsteer_server.engines.vllm.scoring import PromptPart, RowReader
from logsteer_server.engines.vllm.steering import StepSteering
from logsteer_server.engines.vllm.stream import StreamProbe
from logsteer_server.numerics.drawing import Drawn, RowSampler
from logsteer_server.numerics.hidden_rows import RowBounds
from logsteer_server.numerics.rows import PUBLIC_COLUMNS, RowSpec

WARM_UP = RowSpec(PUBLIC_COLUMNS, 1, Policy(top_p=0.9), (0,))
"""What rows of no request are drawn by, from which vLLM learns how much memory drawing takes."""


class PolicySampler(Sampler):  # type: ignore[misc]
    """Draw each request's token by its own policy, seed, and the number of its tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self._req_ids: list[str] = []
        self._row_sampler = self._make([])
        self._index_R: np.ndarray | None = None
        self._finite_R: staging.Arriving | None = None

    def expect(self, req_ids: list[str], requests: Mapping[str, Any], index_R: np.ndarray) -> None:
        """Say which requests the rows of the next logits are, and how many tokens each has."""
        self._index_R = index_R
        if req_ids != self._req_ids:
            self._req_ids = req_ids.copy()
            draws = [_read_draw(requests[req_id].sampling_params) for req_id in req_ids]
            self._row_sampler = self._make(draws)

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,  # noqa: ARG002
        predict_bonus_token: bool = False,  # noqa: ARG002
        logprobs_mode_override: Any = None,  # noqa: ARG002
    ) -> SamplerOutput:
        """Return the token of each row, and what its request wants read with it."""
        index_R, self._index_R = self._index_R, None
        if index_R is not None:
            drawn = self._row_sampler.draw(logits, index_R)
            # It reaches the host in front of the tokens themselves, which vLLM waits for.
            self._finite_R = staging.Arriving(drawn.finite_R)
            return _write_output(drawn)
        rows = len(logits)
        return _write_output(self._make([(WARM_UP, 0)] * rows).draw(logits, np.zeros(rows)))

    def take_non_finite(self) -> dict[str, int]:
        """Return the requests of the rows just drawn whose logits are not finite, as keys."""
        arriving, self._finite_R = self._finite_R, None
        if arriving is None or (finite_R := arriving.read()).all():
            return {}
        pairs = zip(self._req_ids, finite_R.tolist(), strict=True)
        return {req_id: 1 for req_id, is_finite in pairs if not is_finite}

    def _make(self, draws: Sequence[tuple[RowSpec | None, int]]) -> RowSampler:
        specs, seeds = [spec for spec, _ in draws], [seed for _, seed in draws]
        return RowSampler(specs, seeds, self.greedy_sample)


def _read_draw(params: Any) -> tuple[RowSpec | None, int]:
    """Return what a request's tokens are drawn by, and its seed; None where none is wanted."""
    spec, seed = (params.extra_args or {}).get(DRAW, (None, 0))
    return spec, seed


def _write_output(drawn: Drawn) -> SamplerOutput:
    """Return what vLLM takes of a sampler.

    Ids of alternatives are among the values, where they are exact (`numerics.rows`), so that one
    array is copied from a GPU. The two others, which nobody reads, are empty, on the same device:
    vLLM asks the first one for it.
    """
    values = None
    if drawn.values_RW.shape[-1]:
        none_R0 = drawn.ids_R.new_empty((len(drawn.ids_R), 0))
        values = LogprobsTensors(none_R0, drawn.values_RW, none_R0)
    return SamplerOutput(drawn.ids_R.to(torch.int32)[:, None], values)


CLEARED_AS = {1: torch.int8}
"""By the bytes of a number, what a cache is seen as: torch fills no float8."""


class LogsteerRunner(GPUModelRunner):  # type: ignore[misc]
    """Run a model as vLLM does, and read rows and steer beside it.

    It is never constructed: the worker gives an existing runner this class in front of its own, so
    the same code serves vLLM's GPU and CPU runners.
    """

    row_reader: RowReader
    steering: StepSteering | None
    stream_probe: StreamProbe | None

    def prepare_scoring(self, bounds: RowBounds) -> None:
        """Make ready to read rows within bounds of what that takes at once."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        vocab_size = self.model_config.get_vocab_size()
        self.row_reader = RowReader(bounds, vocab_size, rank, ranks)
        self.steering = None
        self.stream_probe = None

    def profile_run(self, randomize_inputs: bool = False) -> None:
        """Run as vLLM does to see how much memory a step takes, and read rows, too.

        Not on CPUs, where nobody looks at it.
        """
        super().profile_run(randomize_inputs)
        if self.device.type != "cpu" and get_pp_group().is_last_rank:
            shape = (self.max_num_tokens, self.model_config.get_hidden_size())
            hidden_TD = torch.zeros(shape, dtype=self.model_config.dtype, device=self.device)
            self.row_reader.read_costliest(hidden_TD, self.model.compute_logits)
            self._sync_device()

    def prepare_sampling(self) -> None:
        """Put our sampler in the place of vLLM's."""
        self.sampler = PolicySampler()

    def prepare_steering(self, size: SteeringSize) -> None:
        """Put the steering operation behind the layers of the model, before it is compiled."""
        layers = self.find_layers()
        like = torch.empty(0, dtype=self.model_config.dtype, device=self.device)
        width = self.model_config.get_hidden_size()
        self.steering = StepSteering(size, len(layers), self.max_num_tokens, width, like)
        self.compilation_config.static_forward_context[TABLES] = self.steering.tables
        append_operation(layers, self.steering.tables)

    def find_layers(self) -> list[nn.Module]:
        """Return the decoder layers of the model, those of other pipeline stages included."""
        return find_layers(self.model, self.model_config.hf_text_config.num_hidden_layers)

    def load_lora_model(self, model: Any, vllm_config: Any, device: torch.device) -> Any:
        """Return the model with vLLM's LoRA layers, but none around embeddings and head.

        A head with one takes the rows that are sampled from and no others.
        """
        for module in model.modules():
            if hasattr(module, "embedding_modules"):
                module.embedding_modules = {}
        return super().load_lora_model(model, vllm_config, device)

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Clear blocks as vLLM does; on CPUs those of every kind of attention, all at once."""
        if self.device.type != "cpu":
            super()._zero_block_ids(block_ids)
            return
        index = torch.tensor(block_ids)
        for group in self.kv_cache_config.kv_cache_groups:
            for name in group.layer_names:
                cache = self.compilation_config.static_forward_context[name].kv_cache
                if isinstance(cache, Tensor):  # those of state space layers are tuples
                    cache.view(CLEARED_AS.get(cache.element_size(), cache.dtype))[index] = 0

    def _update_states(self, scheduler_output: Any) -> Any:
        """Note which requests end and begin, as vLLM does, in steps without tokens, too."""
        if self.steering is not None:
            self.steering.record()
            for req_id in scheduler_output.finished_req_ids:
                self.steering.end(req_id)
            for request in scheduler_output.scheduled_new_reqs:
                params = request.sampling_params
                extra_args = params.extra_args if params and params.extra_args else {}
                self.steering.begin(request.req_id, extra_args, request.num_computed_tokens)
        return super()._update_states(scheduler_output)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Prepare a step as vLLM does, then mark its tokens: vLLM calls this once a step."""
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
        """Run the model as vLLM does; with a probe, neither compiled nor as a captured graph."""
        if self.stream_probe is None:
            return super()._model_forward(*args, **inputs)
        context = get_forward_context()
        context.skip_compiled, context.cudagraph_runtime_mode = True, CUDAGraphMode.NONE
        with self.stream_probe.attached():
            return super()._model_forward(*args, **inputs)

    def _get_prompt_logprobs_dict(
        self, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        """Read rows, too: vLLM calls this on the last stage before the step's requests advance."""
        self.row_reader.begin_step()
        parts = self._find_parts(num_scheduled_tokens)
        self.row_reader.read(parts, hidden_states, self.model.compute_logits)
        self.row_reader.keep_only(self.requests.keys())
        prompt_logprobs: dict[str, Any] = super()._get_prompt_logprobs_dict(
            hidden_states, num_scheduled_tokens
        )
        return prompt_logprobs

    def _find_parts(self, num_scheduled_tokens: dict[str, int]) -> list[PromptPart]:
        """Return the parts of prompts in a step, of requests that are scored."""
        parts = []
        for req_id, num_tokens in num_scheduled_tokens.items():
            request = self.requests[req_id]
            extra_args = request.sampling_params and request.sampling_params.extra_args
            if not extra_args or SCORE not in extra_args:
                continue
            begin, prompt_len = request.num_computed_tokens, request.num_prompt_tokens
            if begin >= prompt_len:
                continue
            end = min(begin + num_tokens, prompt_len)
            offset = int(self.query_start_loc.np[self.input_batch.req_id_to_index[req_id]])
            parts.append(PromptPart(req_id, extra_args[SCORE], begin, end, prompt_len, offset))
        return parts

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Return vLLM's output of the step, with the rows of requests whose prompt it finished."""
        self.row_reader.begin_step()
        output = super().sample_tokens(grammar_output)
        if finished := self.row_reader.take_finished():
            if not isinstance(output, ModelRunnerOutput):
                raise TypeError(f"rows need synchronous scheduling, got {type(output).__name__}")
            output.prompt_token_id_logprobs_dict = finished
        if isinstance(output, ModelRunnerOutput):
            output.num_nans_in_logits = self.sampler.take_non_finite()
        return output

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        """Sample as vLLM does, by our sampler, which is told whose rows these are.

        The tokens of requests whose prefill goes on are drawn too, and vLLM discards them.
        """
        batch = self.input_batch
        rows = batch.num_reqs
        index_R = batch.num_tokens_no_spec[:rows] - batch.num_prompt_tokens[:rows]
        self.sampler.expect(batch.req_ids, self.requests, index_R)
        return super()._sample(logits, spec_decode_metadata)
