"""A model of the caller's program, used without a copy or a bridge.

So everything that the program does to it applies at once: optimizer steps, PEFT's adapters,
hooks, training mode.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from logsteer_server.engines.tlens.causal import CausalModel
from logsteer_server.engines.tlens.parameters import Parameters
from logsteer_server.engines.tlens.points import Point, PointMap
from logsteer_server.engines.weights import choose_eos, limit_context


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
        layers: list[dict[str, Point]] = [{} for _ in range(self.num_layers)]
        for order, edge in enumerate(self._edges.values()):
            name = "resid_pre" if edge.enters else "resid_post"
            layer = order // 2
            layers[layer][name] = Point(layer, edge.name, edge, (self.hidden_size,), order)
        return PointMap(layers)

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
