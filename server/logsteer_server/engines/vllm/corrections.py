"""Where vLLM computes something else than the model's own code, and what is computed instead.

Each was found by comparing a random checkpoint of the family with transformers; `tests/families`
goes on comparing.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.bloom import BloomMLP

Rotate = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def correct_model(model: nn.Module) -> None:
    """Correct the modules of a model before it is compiled.

    * Bloom was trained with the approximation of GELU by a hyperbolic tangent; with GELU itself
      log-probabilities are off by 2e-3 nats.
    * The rotary embedding of the CPU takes [T, H, D] for tokens of one head each: DeepSeek's latent
      attention is off by 10 nats.
    """
    for module in model.modules():
        if isinstance(module, BloomMLP):
            module.gelu_impl = nn.GELU(approximate="tanh")
        if isinstance(module, RotaryEmbedding) and module._forward_method == module.forward_cpu:
            module._forward_method = partial(_rotate_heads, module.forward_cpu)


def widen_head(model: nn.Module) -> None:
    """Have a GPU add the head's products up in float32, and keep its logits so.

    In half precision logits are rounded by up to 0.09 nats. `torch.mm` takes the weights as they
    are, so that this costs no memory of theirs. A quantised head stays as it is.
    """
    heads = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    plain = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    if all(isinstance(head.quant_method, plain) for head in heads):
        for module in model.modules():
            if isinstance(module, LogitsProcessor):
                module.head_dtype = torch.float32


def find_logits_dtype(model: nn.Module, dtype: torch.dtype) -> str:
    """Return what a model of a dtype computes its head in."""
    heads = (module for module in model.modules() if isinstance(module, LogitsProcessor))
    found = next((head.head_dtype for head in heads), None)
    return str(found or dtype).removeprefix("torch.")


def _rotate_heads(
    rotate: Rotate, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotate query and key in place, as `rotate` does for [T, H * D], which it expects."""
    flat = [None if part is None else part.flatten(1).contiguous() for part in (query, key)]
    assert flat[0] is not None
    rotate(positions, flat[0], flat[1])
    for part, rotated in zip((query, key), flat, strict=True):
        if part is not None and rotated is not None and rotated.data_ptr() != part.data_ptr():
            part.copy_(rotated.view(part.shape))
    return query, key
