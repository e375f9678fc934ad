"""The common base of our model runners, over either of vLLM's runners.

It computes scored rows, marks steered tokens, and samples by policies; `scoring` and `steering`,
which do not import vLLM, do the first two. `runner_v1` and `runner_v2` call it at each step: which
requests end and begin (`end_requests`, `begin_request`); before the forward pass, where the
requests' tokens are (`steering.mark`); whose rows are sampled (`draws.expect`); and the chunks of
prompts with their hidden states (`read_rows`). They collect the finished rows.

Our sampler replaces vLLM's with the one that all engines share. Every request has temperature 0 in
vLLM, which then creates no random generators; its policy and seed are in its extra arguments, and
the values of each token return to the engine as vLLM's log-probabilities do.
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
from logsteer_server.engines.vllm.config import OPTIONS, SteeringSize
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
"""The policy of the dummy rows with which vLLM measures the memory of sampling."""
NO_DRAW = (None, 0, b"", 0)
"""The draw of a request that generates nothing: no spec, seed 0, no prompt, no tokens."""


class StepDraws:
    """Sample each request's next token with its policy, seed and number of tokens so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.req_ids: list[str] = []
        self._row_sampler = _make_sampler([])
        self._histories: dict[str, TokenHistory] = {}
        self._index_R: np.ndarray | None = None
        self.grammars: Any = None
        """vLLM's `GrammarOutput` of a step: the tokens that structured outputs allow."""

    def expect(
        self, req_ids: list[str], params_of: Callable[[str], Any], index_R: np.ndarray
    ) -> None:
        """Set the requests of the next logits' rows, and the number of tokens each has so far."""
        self._index_R = index_R
        if req_ids != self.req_ids:
            self.req_ids = req_ids.copy()
            draws = [read_extra_args(params_of(req_id)).get(DRAW, NO_DRAW) for req_id in req_ids]
            histories = [self._find_history(*each) for each in zip(req_ids, draws, strict=True)]
            self._row_sampler = _make_sampler([draw[:2] for draw in draws], histories)

    def _find_history(self, req_id: str, draw: tuple[Any, ...]) -> TokenHistory | None:
        """Return a request's token history, kept through preemptions; None without adjustments."""
        spec, _, prompt, max_tokens = draw
        if spec is None or spec.policy.adjustments is None:
            return None
        if req_id not in self._histories:
            ids = np.frombuffer(prompt, np.int32)
            self._histories[req_id] = TokenHistory.begin(ids, max_tokens, self._device)
        return self._histories[req_id]

    def end(self, req_ids: Iterable[str]) -> None:
        """Remove requests that have ended."""
        for req_id in req_ids:
            self._histories.pop(req_id, None)

    def draw(self, logits: Tensor) -> Drawn | None:
        """Sample the expected rows, once; return None if none are expected."""
        index_R, self._index_R = self._index_R, None
        grammars, self.grammars = self.grammars, None
        if index_R is None:
            return None
        return self._row_sampler.draw(logits, index_R, self._allowed_tokens(grammars, logits))

    def _allowed_tokens(self, grammars: Any, logits: Tensor) -> Tensor | None:
        """Return which tokens the rows' grammars allow: bool [R, V]; None if no row has one."""
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
    """Return this engine's extra arguments in a request's sampling parameters; {} without any."""
    return (params.extra_args if params else None) or {}


def write_values(drawn: Drawn) -> LogprobsTensors | None:
    """Return the values of sampled tokens in vLLM's form of log-probabilities.

    The values include the ids of alternatives, as exact floats (`numerics.rows`), so that a GPU
    copies one array. The other two arrays are empty and unused, on the same device: vLLM takes the
    device from the first.
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
    """Run a model as vLLM does, and also score rows and steer.

    The worker puts this class before the class of an existing runner, so that the same code serves
    vLLM's GPU and CPU runners. It is never constructed.
    """

    device: torch.device
    row_reader: RowReader
    steering: StepSteering | None
    stream_probe: StreamProbe | PointProbe | None
    draws: StepDraws

    def prepare_scoring(self, bounds: RowBounds) -> None:
        """Set up scoring within memory bounds, and sampling; steering is off so far."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        vocab_size = self.model_config.get_vocab_size()
        self.row_reader = RowReader(bounds, vocab_size, rank, ranks)
        self.draws = StepDraws(self.device)
        self.steering = None
        self.stream_probe = None

    def profile_run(self, randomize_inputs: bool = False) -> None:
        """Measure the memory of a step as vLLM does, with rows computed, too.

        On CPUs, which do not measure memory, only compiled models run it, before anything else.
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
        """Attach the steering operation to the layers, before the model is compiled."""
        layers = self.find_layers()
        like = torch.empty(0, dtype=self.model_config.dtype, device=self.device)
        width = self.model_config.get_hidden_size()
        lags = self.vllm_config.scheduler_config.async_scheduling
        self.steering = StepSteering(size, len(layers), self.max_num_tokens, width, like, lags=lags)
        self.compilation_config.static_forward_context[TABLES] = self.steering.tables
        self._hooks = size.hooks
        self._operations = append_operation(layers, self.steering.tables, size.hooks)

    def _share_operations(self) -> None:
        """Replace the calls for activations that share their tensors with one call.

        An idle call costs a CPU more than its few instructions: between two calls, the layers'
        weights evict its data from the caches.
        """
        if get_pp_group().world_size > 1:
            return  # a dummy run needs all stages
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
        # Part of the key of the cache of compiled models, which contain the calls.
        self.vllm_config.additional_config[OPTIONS]["shared"] = probe.list_groups()

    def find_layers(self) -> list[nn.Module]:
        """Return the model's decoder layers, including placeholders for other pipeline stages."""
        return find_layers(self.model, self.model_config.hf_text_config.num_hidden_layers)

    def load_lora_model(self, model: Any, vllm_config: Any, device: torch.device) -> Any:
        """Return the model with vLLM's LoRA layers, except around embeddings and head.

        A head with a LoRA layer accepts sampled rows only.
        """
        for module in model.modules():
            if hasattr(module, "embedding_modules"):
                module.embedding_modules = {}
        return super().load_lora_model(model, vllm_config, device)

    def clear_blocks(self, block_ids: list[int]) -> None:
        """Zero cache blocks of all attention groups at once, on a CPU."""
        index = torch.tensor(block_ids)
        for group in self.kv_cache_config.kv_cache_groups:
            for name in group.layer_names:
                cache = self.compilation_config.static_forward_context[name].kv_cache
                if isinstance(cache, Tensor):  # those of state space layers are tuples
                    cache.view(CLEARED_AS.get(cache.element_size(), cache.dtype))[index] = 0

    def end_requests(self, req_ids: Iterable[str]) -> None:
        """Remove requests that have ended, before a step that may have no tokens."""
        req_ids = list(req_ids)
        self.draws.end(req_ids)
        if self.steering is not None:
            self.steering.record()
            for req_id in req_ids:
                self.steering.end(req_id)

    def begin_request(self, request: Any) -> None:
        """Add a request that vLLM's scheduler has started."""
        if self.steering is not None:
            extra_args = read_extra_args(request.sampling_params)
            self.steering.begin(request.req_id, extra_args, request.num_computed_tokens)

    def read_rows(
        self, parts: Sequence[PromptPart], hidden_TD: Tensor, known: Collection[str]
    ) -> None:
        """Compute the scored rows of a step's prompt chunks.

        `known`: the requests that have not ended, including preempted ones.
        """
        self.row_reader.begin_step()
        self.row_reader.read(parts, hidden_TD, self.model.compute_logits)
        self.row_reader.keep_only(known)
