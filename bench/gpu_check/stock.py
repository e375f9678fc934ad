"""Our server and vLLM's own with its own defaults, one after the other on the same weights.

Over HTTP: decode steps, prefill, scored rows, and `vllm bench serve`; ours also with every hook
compiled in and idle. The model is the directory `MODEL`; else one of random weights of the shape
that `SHAPE` names, in the temporary directory (`TMPDIR=/dev/shm` is memory): how fast a step is
does not depend on them.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import Qwen3Config

from bench.gpu_check.report import Cell, Findings, Options, Table
from bench.load_generator import run_load
from bench.models import ID, draw_ids, make_model, read_vocab
from bench.servers import run_logsteer, run_module, run_stock
from bench.stock import describe_stock
from bench.timing import time_call
from logsteer import Client, Steer, Steering
from logsteer_server.contract.engine import HOOKS

USUAL: dict[str, Any] = {
    "vocab": 151_936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    "dtype": torch.bfloat16, "config": Qwen3Config,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "4b": USUAL | {"hidden": 2560, "layers": 36, "intermediate_size": 9728,
                   "num_attention_heads": 32},
    "0.6b": USUAL | {"hidden": 1024, "layers": 28, "intermediate_size": 3072,
                     "num_attention_heads": 16},
    "tiny": {"vocab": 2048, "hidden": 128, "layers": 2, "config": Qwen3Config},
}  # fmt: skip
"""Those of Qwen 3 4B and 0.6B, and one for CPUs."""
DECODED = (1, 32, 256)
PROMPT = 16
ALTERNATIVES = 64
SHARE, CACHE = 0.85, 2**29
"""Of a GPU, for the server; bytes of its cache on a CPU."""
POLICY = {"temperature": 0.8, "top_p": 0.9}
POLICY_COLUMNS = ("logprob", "log_q", "rb_entropy")
STOCK, OURS, IDLE = "stock vLLM", "logsteer", "logsteer, five hooks idle"


def find_model(options: Options) -> Path:
    """Return the directory of the model: the user's, or one drawn here."""
    if given := os.environ.get("MODEL"):
        return Path(given)
    shape = "tiny" if options.quick else os.environ.get("SHAPE", "4b")
    return make_model(options.directory, device=options.device, **SHAPES[shape])


class Work:
    """What a server of one of the names is asked; its prompts are those it has not had before."""

    def __init__(self, url: str, name: str, path: Path, options: Options) -> None:
        self.url, self.path, self.options = url, path, options
        self.model = "stock" if name == STOCK else ID
        self._client = Client(url, timeout=600)
        self._http = httpx.Client(timeout=600)
        self._vocab = read_vocab(path)
        width = json.loads((path / "config.json").read_text())["hidden_size"]
        self._steering = Steering(vectors=[Steer(data={1: [1.0] * width}, scale=0.1, layer=1)])
        self._seeds = itertools.count()

    def _draw(self, count: int, length: int) -> list[list[int]]:
        return draw_ids(next(self._seeds), count, length, self._vocab)

    def complete(self, count: int, length: int, tokens: int, **more: Any) -> None:
        """Have it continue prompts by so many tokens. Errors: RuntimeError for others."""
        body = {"model": self.model, "prompt": self._draw(count, length), "temperature": 0,
                "max_tokens": tokens, "ignore_eos": True}  # fmt: skip
        answer = self._http.post(f"{self.url}/v1/completions", json=body | more)
        if answer.is_error or answer.json()["usage"]["completion_tokens"] != count * tokens:
            raise RuntimeError(f"{self.url}: {answer.status_code}: {answer.text[:500]}")

    def steer(self, count: int, length: int, tokens: int) -> None:
        """Have ours continue prompts by so many tokens, a vector added at each."""
        self._client.steer(
            None, self._steering, prompt_ids=self._draw(count, length), temperature=0,
            max_tokens=tokens, ignore_eos=True,
        )  # fmt: skip

    def score(self, count: int, length: int, **more: Any) -> None:
        """Have ours score all tokens of texts but their first."""
        items = [{"context_ids": ids[:1], "target_ids": [ids[1:]]}
                 for ids in self._draw(count, length)]  # fmt: skip
        self._client.logprob(items, **more)

    def serve(self) -> float:
        """Return the requests a second of `vllm bench serve`."""
        output = self.options.directory / "load.json"
        return float(run_load(self.url, self.path, self.model, output, 0)["request_throughput"])

    def list_all(self, name: str) -> Iterator[tuple[str, int, Callable[[], Any]]]:
        """Yield what it is asked, in order of value, with the tokens of each."""
        tokens, count, length = (8, 4, 64) if self.options.quick else (128, 32, 2048)
        for size in DECODED:
            yield f"decode, {size}", size * tokens, partial(self.complete, size, PROMPT, tokens)
            if name != STOCK:
                steer = partial(self.steer, size, PROMPT, tokens)
                yield f"decode, {size}, steered", size * tokens, steer
        if name == IDLE:
            return
        most = count * length
        yield "prefill, no rows", most, partial(self.complete, count, length, 1)
        few = max(1, count // 16)  # a line of 64 alternatives a token is long
        if name == STOCK:
            echo = partial(self.complete, tokens=1, echo=True)
            part = max(1, count // 4)
            yield "all rows", part * length, partial(echo, part, length, logprobs=0)
            yield "K = 64", few * length, partial(echo, few, length, logprobs=ALTERNATIVES)
        else:
            yield "all rows", most, partial(self.score, count, length, per_token=False)
            columns = {"columns": POLICY_COLUMNS, "policy": POLICY}
            yield "policy columns", most, partial(self.score, count, length, **columns)
            yield "K = 64", few * length, partial(self.score, few, length, top=ALTERNATIVES)
        yield "vllm bench serve", 0, self.serve


def start(name: str, path: Path, options: Options) -> contextlib.AbstractContextManager[str]:
    """Return the URL of a server of the model, which ends with the block."""
    dtype, memory = ("bfloat16", SHARE) if options.on_cuda else ("float32", CACHE)
    if name == STOCK:
        more = ["--max-logprobs", str(ALTERNATIVES)] + ["--enforce-eager"] * (not options.on_cuda)
        return run_stock(path, options.directory, dtype, memory, *more)
    size = SHARE if options.on_cuda else f"{CACHE >> 20}MiB"
    hooks = list(HOOKS) if name == IDLE else ["resid_post"]
    return run_logsteer(
        {ID: path}, options.directory, dtype=dtype, memory=size, compile=options.on_cuda,
        hooks=hooks,
    )  # fmt: skip


def measure(options: Options, found: Findings) -> None:
    """Measure one server after the other; a row is written down as soon as it is there."""
    runs = 1 if options.quick else int(os.environ.get("RUNS", "3"))
    path = find_model(options)
    dtype = "bfloat16" if options.on_cuda else "float32"
    found.notes.append(describe_stock(run_module("stock", path, dtype)))
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        found.notes.append("FlashInfer is missing: both ran with VLLM_USE_FLASHINFER_SAMPLER=0")
    found.add(Table(
        f"{path.name}, {dtype}, {runs} runs of each after one uncounted; tokens a second; of "
        "`vllm bench serve` the requests a second of one run.",
        ["server", "work", "median", "smallest", "largest", "of stock"],
    ))  # fmt: skip
    medians: dict[str, float] = {}
    for name in (STOCK, OURS, IDLE):
        with start(name, path, options) as url:
            work = Work(url, name, path, options)
            for what, amount, call in work.list_all(name):
                try:
                    rates = [amount / time_call(call) for _ in range(runs + 1 if amount else 0)]
                    rates = rates[1:] or [call()]
                except Exception as error:
                    found.failures.append(f"{name}, {what}: {error}")
                    found.save()
                    continue
                median = statistics.median(rates)
                peer = medians.setdefault(what.removesuffix(", steered"), median)
                row: list[Cell] = [name, what, median, min(rates), max(rates), median / peer]
                found.tables[0].rows.append(row)
                found.save()
