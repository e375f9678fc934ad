"""Our server against vLLM's own with its own defaults, over HTTP: decode steps, or prefill.

The model is that in `MODEL`, else one of 8 billion weights that vLLM draws by itself, on both
sides: how fast a step is does not depend on them.
"""

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.bars import COLUMNS, list_figures
from bench.gpu_check.report import Findings, Options, Table
from bench.models import DEMO, ID, draw_ids, read_vocab
from bench.servers import run_logsteer, run_stock
from bench.stock import ask_choices, describe_stock
from bench.timing import summarize, time_in_turn
from logsteer import Client

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QUICK_SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 2048,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
DECODED = (1, 32, 256)
PROMPT = 16
SHARE, CACHE = 0.45, 2**29
"""Of a GPU for each of the two servers; bytes of cache of each on a CPU."""
POLICY = {"temperature": 0.8, "top_p": 0.9}
POLICY_COLUMNS = ("logprob", "log_q", "rb_entropy")
OURS, STOCK = "logsteer", "stock vLLM"


def find_model(options: Options) -> tuple[Path, dict[str, str]]:
    """Return the model's directory, and vLLM's arguments where its weights are drawn."""
    if given := os.environ.get("MODEL"):
        return Path(given), {}
    path = options.directory / "model"
    path.mkdir()
    shape = SHAPE | (QUICK_SHAPE if options.quick else {})
    (path / "config.json").write_text(json.dumps(shape))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path / name)
    return path, {"load_format": "dummy"}


class Peers:
    """Both servers of a model, and prompts that neither has had before."""

    def __init__(self, ours: str, stock: str, vocab: int) -> None:
        self.client = Client(ours, timeout=600)
        self._names = {ours: ID, stock: "stock"}
        self.ours, self.stock = ours, stock
        self._vocab = vocab
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
    path, drawn = find_model(options)
    dtype, memory = ("bfloat16", SHARE) if options.on_cuda else ("float32", CACHE)
    size = SHARE if options.on_cuda else f"{CACHE >> 20}MiB"
    arguments = ["--load-format", drawn["load_format"]] if drawn else []
    found.notes.append(describe_stock(ask_choices(path, dtype)))
    models = {ID: path}
    with (
        run_stock(path, options.directory, dtype, memory, *arguments) as stock,
        run_logsteer(
            models, options.directory, dtype=dtype, memory=size, engine_args=drawn
        ) as ours,
        contextlib.closing(Peers(ours, stock, read_vocab(path))) as peers,
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
            name: partial(peers.complete, url, count, PROMPT, tokens)
            for name, url in ((OURS, peers.ours), (STOCK, peers.stock))
        }
        caption = f"Decode, {count} sequences of {PROMPT} tokens, {tokens} generated."
        add_table(found, caption, ways, count * tokens, [(OURS, STOCK)], runs)


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


MEASURES = {"decode": measure_decode, "prefill": measure_prefill}


def measure(options: Options, found: Findings) -> None:
    """Measure the case that is asked for."""
    with serve(options, found) as peers:
        MEASURES[options.case](peers, found, options.quick, 1 if options.quick else 5)
