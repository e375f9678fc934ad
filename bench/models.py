"""Models to measure with: the demo, and random Llamas of a chosen size with its tokenizer."""

import json
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo" / "model"


def make_model(directory: Path, *, vocab: int = 26_552, hidden: int = 384, layers: int = 4) -> Path:
    """A checkpoint with random weights of a fixed seed; by default 18 million of them.

    Its vocabulary is larger than its tokenizer's, so it is measured with token ids.
    """
    path = directory / f"llama-{vocab}-{hidden}-{layers}"
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
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, path / name)
    return path


def read_vocab(path: Path) -> int:
    """The vocabulary size of a checkpoint."""
    return int(json.loads((path / "config.json").read_text())["vocab_size"])
