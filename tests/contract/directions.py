"""Directions of the parameters, and what transformers says with parameters changed by hand."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from logsteer_server.contract.plan import Cast, Direction, Override
from tests.conftest import DEMO_MODEL

Tensors = Mapping[str, Tensor]


def load_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in transformers, with the attention that our TransformerLens engine uses."""
    attention = "sdpa" if dtype.itemsize == 2 else "eager"  # in half precision it matters
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def save_model(config: Any, path: Path) -> Path:
    """A model of this configuration with random parameters and the demo's tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, path)
    return path


def draw_direction(model: Any, seed: int = 0, size: float = 1.0) -> dict[str, Tensor]:
    """A float32 direction over every parameter, each tensor `size` times as long as its own."""
    torch.manual_seed(seed)
    found = {}
    for name, parameter in model.named_parameters():
        v = torch.randn(parameter.shape)
        found[name] = v * (size * parameter.float().norm() / v.norm())
    return found


def follow_gradient(model: Any, ids: np.ndarray, size: float = 1.0) -> dict[str, Tensor]:
    """The gradient of log p of every token but the first, `size` times as long as theta."""
    model.requires_grad_(True)
    ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
    rows = model(ids_1T[:, :-1]).logits[0].log_softmax(-1)
    rows.gather(-1, ids_1T[0, 1:, None]).sum().backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.requires_grad_(False)
    ratio = _measure(dict(model.named_parameters())) / _measure(gradient)
    return {name: (size * ratio * g).float() for name, g in gradient.items()}


def _measure(tensors: Tensors) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors.values()) ** 0.5)


def write_direction(directory: Path, tensors: Tensors) -> Direction:
    """The direction as a file that an engine reads."""
    file = directory / "direction.safetensors"
    save_file(dict(tensors), file)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    return Direction(str(file.rename(directory / f"{sha256}.safetensors")), sha256)


def move(model: Any, direction: Tensors, eta: float) -> None:
    """Add eta v to a model's own parameters."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, v in direction.items():
            parameters[name].copy_(parameters[name].double() + eta * v.double())


def moved_model(path: Path, direction: Tensors, eta: float, dtype: Any = torch.float32) -> Any:
    """A model of its own with the parameters theta + eta v."""
    model = load_model(path, dtype)
    move(model, direction, eta)
    return model


def read_rows(model: Any, ids: np.ndarray) -> np.ndarray:
    """log p [T - 1, V] of what follows each token but the last, in the model's own precision."""
    with torch.no_grad():
        logits_TV = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
    return logits_TV.log_softmax(-1).numpy()


def read_logprobs(model: Any, ids: np.ndarray) -> np.ndarray:
    """log p of every token but the first, in the model's own precision."""
    return np.take_along_axis(read_rows(model, ids), ids[1:, None].astype(np.int64), -1)[:, 0]


def at(direction: Direction, eta: float, cast: Cast | None = None) -> Override:
    """The override by eta along a direction."""
    return Override(direction, eta, cast)
