"""Scoring against vLLM's own server, the arithmetic's limit, and the bare engine."""

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx

from bench.models import read_vocab
from bench.stock import ask_choices, describe_stock
from bench.timing import compare_with_first, summarize, time_call
from bench.workplace import Workplace
from logsteer import Client

Item = dict[str, Any]
UNCOUNTED = 8
"""Runs before those that count: each fills a part of the cache that no page was given to yet."""
CONTEXTS, CONTEXTS_ON_STOCK, TARGETS = 32, 16, 4
OVERHEAD_SEED = 10_000
"""The first seed: no row that shares the server may find the contexts of another cached."""


def make_choices(
    vocab: int,
    contexts: int = 32,
    length: int = 400,
    targets: int = 4,
    size: int = 6,
    seed: int = 0,
) -> list[Item]:
    """Contexts of `length` random tokens, each with `targets` targets of `size` tokens."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(10, vocab) for _ in range(count)]

    return [
        {"context_ids": ids(length), "target_ids": [ids(size) for _ in range(targets)]}
        for _ in range(contexts)
    ]


def score_on_stock(url: str, items: Sequence[Item], concurrency: int = 8) -> list[float]:
    """Each target's log-probability from vLLM's own server, as evaluation harnesses ask it."""
    pairs = [(item["context_ids"], target) for item in items for target in item["target_ids"]]

    def ask(pair: tuple[list[int], list[int]]) -> float:
        context, target = pair
        body = {
            "model": "stock", "prompt": context + target, "max_tokens": 1, "temperature": 0,
            "echo": True, "logprobs": 0,
        }  # fmt: skip
        answer = client.post(f"{url}/v1/completions", json=body)
        answer.raise_for_status()
        values = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
        return float(sum(values[len(context) : -1]))

    with httpx.Client(timeout=600) as client, ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, pairs))


def compare_choices(place: Workplace, runs: int) -> dict[str, Any]:
    """Contexts of 400 tokens with 4 targets of 6, through HTTP; fresh contexts in every run.

    The stock server, which takes an order of magnitude longer, has fewer of them.
    """
    path = place.find_model()
    vocab = read_vocab(path)
    seeds = itertools.count()
    with (
        place.serve_stock(path) as stock,
        Client(place.share(), timeout=600) as client,
    ):
        items = make_choices(vocab, contexts=4, seed=99_999)
        scored = client.logprob(items, per_token=False)
        values = [target.logprob or 0 for result in scored.results for target in result.targets]
        difference = max(
            abs(a - b) for a, b in zip(values, score_on_stock(stock, items), strict=True)
        )
        seconds: dict[str, list[float]] = {"logsteer": [], "stock vLLM server": []}
        for run in range(runs + 1):
            ours = make_choices(vocab, CONTEXTS, seed=next(seeds))
            theirs = make_choices(vocab, CONTEXTS_ON_STOCK, seed=next(seeds))
            own = time_call(partial(client.logprob, ours, per_token=False))
            other = time_call(partial(score_on_stock, stock, theirs))
            if run:
                seconds["logsteer"].append(own / CONTEXTS)
                seconds["stock vLLM server"].append(other / CONTEXTS_ON_STOCK)
    result = summarize(seconds, TARGETS, "pairs") | {"ratios": compare_with_first(seconds)}
    result["notes"] = [f"{CONTEXTS} contexts a run; {CONTEXTS_ON_STOCK} on the stock server"]
    result["notes"].append(describe_stock(ask_choices(path, place.settings["dtype"])))
    return result | {"largest_difference_nats": float(f"{difference:.2g}")}


def compare_full_text(place: Workplace, runs: int) -> dict[str, Any]:
    """Texts scored in full by the engine, against plain prefill plus the head's bare product."""
    output = subprocess.run(
        _run_engine(place, "full_text", runs), capture_output=True, text=True, check=True
    ).stdout
    result: dict[str, Any] = json.loads(_find(output.splitlines(), "result "))
    return result


def _run_engine(place: Workplace, part: str, runs: int) -> list[str]:
    """The command of `bench/engine.py`."""
    settings = json.dumps(place.settings)
    return [
        sys.executable,
        "-m",
        "bench.engine",
        part,
        str(place.find_model()),
        str(runs),
        settings,
    ]


def _find(lines: Iterable[str], mark: str) -> str:
    """What stands behind the mark in the first line that begins with it; vLLM prints, too."""
    return next(line.removeprefix(mark) for line in lines if line.startswith(mark))


def compare_with_own_engine(place: Workplace, runs: int) -> dict[str, Any]:
    """The service over HTTP against its own engine, called in a process without HTTP."""
    vocab = read_vocab(place.find_model())
    seconds: dict[str, list[float]] = {"logsteer over HTTP": [], "its engine in-process": []}
    with (
        Client(place.share(), timeout=600) as client,
        subprocess.Popen(
            _run_engine(place, "seeds", 0), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as engine,
    ):
        assert engine.stdin is not None
        assert engine.stdout is not None
        for run in range(runs + UNCOUNTED):
            seed = OVERHEAD_SEED + run
            engine.stdin.write(f"{seed}\n")
            engine.stdin.flush()
            own = float(_find(engine.stdout, "seconds "))
            items = make_choices(vocab, 64, 200, 1, 20, seed=seed)
            taken = time_call(partial(client.logprob, items, per_token=False))
            if run >= UNCOUNTED:
                seconds["logsteer over HTTP"].append(taken)
                seconds["its engine in-process"].append(own)
        engine.stdin.close()
    return summarize(seconds, 64, "pairs") | {"ratios": compare_with_first(seconds)}
