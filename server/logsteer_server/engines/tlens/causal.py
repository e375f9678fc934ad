"""A causal model split into a body, which gives hidden states, and a head, which gives logits.

So only the scored rows go through the head. Axis letters: B sequences, T tokens, R rows,
V vocabulary, D hidden size.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.plan import Cast
from logsteer_server.engines.tlens.overflow import CheckedAttention
from logsteer_server.engines.tlens.parameters import HALF, Parameters
from logsteer_server.engines.tlens.points import (
    BlockEdge,
    HookFunction,
    Point,
    PointMap,
    RefusedJobError,
)
from logsteer_server.engines.weights import choose_eos, limit_context
from logsteer_server.numerics.rows import PUBLIC_COLUMNS

PADDED_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Classes of cache layers whose rows may be padded on the left."""
HEAD_TOLERANCE = 1e-3
"""The largest difference of the parts from the whole model, relative to the largest logit."""


class _GivenBody(nn.Module):
    """A stand-in for a causal model's body that returns hidden states computed before."""

    def __init__(self, output_class: type) -> None:
        super().__init__()
        self._output_class = output_class
        self.hidden_1RD: Tensor | None = None

    @property
    def decoder(self) -> "_GivenBody":
        """Itself: some causal models (OPT's) call a part of their body."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the hidden states in the body's own output class."""
        return self._output_class(last_hidden_state=self.hidden_1RD)


class CausalModel:
    """A causal model of transformers in this program, or one in PEFT's wrapper, used as it is.

    So what the program does to it applies at once: optimizer steps, adapters, hooks, training mode.
    Hooks on its points, resid_pre and resid_post, act in `read`. Parameters have the names of the
    module given. `limit`: the most tokens of a sequence; None: the configuration's.

    Errors: ValueError for a module or tokenizer of another kind; for a model without a list of
    blocks, or with layers whose state cannot be padded; and for one whose forward does more than
    its body and head do, as those of prompt tuning.
    """

    def __init__(self, module: nn.Module, tokenizer: Any, limit: int | None = None) -> None:
        unwrap: Any = getattr(module, "get_base_model", lambda: module)
        causal: Any = unwrap()
        kind = type(causal).__name__
        is_causal = isinstance(causal, PreTrainedModel) and causal.base_model is not causal
        if not is_causal or causal.get_output_embeddings() is None:
            raise ValueError(
                f"{kind} is not a causal language model of transformers, with a body and a head, "
                "with or without PEFT; give the model itself, without what spreads or compiles it "
                "around it"
            )
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            name = type(tokenizer).__name__
            raise ValueError(f"tokenizer: give the model's fast tokenizer, not a {name}")
        self._name = causal.name_or_path or kind
        check_layers(causal.config, self._name)
        self._causal, self._module = causal, module
        self._is_hooked = False
        self._body = causal.base_model
        self._bodies = [self._body]
        # A body that takes no positions finds them in the mask.
        body_takes = inspect.signature(type(self._body).forward).parameters
        self._takes_positions = "position_ids" in body_takes
        self._input_device: torch.device = causal.get_input_embeddings().weight.device
        self.device: torch.device = causal.get_output_embeddings().weight.device
        self.dtype: torch.dtype = causal.dtype
        text = causal.config.get_text_config()
        self.num_layers = int(text.num_hidden_layers)
        self.hidden_size = int(text.hidden_size)
        self.context_length = limit_context(self._name, text, limit)
        self.tokenizer = tokenizer.backend_tokenizer
        self.parameters = Parameters(module)
        edges = [
            BlockEdge(f"blocks.{layer}.hook_{end}", block, enters=end == "in")
            for layer, block in enumerate(find_blocks(causal))
            for end in ("in", "out")
        ]
        self._edges = {edge.name: edge for edge in edges}
        layers: list[dict[str, Point]] = [{} for _ in range(self.num_layers)]
        for order, edge in enumerate(edges):
            name, layer = "resid_pre" if edge.enters else "resid_post", order // 2
            layers[layer][name] = Point(layer, edge.name, edge, (self.hidden_size,), order)
        self.points = PointMap(layers)
        with self.evaluating():
            self._detach_head()
            self.vocab_size = self._compare_head()
        named = [getattr(causal.generation_config, "eos_token_id", None), tokenizer.eos_token_id]
        self.eos_ids = choose_eos(named, self.vocab_size)

    def new_cache(self) -> DynamicCache:
        """Return an empty cache of keys and values."""
        return DynamicCache(config=self._causal.config)

    @contextmanager
    def hooked(self, hooks: Sequence[tuple[Point, HookFunction]]) -> Iterator[None]:
        """Call functions on activations in every `read` of this context."""
        self._is_hooked = bool(hooks)
        with ExitStack() as ending:
            ending.callback(setattr, self, "_is_hooked", False)
            for point, function in hooks:
                ending.callback(self._attach(point, function))
            yield

    def _attach(self, point: Point, function: HookFunction) -> Callable[[], None]:
        """Let a function act on an activation; return what ends that."""
        return self._edges[point.key].attach(function).remove

    @contextmanager
    def embedding_changed(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Change the input embeddings [B, T, D] by a function in every `read` of this context."""
        with ExitStack() as ending:
            for body in self._bodies:
                embedding = body.get_input_embeddings()
                handle = embedding.register_forward_hook(lambda _, __, output: change(output))
                ending.callback(handle.remove)
            yield

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the input embeddings [B, T, D] of tokens."""
        found: Tensor = self._body.get_input_embeddings()(tokens_BT.to(self._input_device))
        return found

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the module into evaluation mode in this context."""
        training = [module for module in self._module.modules() if module.training]
        self._module.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def read(
        self,
        tokens_BT: Tensor,
        mask_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        cache: DynamicCache | None = None,
        cast: Cast | None = None,
    ) -> Tensor:
        """Return the hidden states [B, T, D] that the head is applied to.

        Without a mask, sequences must be padded on the right, which no token attends to. With a
        cache, the tokens follow those in it, and the mask covers both. `cast` is the parameter
        delta's dtype. Errors: RefusedJobError where the model does not compute in it.
        """
        options: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            options["past_key_values"] = cache
        if mask_BT is not None:
            options["attention_mask"] = mask_BT.to(self._input_device)
        if positions_BT is not None and self._takes_positions:
            options["position_ids"] = positions_BT.to(self._input_device)
        body = self._choose_body()
        # Steering by at most `LARGEST_CHANGE` makes no score overflow in float32 or bfloat16.
        is_checked = self.parameters.are_replaced or (
            self._is_hooked and self.dtype == torch.float16
        )
        is_padded = mask_BT is not None and self.dtype == torch.float64
        with CheckedAttention(mask_BT) if is_checked or is_padded else nullcontext():
            output = body(input_ids=tokens_BT.to(self._input_device), **options)
        hidden_BTD: Tensor = output.last_hidden_state.to(self.device)
        if cast and hidden_BTD.dtype in HALF:
            raise RefusedJobError(
                "unsupported_by_engine",
                f"this model's own code computes in {hidden_BTD.dtype} even where its parameters "
                f"are {cast}, and would round what an override's cast is for; leave cast out",
            )
        return hidden_BTD

    def _choose_body(self) -> Any:
        """Return the body to run."""
        return self._body

    def check_tokens(self, tokens: np.ndarray) -> None:
        """Check that these are tokens of the vocabulary. Errors: RefusedJobError."""
        if not len(tokens):
            raise RefusedJobError("invalid_request", "there are no tokens; give at least one")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            detail = f"token ids must lie from 0 to {self.vocab_size - 1}, the vocabulary"
            raise RefusedJobError("invalid_request", detail)

    def check_delta(self, points: Sequence[Point], cast: Cast | None = None) -> None:
        """Check that a parameter delta applies everywhere while these points are hooked.

        Errors: RefusedJobError where it does not, or where the model cannot compute in `cast`.
        """

    def project(self, hidden_RD: Tensor) -> Tensor:
        """Return the logits [R, V] of hidden states, with the model's own scaling and caps."""
        self._given_body.hidden_1RD = hidden_RD[None]
        dummy = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        logits_1RV: Tensor = self._head(input_ids=dummy, use_cache=False).logits
        self._given_body.hidden_1RD = None
        return logits_1RV[0]

    def _detach_head(self) -> None:
        """Make a copy of the causal model, with shared weights and a stand-in body: the head.

        So the architecture's own code scales and caps logits.
        """
        with torch.inference_mode():
            output = self._body(input_ids=self._probe_tokens(2), use_cache=False)
        self._given_body = _GivenBody(type(output))
        self._head = copy.copy(self._causal)
        prefix = self._causal.base_model_prefix
        self._head.__dict__["_modules"] = self._causal._modules | {prefix: self._given_body}
        self._head.__dict__.pop("forward", None)  # accelerate's, which runs the original

    @torch.inference_mode()
    def _compare_head(self) -> int:
        """Return V. Errors: ValueError where the parts and the whole module differ."""
        tokens_BT = self._probe_tokens(4)
        whole_BTV = self._module(input_ids=tokens_BT, use_cache=False).logits
        whole_RV = whole_BTV.flatten(0, 1).to(self.device)
        logits_RV = self.project(self.read(tokens_BT).flatten(0, 1))
        same_shape = logits_RV.shape == whole_RV.shape
        bound = HEAD_TOLERANCE * whole_RV.abs().max()
        if not same_shape or (logits_RV - whole_RV).abs().max() > bound:
            raise ValueError(
                f"{self._name}: its body and its head, applied to single rows, do not give what it "
                "gives as a whole; serve it with vllm"
            )
        return logits_RV.shape[-1]

    def _probe_tokens(self, length: int) -> Tensor:
        return (torch.arange(2 * length, device=self._input_device) % 7 + 1).view(2, length)


def check_layers(config: Any, name: str) -> None:
    """Check that all layers' states can be padded. Errors: ValueError."""
    if not all(type(layer) in PADDED_LAYERS for layer in DynamicCache(config=config).layers):
        raise ValueError(
            f"{name}: has recurrent layers, whose state cannot be padded; serve it with vllm"
        )


def find_blocks(model: Any) -> nn.ModuleList:
    """Return the list of a language model's blocks. Errors: ValueError if it has no such list."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__}: no list of {count} layers to hook; serve it with vllm"
    )


def describe_model(model: CausalModel) -> EngineInfo:
    """Describe a model of this process that no server has."""
    dtype = str(model.dtype).removeprefix("torch.")
    return EngineInfo(
        engine="transformer_lens",
        engine_version=version("transformer-lens"),
        model_path="local",
        tokenizer_path="local",
        weights_digest="",
        dtype=dtype,
        logits_dtype=dtype,
        quantization=None,
        tensor_parallel=1,
        pipeline_parallel=1,
        batch_invariant=False,
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        columns=PUBLIC_COLUMNS,
        eos_ids=model.eos_ids,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        hooks=model.points.names,
        lacks={
            "structure": "the engine transformer_lens forces no form on a reply: leave out "
            "response_format and tool_choice, or serve the model with engine vllm",
            "step_tokens": "the engine transformer_lens reads every text in one step",
        },
    )
