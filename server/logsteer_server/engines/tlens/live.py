"""A model that lives in the caller's program, used as it is: no copy of it, and no bridge.

So what the program does to it holds here at once: steps of an optimizer, adapters that PEFT
switches on and off, hooks of its own, its training mode.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.parameters import Parameters
from logsteer_server.engines.tlens.placement import find_blocks
from logsteer_server.engines.tlens.points import HookFunction, Point, PointMap
from logsteer_server.engines.weights import choose_eos, limit_context


@dataclass(frozen=True, slots=True)
class BlockEdge:
    """The residual stream where it enters or leaves a block."""

    name: str
    block: nn.Module
    enters: bool

    def attach(self, function: HookFunction) -> RemovableHandle:
        """Let a function act on it until the handle is removed."""
        if self.enters:
            change = partial(self._change_input, function)
            return self.block.register_forward_pre_hook(change, with_kwargs=True)
        return self.block.register_forward_hook(partial(self._change_output, function))

    def _change_input(
        self, function: HookFunction, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._apply(function, args[0]), *args[1:]), options
        changed = self._apply(function, options["hidden_states"])
        return args, options | {"hidden_states": changed}

    def _change_output(self, function: HookFunction, _: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._apply(function, output[0]), *output[1:])
        return self._apply(function, output)

    def _apply(self, function: HookFunction, stream: Tensor) -> Tensor:
        changed = function(stream, hook=self)
        return stream if changed is None else changed


class LiveModel(CausalModel):
    """A causal model of transformers in this program, or one in PEFT's wrapper.

    Its points are resid_pre and resid_post. Parameters have the names of the module given. Errors:
    ValueError for a module or tokenizer of another kind, and for one whose forward does more than
    its body and head do, as those of prompt tuning.
    """

    def __init__(self, module: nn.Module, tokenizer: Any) -> None:
        unwrap: Any = getattr(module, "get_base_model", lambda: module)
        causal = unwrap()
        name = type(causal).__name__
        if not isinstance(causal, PreTrainedModel) or causal.get_output_embeddings() is None:
            raise ValueError(
                f"{name} is not a causal language model of transformers, with or without PEFT; "
                "give the model itself, without what spreads or compiles it around it"
            )
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            kind = type(tokenizer).__name__
            raise ValueError(f"tokenizer: give the model's fast tokenizer, not a {kind}")
        super().__init__(causal, name)
        self._module = module
        self.tokenizer = tokenizer.backend_tokenizer
        self.context_length = limit_context(name, causal.config.get_text_config(), None)
        self.parameters = Parameters(module)
        self.points = self._find_points()
        with self.evaluating():
            head = copy.copy(causal)
            head.__dict__["_modules"] = dict(causal._modules)
            head.__dict__.pop("forward", None)  # accelerate's, which runs the original
            self._detach_head(head)
            self.vocab_size = self._compare_head(module)
        named = [getattr(causal.generation_config, "eos_token_id", None), tokenizer.eos_token_id]
        self.eos_ids = choose_eos(named, self.vocab_size)

    def _find_points(self) -> PointMap:
        layers = []
        for layer, block in enumerate(find_blocks(self._causal)[1]):
            points = {}
            for place, (name, end) in enumerate((("resid_pre", "in"), ("resid_post", "out"))):
                key = f"blocks.{layer}.hook_{end}"
                edge = BlockEdge(key, block, enters=end == "in")
                points[name] = Point(layer, key, edge, (self.hidden_size,), 2 * layer + place)
            layers.append(points)
        return PointMap(layers)

    @contextmanager
    def _attach(self, hooks: Sequence[tuple[Point, HookFunction]]) -> Iterator[None]:
        handles: list[RemovableHandle] = []
        try:
            for point, function in hooks:
                handles.append(point.hook.attach(function))
            yield
        finally:
            for handle in handles:
                handle.remove()

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
