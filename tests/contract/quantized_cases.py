"""What a quantised checkpoint ought to say: its arithmetic in plain PyTorch, by scheme."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import corpus
from tests.conftest import DEMO_MODEL

STORIES = [corpus.story(Random(seed), corpus.MOODS[seed % 2]) for seed in range(12)]
FACTS = [corpus.facts(Random(seed)) for seed in range(12)]
TEXTS = STORIES + FACTS
WORDS = " ".join(TEXTS).split()
# Words in no order, where the model is unsure and quantisation moves its distributions further.
SHUFFLED = [" ".join(Random(seed).sample(WORDS, 80)) for seed in range(8)]

Stored = Mapping[str, Tensor]


class Int8Linear(nn.Module):
    """A linear layer in W8A8: integer products and sums, rescaled in float32."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight = weight.to(torch.int32)
        self.scale = scale[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        token_scale = x.abs().amax(-1, keepdim=True) / 127
        codes = (x / token_scale).round().to(torch.int32)
        sums: Tensor = codes @ self.weight.T
        return sums.to(torch.float32) * token_scale * self.scale


class Float8Linear(nn.Module):
    """A linear layer with weights and activations in float8: products of these, rescaled."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight = weight.float()
        self.scale = scale[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        token_scale = x.abs().amax(-1, keepdim=True) / 448
        codes = (x * token_scale.reciprocal()).to(torch.float8_e4m3fn).float()
        return (codes @ self.weight.T) * token_scale * self.scale


class FloatLinear(nn.Module):
    """A linear layer with its weights turned back into floats and its activations left alone."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def unpack(packed: Tensor) -> Tensor:
    """The eight numbers from 0 to 15 of each int32, the lowest bits first, along the last axis."""
    return (packed[..., None] >> torch.arange(0, 32, 4) & 15).flatten(-2)


def read_w4a16(stored: Stored, path: str) -> Tensor:
    """A layer's weights [N, K]: numbers from -8 to 7 times the scale of their group in a row."""
    codes_NK = unpack(stored[f"{path}.weight_packed"]) - 8
    scale_NG = stored[f"{path}.weight_scale"].half().float()
    return codes_NK * scale_NG.repeat_interleave(codes_NK.shape[1] // scale_NG.shape[1], 1)


def read_awq(stored: Stored, path: str) -> Tensor:
    """A layer's weights [N, K], which lie as [K, N] with columns 0 2 4 6 1 3 5 7 in an int32."""

    def reorder(packed: Tensor) -> Tensor:
        return unpack(packed).unflatten(-1, (-1, 8))[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(-2)

    codes_KN, zeros_GN = (reorder(stored[f"{path}.{name}"]) for name in ("qweight", "qzeros"))
    scale_GN = stored[f"{path}.scales"].float()
    group = len(codes_KN) // len(scale_GN)
    zeros_KN, scale_KN = (t.repeat_interleave(group, 0) for t in (zeros_GN, scale_GN))
    return ((codes_KN - zeros_KN) * scale_KN).T


def read_scaled(stored: Stored, path: str) -> Tensor:
    """A layer's weights [N, K], of codes and a scale for each row."""
    return stored[f"{path}.weight"].float() * stored[f"{path}.weight_scale"]


WEIGHTS: dict[str, Callable[[Stored, str], Tensor]] = {
    "w8a8": read_scaled, "fp8": read_scaled, "w4a16": read_w4a16, "awq": read_awq,
}  # fmt: skip
"""The weights of a layer as floats."""


def make_layer(scheme: str, stored: Stored, path: str) -> nn.Module:
    """A layer that does what the scheme does."""
    kinds = {"w8a8": Int8Linear, "fp8": Float8Linear}
    if scheme in kinds:
        return kinds[scheme](stored[f"{path}.weight"], stored[f"{path}.weight_scale"])
    return make_float_layer(scheme, stored, path)


def make_float_layer(scheme: str, stored: Stored, path: str) -> nn.Module:
    """A layer with the scheme's weights that leaves activations alone."""
    return FloatLinear(WEIGHTS[scheme](stored, path))


class Reference:
    """Teacher forcing in transformers: the demo model, its quantised layers replaced."""

    def __init__(
        self, checkpoint: Path | None = None, make: Callable[..., nn.Module] = make_layer
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
        self.known: dict[str, tuple[Tensor, list[int]]] = {}
        if checkpoint is None:
            return
        stored = load_file(checkpoint / "model.safetensors")
        for path in quantized_layers(stored):
            self.model.set_submodule(path, make(checkpoint.name, stored, path))

    @torch.inference_mode()
    def log_probs(self, text: str) -> tuple[Tensor, list[int]]:
        """Log-probabilities [T, V] of what follows each token, and the tokens that do follow."""
        if text not in self.known:
            ids = self.tokenizer(text)["input_ids"]
            logits_TV: Tensor = self.model(torch.tensor([ids])).logits[0, :-1]
            self.known[text] = logits_TV.log_softmax(-1), ids[1:]
        return self.known[text]

    def scores(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of every token of the texts after its predecessors."""
        rows = [self.log_probs(text) for text in texts]
        return [float(v) for log_p_TV, ids in rows for v in log_p_TV[range(len(ids)), ids]]


def divergences(
    model: Reference, reference: Reference, texts: Sequence[str]
) -> tuple[list[float], list[bool]]:
    """Per token KL(model || reference), and whether both choose the same token."""
    kl, agrees = [], []
    for text in texts:
        p_TV, q_TV = (side.log_probs(text)[0].double() for side in (model, reference))
        kl += (p_TV.exp() * (p_TV - q_TV)).sum(-1).tolist()
        agrees += (p_TV.argmax(-1) == q_TV.argmax(-1)).tolist()
    return kl, agrees


def quantized_layers(stored: Stored) -> list[str]:
    """The names of the layers of a checkpoint that are quantised."""
    scales = [name for name in stored if name.endswith((".weight_scale", ".scales"))]
    return [name.rpartition(".")[0] for name in scales]
