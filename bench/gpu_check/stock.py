"""Our server against vLLM's own with its own defaults, over HTTP: decode steps and prefill.

The model is that in `MODEL`, else one of 8 billion random weights: how fast a step is does not
depend on them.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.bars import COLUMNS, list_figures
from bench.gpu_check.report import Findings, Options, Table
from bench.models import ID, draw_ids, make_model, read_vocab
from bench.servers import run_logsteer, run_module, run_stock
from bench.stock import describe_stock
from bench.timing import summarize, time_in_turn
from logsteer import Client, Steer, Steering

SHAPE: dict[str, Any] = {
    "vocab": 128_256, "hidden": 4096, "layers": 32, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "dtype": torch.bfloat16,
}  # fmt: skip
"""That of Llama 3 8B."""
QUICK_SHAPE: dict[str, Any] = {"vocab": 2048, "hidden": 128, "layers": 2}
DECODED = (1, 32, 256)
PROMPT = 16
SHARE, CACHE = 0.45, 2**29
"""Of a GPU for each of the two servers; bytes of cache of each on a CPU."""
POLICY = {"temperature": 0.8, "top_p": 0.9}
POLICY_COLUMNS = ("logprob", "log_q", "rb_entropy")
OURS, STEERED, STOCK = "logsteer", "logsteer, steered", "stock vLLM"


def find_model(options: Options) -> Path:
    """Return the directory of the model: the user's, or one drawn here."""
    if given := os.environ.get("MODEL"):
        return Path(given)
    shape = QUICK_SHAPE if options.quick else SHAPE
    return make_model(options.directory, device=options.device, **shape)


class Peers:
    """Both servers of a model, and prompts that neither has had before."""

    def __init__(self, ours: str, stock: str, path: Path) -> None:
        self.client = Client(ours, timeout=600)
        self._names = {ours: ID, stock: "stock"}
        self.ours, self.stock = ours, stock
        self._vocab = read_vocab(path)
        width = json.loads((path / "config.json").read_text())["hidden_size"]
        self._vector = Steer(data={1: [1.0] * width}, scale=0.1, layer=1)
        self._seeds = itertools.count()
        self._http = httpx.Client(timeout=600)

    def _draw(self, count: int, length: int) -> list[list[int]]:
        return draw_ids(next(self._seeds), count, length, self._vocab)

    def complete(self, url: str, count: int, length: int, tokens: int, **more: Any) -> None:
        """Have a server continue prompts by so many tokens. Errors: RuntimeError for others."""
        body = {"model": self._names[url], "prompt": self._draw(count, length), "temperature": 0,
                "max_tokens": tokens, "ignore_eos": True}  # fmt: skip
        answer = self._http.post(f"{url}/v1/completions", json=body | more)
        if answer.is_error or answer.json()["usage"]["completion_tokens"] != count * tokens:
            raise RuntimeError(f"{url}: {answer.status_code}: {answer.text[:500]}")

    def steer(self, count: int, length: int, tokens: int) -> None:
        """Have ours continue prompts by so many tokens, a vector added at each."""
        self.client.steer(
            None,
            Steering(vectors=[self._vector]),
            prompt_ids=self._draw(count, length),
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
        )

    def score(self, count: int, length: int, **more: Any) -> None:
        """Score all tokens of texts but their first."""
        items = [{"context_ids": ids[:1], "target_ids": [ids[1:]]}
                 for ids in self._draw(count, length)]  # fmt: skip
        self.client.logprob(items, **more)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        self._http.close()


@contextlib.contextmanager
def serve(options: Options, found: Findings) -> Iterator[Peers]:
    """Both servers with the same model, dtype and memory; note what stock vLLM has chosen."""
    path = find_model(options)
    dtype, memory = ("bfloat16", SHARE) if options.on_cuda else ("float32", CACHE)
    size = SHARE if options.on_cuda else f"{CACHE >> 20}MiB"
    found.notes.append(describe_stock(run_module("stock", path, dtype)))
    with (
        run_stock(path, options.directory, dtype, memory) as stock,
        run_logsteer({ID: path}, options.directory, dtype=dtype, memory=size) as ours,
        contextlib.closing(Peers(ours, stock, path)) as peers,
    ):
        yield peers


def add_table(
    found: Findings,
    caption: str,
    ways: Mapping[str, Callable[[], object]],
    amount: int,
    pairs: list[tuple[str, str]],
    runs: int,
) -> None:
    """Time the ways in turn, and write down tokens per second, and how much faster one is."""
    result = summarize(time_in_turn(dict(ways), runs), amount, "tokens", pairs)
    found.add(Table(caption, COLUMNS, list_figures(result)))


def measure_decode(peers: Peers, found: Findings, quick: bool, runs: int) -> None:
    """Generate with 1, 32 and 256 sequences at once; a table after each."""
    tokens = 8 if quick else 128
    for count in DECODED:
        ways = {
            OURS: partial(peers.complete, peers.ours, count, PROMPT, tokens),
            STEERED: partial(peers.steer, count, PROMPT, tokens),
            STOCK: partial(peers.complete, peers.stock, count, PROMPT, tokens),
        }
        caption = f"Decode, {count} sequences of {PROMPT} tokens, {tokens} generated."
        pairs = [(OURS, STOCK), (STEERED, OURS)]
        add_table(found, caption, ways, count * tokens, pairs, runs)


def measure_prefill(peers: Peers, found: Findings, quick: bool, runs: int) -> None:
    """Read texts: for one token, for all rows, and for all rows as a policy sees them."""
    count, length = (4, 64) if quick else (32, 2048)
    none = partial(peers.complete, count=count, length=length, tokens=1)
    rows = partial(peers.score, count, length)
    alone, plain, all_ = f"{STOCK}, no rows", f"{OURS}, no rows", f"{OURS}, all rows"
    policy, echo = f"{OURS}, all rows, policy columns", f"{STOCK}, all rows by echo"
    ways = {
        alone: partial(none, peers.stock),
        plain: partial(none, peers.ours),
        all_: partial(rows, per_token=False),
        policy: partial(rows, columns=POLICY_COLUMNS, policy=POLICY),
        echo: partial(none, peers.stock, echo=True, logprobs=0),
    }
    caption = f"Prefill, {count} texts of {length} tokens."
    pairs = [(plain, alone), (all_, alone), (policy, alone), (all_, echo)]
    add_table(found, caption, ways, count * length, pairs, runs)


def measure(options: Options, found: Findings) -> None:
    """Measure both, with the same two servers."""
    runs = 1 if options.quick else 5
    with serve(options, found) as peers:
        measure_decode(peers, found, options.quick, runs)
        measure_prefill(peers, found, options.quick, runs)
