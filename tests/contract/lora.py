"""LoRA adapters as PEFT saves them, and a transformers model that one is merged into."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import DEMO_MODEL
from tests.contract.directions import load_model

MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
PREFIX = "base_model.model."


def write_adapter(directory: Path, seed: int = 0, rank: int = 4, **config: Any) -> Path:
    """A directory with a random adapter of the demo model; `config` replaces PEFT's options."""
    torch.manual_seed(seed)
    tensors = {}
    for name, weight in load_model(DEMO_MODEL).state_dict().items():
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] in MODULES:
            tensors[f"{PREFIX}{module}.lora_A.weight"] = 0.1 * torch.randn(rank, weight.shape[1])
            tensors[f"{PREFIX}{module}.lora_B.weight"] = 0.1 * torch.randn(weight.shape[0], rank)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    options = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 6, "bias": "none",
        "target_modules": list(MODULES), "use_rslora": False, "modules_to_save": None,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(options | config))
    return directory


def merge_adapter(model: Any, directory: Path) -> Any:
    """The model with scale * B A added to its weights."""
    tensors = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
                up = tensors[f"{PREFIX}{module}.lora_B.weight"]
                parameters[f"{module}.weight"] += scale * up @ down
    return model
