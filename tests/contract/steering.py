"""A plain transformers model with forward hooks: what steering is compared with."""

import math
from collections.abc import Callable, Sequence
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


class HookedReference:
    """A model in transformers, float32, whose block outputs a function may change."""

    def __init__(self, path: Path) -> None:
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
        count = self.model.config.num_hidden_layers
        lists = [m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList)]
        self.layers = next(modules for modules in lists if len(modules) == count)

    def logprobs(
        self,
        context: Sequence[int],
        target: Sequence[int],
        change: Callable[[Tensor], Tensor] | None = None,
        positions: Any = "all",
        layer: int = LAYER,
    ) -> np.ndarray:
        """log p of each target token."""
        ids = [*context, *target]
        mask = choose_tokens(positions, len(ids), len(context))

        def hook(_module: object, _args: object, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            changed = hidden.clone()
            if change is not None:
                changed[:, mask] = change(hidden[:, mask])
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        handle = self.layers[layer].register_forward_hook(hook)
        try:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0]
        finally:
            handle.remove()
        rows = logits[len(context) - 1 : -1].log_softmax(-1)
        found: np.ndarray = rows[torch.arange(len(target)), torch.tensor(target)].numpy()
        return found

    def activations(self, ids: Sequence[int]) -> np.ndarray:
        """What each layer puts out, [L, T, D]."""
        found: list[Tensor] = []

        def keep(_module: object, _args: object, output: Any) -> None:
            found.append((output[0] if isinstance(output, tuple) else output)[0])

        handles = [layer.register_forward_hook(keep) for layer in self.layers]
        try:
            with torch.no_grad():
                self.model(torch.tensor([ids]))
        finally:
            for handle in handles:
                handle.remove()
        outputs: np.ndarray = torch.stack(found).numpy()
        return outputs
