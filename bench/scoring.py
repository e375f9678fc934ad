"""Scoring against vLLM's own server, the arithmetic's limit, and the bare engine."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from logsteer import Client
from models import make_model, read_vocab
from servers import run_logsteer, run_stock
from timing import summarize, time_in_turn

Item = dict[str, Any]
ENGINE = Path(__file__).with_name("engine.py")
UNCOUNTED = 8
"""Runs before those that count: each fills a part of the cache that no page was given to yet."""


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


def count_pairs(items: Sequence[Item]) -> int:
    """Targets in all."""
    return sum(len(item["target_ids"]) for item in items)


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


def compare_choices(directory: Path, runs: int) -> dict[str, Any]:
    """32 contexts of 400 tokens with 4 targets of 6, through HTTP; fresh contexts in every run."""
    path = make_model(directory)
    vocab = read_vocab(path)
    seeds = iter(range(10_000))
    difference = 0.0
    with (
        run_logsteer({"model": path}, directory) as ours,
        run_stock(path, directory) as stock,
        Client(ours, timeout=600) as client,
    ):
        items = make_choices(vocab, contexts=4, seed=99)
        scored = client.logprob(items, per_token=False)
        values = [target.logprob or 0 for result in scored.results for target in result.targets]
        difference = max(
            abs(a - b) for a, b in zip(values, score_on_stock(stock, items), strict=True)
        )

        def ask_ours() -> None:
            client.logprob(make_choices(vocab, seed=next(seeds)), per_token=False)

        def ask_stock() -> None:
            score_on_stock(stock, make_choices(vocab, seed=next(seeds)))

        seconds = time_in_turn({"logsteer": ask_ours, "stock vLLM server": ask_stock}, runs)
    result = summarize(seconds, 128, "pairs")
    result["largest_difference_nats"] = float(f"{difference:.2g}")
    return result


def compare_full_text(directory: Path, runs: int) -> dict[str, Any]:
    """Texts scored in full by the engine, against plain prefill plus the head's bare product."""
    command = [sys.executable, str(ENGINE), "full_text", str(make_model(directory)), str(runs)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(_find(output.splitlines(), "result "))
    return result


def _find(lines: Iterable[str], mark: str) -> str:
    """What stands behind the mark in the first line that begins with it; vLLM prints, too."""
    return next(line.removeprefix(mark) for line in lines if line.startswith(mark))


def compare_with_own_engine(directory: Path, runs: int) -> dict[str, Any]:
    """The service over HTTP against its own engine, called in a process without HTTP."""
    path = make_model(directory)
    vocab = read_vocab(path)
    seconds: dict[str, list[float]] = {"logsteer over HTTP": [], "its engine in-process": []}
    command = [sys.executable, str(ENGINE), "seeds", str(path), "0"]
    with (
        run_logsteer({"model": path}, directory) as url,
        Client(url, timeout=600) as client,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as engine,
    ):
        assert engine.stdin is not None
        assert engine.stdout is not None
        for seed in range(runs + UNCOUNTED):
            engine.stdin.write(f"{seed}\n")
            engine.stdin.flush()
            own = float(_find(engine.stdout, "seconds "))
            items = make_choices(vocab, 64, 200, 1, 20, seed=seed)
            started = time.perf_counter()
            client.logprob(items, per_token=False)
            if seed >= UNCOUNTED:
                seconds["logsteer over HTTP"].append(time.perf_counter() - started)
                seconds["its engine in-process"].append(own)
        engine.stdin.close()
    return summarize(seconds, 64, "pairs")


def measure_growth(directory: Path, runs: int) -> dict[str, Any]:
    """Pairs a second as contexts, targets and callers grow, on the 18 M model."""
    path = make_model(directory)
    vocab = read_vocab(path)
    seeds = iter(range(20_000, 90_000))
    found: dict[str, dict[str, Any]] = {}
    with run_logsteer({"model": path}, directory) as url, Client(url, timeout=600) as client:

        def ask(shape: dict[str, int]) -> None:
            client.logprob(make_choices(vocab, seed=next(seeds), **shape), per_token=False)

        def measure(name: str, shape: dict[str, int], callers: int = 1) -> None:
            def work() -> None:
                with ThreadPoolExecutor(callers) as pool:
                    list(pool.map(ask, [shape] * callers))

            pairs = callers * shape["contexts"] * shape["targets"]
            seconds = time_in_turn({name: work}, max(3, runs - 2))
            found[name] = summarize(seconds, pairs, "pairs")["ways"][name]

        for length in (50, 100, 200, 400, 800):
            measure(
                f"context of {length} tokens, 4 targets",
                {"contexts": 8, "length": length, "targets": 4, "size": 6},
            )
        for targets in (1, 2, 4, 8, 16):
            measure(
                f"{targets} targets, context of 400 tokens",
                {"contexts": 8, "length": 400, "targets": targets, "size": 6},
            )
        for callers in (1, 2, 4, 8, 16):
            measure(
                f"{callers} callers, 4 contexts of 100 tokens each",
                {"contexts": 4, "length": 100, "targets": 4, "size": 6},
                callers,
            )
    return {"ways": found}
