"""Models to measure with: the demo, and random Llamas of a chosen size with its tokenizer; work of
any engine, called where its jobs are made; and the workplace, which rows share.
"""

import contextlib
import json
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from bench.servers import run_logsteer, run_stock
from logsteer_server.contract.engine import Engine
from logsteer_server.contract.jobs import GenerateJob, Job, Policy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))
import corpus as corpus

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
    device: str = "cpu",
    config: type[PreTrainedConfig] = LlamaConfig,
    **shape: Any,
) -> Path:
    """A checkpoint with random weights of a fixed seed; by default 18 million of them.

    Its vocabulary is larger than its tokenizer's, so it is measured with token ids. `sharpness`
    multiplies its logits: 10 makes their distributions about as peaked as a trained model's.
    `shape` is of its configuration in place of what stands here; the weights are drawn on `device`.
    """
    path = directory / f"{config.model_type}-{vocab}-{hidden}-{layers}-{sharpness:g}"
    if path.is_dir():
        return path
    torch.manual_seed(0)
    heads = hidden // 64
    usual: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": 64, "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(**usual | shape))
    torch.nn.init.constant_(model.model.norm.weight, sharpness)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, path / name)
    return path


def read_vocab(path: Path) -> int:
    """The vocabulary size of a checkpoint."""
    return int(json.loads((path / "config.json").read_text())["vocab_size"])


def run_jobs(engine: Engine, jobs: Sequence[Job]) -> list[Any]:
    """Return the result of each job, run together. Errors: RuntimeError where one fails."""
    engine.add(list(enumerate(jobs)))
    found: dict[int, Any] = {}
    while engine.busy:
        found |= dict(engine.step())
    if failed := [result for result in found.values() if result.failed]:
        raise RuntimeError(str(failed[0]))
    return [found[index] for index in range(len(jobs))]


def generate(engine: Engine, jobs: Sequence[GenerateJob]) -> list[list[int]]:
    """Return the tokens of each job. Errors: RuntimeError where one fails."""
    return [result.token_ids.tolist() for result in run_jobs(engine, jobs)]


def draw_ids(seed: int, count: int, length: int, vocab: int) -> list[list[int]]:
    """Return sequences of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(10, vocab) for _ in range(length)] for _ in range(count)]


ID = "model"
"""The id of the model in a server of ours."""
MEMORY = 8 * 2**30 if DEVICE == "cuda" else 2**30
"""Bytes of cached keys and values of a server: several with weights of their own run at once."""


@dataclass
class Workplace:
    """A directory for files, and the model: the user's, or one that is made.

    `dtype` is never `auto`, which vLLM takes as half precision for a checkpoint of float32. `stack`
    ends what rows share.
    """

    directory: Path
    stack: contextlib.ExitStack
    given: Path | None = None
    dtype: str = "float32"
    _shared: list[str] = field(default_factory=list)

    def find_model(self, **shape: Any) -> Path:
        """Return the user's checkpoint, else one of 18 M random weights or of the shape given."""
        return self.given or make_model(self.directory, **shape)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of an engine of ours, under the names of `EngineSpec` and of the configuration.

        All others are its defaults, as a user has them.
        """
        return {"dtype": self.dtype, "memory": f"{MEMORY >> 30}GiB"}

    def serve(
        self, path: Path, engine: str = "vllm", **settings: Any
    ) -> contextlib.AbstractContextManager[str]:
        """Return the URL of a new server of ours, which ends with the block."""
        own = self.settings if engine == "vllm" else {"dtype": self.settings["dtype"]}
        return run_logsteer({ID: path}, self.directory, engine, **(own | settings))

    def serve_stock(self, path: Path) -> contextlib.AbstractContextManager[str]:
        """Return the URL of vLLM's own server, which ends with the block: with its own defaults,
        but for dtype, cores and memory, which are those of ours.
        """
        return run_stock(path, self.directory, self.settings["dtype"], MEMORY)

    def share(self) -> str:
        """Return the URL of a server of the model, which is started once for all rows."""
        if not self._shared:
            self._shared.append(self.stack.enter_context(self.serve(self.find_model())))
        return self._shared[0]

    def stop_shared(self) -> None:
        """End the server that rows share, which would take from a row that it has no part in."""
        self.stack.close()
        self._shared.clear()

    def describe(self) -> dict[str, Any]:
        """Return what of this belongs beside a result."""
        found = {"device": DEVICE}
        if self.given is not None:
            found |= {"model": self.given.name, "dtype": self.dtype}
        return found
