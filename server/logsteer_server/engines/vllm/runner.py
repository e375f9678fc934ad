"""What our model runners have in common, whichever of vLLM's runners they stand in front of.

They read scored rows, mark steered tokens, and draw by policies. What is read and marked is free of
vLLM (`scoring`, `steering`). A runner has to tell: of each step which requests end and begin
(`end_requests`, `begin_request`), in front of the forward pass where the requests' tokens lie
(`steering.mark`), whose rows are drawn (`draws.expect`), and the parts of prompts with their hidden
states (`read_rows`); and it takes finished rows back. `runner_v1` and `runner_v2` do so.

Our sampler replaces vLLM's by the draw that all engines share. Every request asks vLLM for
temperature 0, so that it makes no generators; what the request is drawn by stands in its extra
arguments, and what is read with a token travels the way of vLLM's own log-probabilities.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.forward_context import get_forward_context
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from logsteer_server.contract.jobs import Policy
from logsteer_server.engines.vllm.config import SteeringSize
from logsteer_server.engines.vllm.extra_args import DRAW
from logsteer_server.engines.vllm.operation import (
    TABLES,
    append_operation,
    find_layers,
    find_places,
)
from logsteer_server.engines.vllm.points import PointProbe, SharingProbe
from logsteer_server.engines.vllm.scoring import PromptPart, RowReader
from logsteer_server.engines.vllm.steering import StepSteering
from logsteer_server.engines.vllm.stream import StreamProbe
from logsteer_server.numerics.adjustments import TokenHistory
from logsteer_server.numerics.drawing import Drawn, RowSampler, unpack_bits
from logsteer_server.numerics.hidden_rows import RowBounds
from logsteer_server.numerics.rows import PUBLIC_COLUMNS, RowSpec

WARM_UP = RowSpec(PUBLIC_COLUMNS, 1, Policy(top_p=0.9), (0,))
"""The policy of dummy rows, by which vLLM measures the memory of sampling."""
NO_DRAW = (None, 0, b"", 0)
"""How a request is drawn that generates nothing."""


class StepDraws:
    """Draw each request's token by its own policy, seed, and the number of its tokens so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.req_ids: list[str] = []
        self._row_sampler = _make_sampler([])
        self._histories: dict[str, TokenHistory] = {}
        self._index_R: np.ndarray | None = None
        self.grammars: Any = None
        """vLLM's `GrammarOutput` of a step: the tokens that requests of a given form may have."""

    def expect(
        self, req_ids: list[str], params_of: Callable[[str], Any], index_R: np.ndarray
    ) -> None:
        """Say which requests the rows of the next logits are, and how many tokens each has."""
        self._index_R = index_R
        if req_ids != self.req_ids:
            self.req_ids = req_ids.copy()
            draws = [read_extra_args(params_of(req_id)).get(DRAW, NO_DRAW) for req_id in req_ids]
            histories = [self._find_history(*each) for each in zip(req_ids, draws, strict=True)]
            self._row_sampler = _make_sampler([draw[:2] for draw in draws], histories)

    def _find_history(self, req_id: str, draw: tuple[Any, ...]) -> TokenHistory | None:
        """Return what a request whose policy has adjustments has drawn, preempted or not."""
        spec, _, prompt, max_tokens = draw
        if spec is None or spec.policy.adjustments is None:
            return None
        if req_id not in self._histories:
            ids = np.frombuffer(prompt, np.int32)
            self._histories[req_id] = TokenHistory.begin(ids, max_tokens, self._device)
        return self._histories[req_id]

    def end(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for req_id in req_ids:
            self._histories.pop(req_id, None)

    def draw(self, logits: Tensor) -> Drawn | None:
        """Return the expected rows' draw once; None if none were expected."""
        index_R, self._index_R = self._index_R, None
        grammars, self.grammars = self.grammars, None
        if index_R is None:
            return None
        return self._row_sampler.draw(logits, index_R, self._find_allowed(grammars, logits))

    def _find_allowed(self, grammars: Any, logits: Tensor) -> Tensor | None:
        if grammars is None:
            return None
        rows = {req_id: row for row, req_id in enumerate(self.req_ids)}
        pairs = enumerate(grammars.structured_output_request_ids)
        places = [(rows[req_id], place) for place, req_id in pairs if req_id in rows]
        if not places:
            return None
        own, words = zip(*places, strict=True)
        masks = np.ascontiguousarray(grammars.grammar_bitmask[list(words)])
        allowed_RV = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
        allowed_RV[list(own)] = unpack_bits(
            torch.from_numpy(masks).to(logits.device), logits.shape[-1]
        )
        return allowed_RV


def warm_up(logits: Tensor) -> Drawn:
    """Sample dummy rows."""
    rows = len(logits)
    return _make_sampler([(WARM_UP, 0)] * rows).draw(logits, np.zeros(rows))


def _make_sampler(
    draws: Sequence[tuple[RowSpec | None, int]], histories: Sequence[TokenHistory | None] = ()
) -> RowSampler:
    specs, seeds = [spec for spec, _ in draws], [seed for _, seed in draws]
    return RowSampler(specs, seeds, Sampler.greedy_sample, histories)


def read_extra_args(params: Any) -> dict[str, Any]:
    """Return what this engine has put into a request's sampling parameters, if there are any."""
    return (params.extra_args if params else None) or {}


def write_values(drawn: Drawn) -> LogprobsTensors | None:
    """Return what was read with drawn tokens, as vLLM takes log-probabilities.

    Ids of alternatives are among the values, where they are exact (`numerics.rows`), so that one
    array is copied from a GPU. The two others, which nobody reads, are empty, on the same device:
    vLLM asks the first one for it.
    """
    if not drawn.values_RW.shape[-1]:
        return None
    none_R0 = drawn.ids_R.new_empty((len(drawn.ids_R), 0))
    return LogprobsTensors(none_R0, drawn.values_RW, none_R0)


def _skip_compiled(_module: nn.Module, _args: Any) -> None:
    get_forward_context().skip_compiled = True


CLEARED_AS = {1: torch.int8}
"""A dtype to view a cache in, by the size of its numbers: torch does not fill float8."""


class LogsteerRunner(LoRAModelRunnerMixin):  # type: ignore[misc]
    """Run a model as vLLM does, and read rows and steer beside it.

    It is never constructed: the worker gives an existing runner this class in front of its own, so
    the same code serves vLLM's GPU and CPU runners.
    """

    device: torch.device
    row_reader: RowReader
    steering: StepSteering | None
    stream_probe: StreamProbe | PointProbe | None
    draws: StepDraws

    def prepare_scoring(self, bounds: RowBounds) -> None:
        """Make ready to read rows within bounds of what that takes at once."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        vocab_size = self.model_config.get_vocab_size()
        self.row_reader = RowReader(bounds, vocab_size, rank, ranks)
        self.draws = StepDraws(self.device)
        self.steering = None
        self.stream_probe = None

    def profile_run(self, randomize_inputs: bool = False) -> None:
        """Run as vLLM does to see how much memory a step takes, and read rows, too.

        Not on CPUs, where nobody looks at it. There compiled models run it first of all.
        """
        if self.device.type == "cpu" and self.steering is not None and len(self._hooks) > 1:
            self._share_operations()
        super().profile_run(randomize_inputs)
        if self.device.type != "cpu" and get_pp_group().is_last_rank:
            shape = (self.max_num_tokens, self.model_config.get_hidden_size())
            hidden_TD = torch.zeros(shape, dtype=self.model_config.dtype, device=self.device)
            self.row_reader.read_costliest(hidden_TD, self.model.compute_logits)
            self._sync_device()

    def prepare_steering(self, size: SteeringSize) -> None:
        """Put the steering operation at the layers' activations, before the model is compiled."""
        layers = self.find_layers()
        like = torch.empty(0, dtype=self.model_config.dtype, device=self.device)
        width = self.model_config.get_hidden_size()
        lags = self.vllm_config.scheduler_config.async_scheduling
        self.steering = StepSteering(size, len(layers), self.max_num_tokens, width, like, lags=lags)
        self.compilation_config.static_forward_context[TABLES] = self.steering.tables
        self._hooks = size.hooks
        self._operations = append_operation(layers, self.steering.tables, size.hooks)

    def _share_operations(self) -> None:
        """Have one call of the operation steer activations that lie in the same tensors.

        A call that has nothing to do costs a CPU more than its few instructions: what it touches
        has left the caches since the last one, while weights went through them.
        """
        if get_pp_group().world_size > 1:
            return  # other stages would have to take part
        layers = self.find_layers()
        probe = SharingProbe(find_places(layers, self._hooks))
        skip = self.model.register_forward_pre_hook(_skip_compiled)
        with probe.attached():
            self._dummy_run(1)
        skip.remove()
        for handle in self._operations:
            handle.remove()
        assert self.steering is not None
        self._operations = append_operation(layers, self.steering.tables, self._hooks, probe)

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

    def clear_blocks(self, block_ids: list[int]) -> None:
        """Clear blocks of every kind of attention on a CPU, all at once."""
        index = torch.tensor(block_ids)
        for group in self.kv_cache_config.kv_cache_groups:
            for name in group.layer_names:
                cache = self.compilation_config.static_forward_context[name].kv_cache
                if isinstance(cache, Tensor):  # those of state space layers are tuples
                    cache.view(CLEARED_AS.get(cache.element_size(), cache.dtype))[index] = 0

    def end_requests(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have ended, before a step that may have no tokens."""
        req_ids = list(req_ids)
        self.draws.end(req_ids)
        if self.steering is not None:
            self.steering.record()
            for req_id in req_ids:
                self.steering.end(req_id)

    def begin_request(self, request: Any) -> None:
        """Begin with a request that vLLM's scheduler has started."""
        if self.steering is not None:
            extra_args = read_extra_args(request.sampling_params)
            self.steering.begin(request.req_id, extra_args, request.num_computed_tokens)

    def read_rows(
        self, parts: Sequence[PromptPart], hidden_TD: Tensor, known: Collection[str]
    ) -> None:
        """Read the rows of parts of prompts in a step.

        `known`: the requests that have not ended, preempted ones included.
        """
        self.row_reader.begin_step()
        self.row_reader.read(parts, hidden_TD, self.model.compute_logits)
        self.row_reader.keep_only(known)
