"""Models to measure with: the demo, and random Llamas of a chosen size with its tokenizer; and
generation by any engine, called where its jobs are made.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from logsteer_server.contract.engine import Engine
from logsteer_server.contract.jobs import GenerateJob, GenerateOutput, Policy

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo" / "model"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where peers run, as our engines do by default."""
GREEDY = Policy(temperature=0.0)


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


def read_vocab(path: Path) -> int:
    """The vocabulary size of a checkpoint."""
    return int(json.loads((path / "config.json").read_text())["vocab_size"])


def generate(engine: Engine, jobs: Sequence[GenerateJob]) -> list[list[int]]:
    """Return the tokens of each job. Errors: RuntimeError where one fails."""
    engine.add(list(enumerate(jobs)))
    tokens: dict[int, list[int]] = {}
    while engine.busy:
        for index, result in engine.step():
            if not isinstance(result, GenerateOutput):
                raise RuntimeError(str(result))
            tokens[index] = result.token_ids.tolist()
    return [tokens[index] for index in range(len(jobs))]
