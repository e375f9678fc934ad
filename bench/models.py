"""Models to measure with: the demo, and random Llamas of a chosen size with its tokenizer."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo" / "model"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where peers run, as our engines do by default."""


def make_model(
    directory: Path,
    *,
    vocab: int = 26_552,
    hidden: int = 384,
    layers: int = 4,
    sharpness: float = 1.0,
) -> Path:
    """A checkpoint with random weights of a fixed seed; by default 18 million of them.

    Its vocabulary is larger than its tokenizer's, so it is measured with token ids. `sharpness`
    multiplies its logits: 10 makes their distributions about as peaked as a trained model's.
    """
    path = directory / f"llama-{vocab}-{hidden}-{layers}-{sharpness:g}"
    if path.is_dir():
        return path
    torch.manual_seed(0)
    heads = hidden // 64
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.constant_(model.model.norm.weight, sharpness)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, path / name)
    return path


def make_adapter(path: Path, directory: Path, seed: int, rank: int = 8) -> Path:
    """A LoRA adapter of a checkpoint's attention, of random small numbers, as PEFT saves one."""
    torch.manual_seed(seed)
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    tensors = {}
    for name, weight in load_file(path / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = 0.01 * torch.randn(rank, weight.shape[1])
            tensors[f"{key}.lora_B.weight"] = 0.01 * torch.randn(weight.shape[0], rank)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(modules)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def read_vocab(path: Path) -> int:
    """The vocabulary size of a checkpoint."""
    return int(json.loads((path / "config.json").read_text())["vocab_size"])
