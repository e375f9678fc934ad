"""A plain transformers model with forward hooks: what steering is compared with."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

WIDTH = 128
LAYER = 2
_DRAW = np.random.default_rng(11)
VECTOR = (_DRAW.normal(size=WIDTH) * 0.3).astype(np.float32)
V = torch.tensor(VECTOR)
U = V / V.norm()
DATA = {"data": {str(LAYER): VECTOR.tolist()}}

POSITIONS: list[Any] = ["all", "prompt", "completion", "predicting", "last_prompt",
                        {"slices": [[0, 2], [5, 9]]}, {"last": 3}, {"every": 3}]  # fmt: skip


def _along(x: Tensor, u: Tensor = U) -> Tensor:
    return (x @ u)[..., None]


def turn(x: Tensor, degrees: float, u: Tensor = U) -> Tensor:
    """x turned toward u by an angle that does not reach it."""
    norm = x.norm(dim=-1, keepdim=True)
    across = x - _along(x, u) * u
    angle = torch.acos(_along(x, u) / norm) - math.radians(degrees)
    return norm * (angle.cos() * u + angle.sin() * across / across.norm(dim=-1, keepdim=True))


OPERATIONS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "add": ({"scale": 1.5}, lambda x: x + 1.5 * V),
    "add unit": ({"scale": 2.0, "unit": "unit"}, lambda x: x + 2 * U),
    "add residual_norm": (
        {"scale": 0.2, "unit": "residual_norm"}, lambda x: x + 0.2 * x.norm(dim=-1)[..., None] * U,
    ),
    "ablate": ({"op": "ablate"}, lambda x: x - _along(x) * U),
    "project": ({"op": "project", "scale": 2.0}, lambda x: x + (2 - _along(x)) * U),
    "clamp": (
        {"op": "clamp", "params": {"min": 0.5, "max": 1.0}},
        lambda x: x + (_along(x).clamp(0.5, 1.0) - _along(x)) * U,
    ),
    "replace": ({"op": "replace", "scale": 2.0}, lambda x: (2 * V).expand_as(x)),
    "rotate": ({"op": "rotate", "scale": 20.0}, lambda x: turn(x, 20)),
}  # fmt: skip


def choose_tokens(positions: Any, num_tokens: int, prompt: int) -> Tensor:
    """Which of a sequence's tokens are steered."""
    every, last = (
        positions.get(name) if isinstance(positions, dict) else None for name in ("every", "last")
    )
    chosen = {
        "all": lambda n: True,
        "prompt": lambda n: n < prompt,
        "completion": lambda n: n >= prompt,
        "predicting": lambda n: n >= prompt - 1,
        "last_prompt": lambda n: n == prompt - 1,
        "last": lambda n: prompt - last <= n < prompt,
        "every": lambda n: n >= prompt and (n - prompt) % every == 0,
        "slices": lambda n: any(start <= n < end for start, end in positions["slices"]),
    }[positions if isinstance(positions, str) else next(iter(positions))]
    return torch.tensor([bool(chosen(n)) for n in range(num_tokens)])


OUTPUTS = {
    "attn_out": ("self_attn", "attn", "self_attention", "attention"),
    "mlp_out": ("mlp", "block_sparse_moe", "fc2"),
}
"""What puts out what is added to the stream, by the names of most families in transformers."""
OWN_OUTPUTS = {
    "bloom": ("self_attention.dense", "mlp.dense_4h_to_h"),
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma3_text": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
"""Likewise by type of model: where the module itself adds the stream, or a norm follows it."""


class Handles(list[Any]):
    """Hooks that are removed together."""

    def remove(self) -> None:
        """Remove them."""
        for handle in self:
            handle.remove()


class HookedReference:
    """A model in transformers, float32 unless said, whose activations a function may change.

    What a block adds to the stream is attn_out and mlp_out, as it is added; resid_mid is resid_pre
    and attn_out together.
    """

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
        count = self.model.config.num_hidden_layers
        lists = [m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList)]
        self.layers = next(modules for modules in lists if len(modules) == count)

    def _find_module(self, layer: int, hook: str) -> torch.nn.Module:
        """What puts an activation out."""
        block, config = self.layers[layer], self.model.config
        if hook == "resid_post":
            return block
        if own := OWN_OUTPUTS.get(config.model_type):
            return block.get_submodule(own[hook == "mlp_out"])
        children = dict(block.named_children())
        return next(children[name] for name in OUTPUTS[hook] if name in children)

    def _attach(self, layer: int, hook: str, act: Callable[[Tensor], Tensor | None]) -> Any:
        """Have `act` be called with an activation [1, T, D], and put what it returns there."""
        block = self.layers[layer]
        if hook == "resid_pre":

            def before(_module: object, args: Any, kwargs: Any) -> Any:
                given = args[0] if args else kwargs["hidden_states"]
                changed = act(given)
                changed = given if changed is None else changed
                kept = {k: v for k, v in kwargs.items() if k != "hidden_states"}
                return (changed, *args[1:]), kept

            return block.register_forward_pre_hook(before, with_kwargs=True)
        module = self._find_module(layer, "attn_out" if hook == "resid_mid" else hook)
        factor = 1.0
        if hook != "resid_post":
            factor = getattr(self.model.config, "residual_multiplier", 1.0)
        entered: list[Tensor] = []
        handles = []
        if hook == "resid_mid":
            handles.append(self._attach(layer, "resid_pre", lambda x: entered.append(x.clone())))

        def after(_module: object, _args: object, output: Any) -> Any:
            own = output[0] if isinstance(output, tuple) else output
            base = entered.pop() if entered else torch.zeros(())
            found = base + factor * own.reshape(1, -1, own.shape[-1])
            changed = act(found)
            if changed is None:
                return None
            put = ((changed - base) / factor).reshape(own.shape)
            return (put, *output[1:]) if isinstance(output, tuple) else put

        handles.append(module.register_forward_hook(after))
        return Handles(handles)

    def logprobs(
        self,
        context: Sequence[int],
        target: Sequence[int],
        change: Callable[[Tensor], Tensor] | None = None,
        positions: Any = "all",
        layer: int | None = LAYER,
        hook: str = "resid_post",
    ) -> np.ndarray:
        """log p of each target token; layer None is every layer."""
        rows = self.logits(context, target, change, positions, layer, hook).log_softmax(-1)
        return rows[torch.arange(len(target)), torch.tensor(target)].numpy()

    def logits(
        self,
        context: Sequence[int],
        target: Sequence[int],
        change: Callable[[Tensor], Tensor] | None = None,
        positions: Any = "all",
        layer: int | None = LAYER,
        hook: str = "resid_post",
    ) -> Tensor:
        """The logits [T, V] that precede each target token; layer None is every layer."""
        ids = [*context, *target]
        mask = choose_tokens(positions, len(ids), len(context))

        def act(x: Tensor) -> Tensor:
            changed = x.clone()
            if change is not None:
                changed[:, mask] = change(x[:, mask])
            return changed

        layers = range(len(self.layers)) if layer is None else [layer]
        handle = Handles(self._attach(one, hook, act) for one in layers)
        try:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0]
        finally:
            handle.remove()
        return logits[len(context) - 1 : -1]

    def activations(
        self,
        ids: Sequence[int],
        hook: str = "resid_post",
        change: Callable[[Tensor], Tensor] | None = None,
        changed_at: int = LAYER,
    ) -> np.ndarray:
        """An activation of each layer, [L, T, D]; `change` acts at one of them."""
        found: list[Tensor] = []

        def act(layer: int, x: Tensor) -> Tensor:
            changed = x if change is None or layer != changed_at else change(x)
            found.append(changed[0].clone())
            return changed

        handles = [
            self._attach(layer, hook, partial(act, layer)) for layer in range(len(self.layers))
        ]
        try:
            with torch.no_grad():
                self.model(torch.tensor([ids]))
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack(found).numpy()
