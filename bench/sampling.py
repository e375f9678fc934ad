"""What diagnostics cost a generation, and what LoRA adapters cost a score."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logsteer import Client
from models import make_adapter, make_model, read_vocab
from servers import run_logsteer
from timing import compare, join_results, summarize, time_in_turn

PROMPTS, PROMPT, SAMPLES, GENERATED = 16, 32, 2, 64
ITEMS, CONTEXT, TARGET = 32, 200, 20
POLICY: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
ADAPTERS = 4


def compare_diagnostics(directory: Path, runs: int) -> dict[str, Any]:
    """32 sampled continuations of 64 tokens on each engine, by what is told of them."""
    found = {}
    for engine in ("vllm", "transformer_lens"):
        path = make_model(directory, sharpness=10.0)
        with (
            run_logsteer({"model": path}, directory, engine=engine) as url,
            Client(url, timeout=600) as client,
        ):
            found[engine] = _time_diagnostics(client, read_vocab(path), runs)
    return join_results(found)


def _time_diagnostics(client: Client, vocab: int, runs: int) -> dict[str, Any]:
    seeds = itertools.count()

    def generate(**options: Any) -> Callable[[], object]:
        def run() -> object:
            seed = next(seeds)
            prompts = _draw(seed, vocab, PROMPTS, PROMPT)
            return client.generate(
                None, prompt_ids=prompts, n=SAMPLES, max_tokens=GENERATED, seed=seed,
                ignore_eos=True, **POLICY, **options,
            )  # fmt: skip

        return run

    columns = ["log_q", "rb_entropy"]
    ways = {
        "without diagnostics": generate(),
        "log_q and rb_entropy": generate(diagnostics=True, columns=columns),
        "all columns": generate(diagnostics=True),
    }
    return _compare(ways, runs, PROMPTS * SAMPLES * GENERATED)


def compare_adapters(directory: Path, runs: int) -> dict[str, Any]:
    """32 sequences of 220 tokens, 20 scored, on vLLM with and without room for adapters."""
    path = make_model(directory)
    vocab = read_vocab(path)
    seeds = itertools.count()
    with (
        run_logsteer({"model": path}, directory) as bare,
        run_logsteer({"model": path}, directory, adapter_slots=ADAPTERS) as roomy,
        Client(bare, timeout=600) as without,
        Client(roomy, timeout=600) as client,
    ):
        for number in range(ADAPTERS):
            client.adapters.put(f"a{number}", make_adapter(path, directory / f"a{number}", number))

        def score(client: Client, *adapters: str | None) -> Callable[[], object]:
            def run() -> None:
                both = _draw(next(seeds), vocab, ITEMS, CONTEXT + TARGET)
                items = [
                    {"context_ids": ids[:CONTEXT], "target_ids": [ids[CONTEXT:]]} for ids in both
                ]
                for number, adapter in enumerate(adapters):
                    client.logprob(items[number :: len(adapters)], adapter=adapter)

            return run

        ways = {
            "no slots": score(without, None),
            "slots, no adapter": score(client, None),
            "slots, one adapter": score(client, "a0"),
            "no slots, in four requests": score(without, *[None] * ADAPTERS),
            "slots, four adapters, a request each": score(
                client, *(f"a{number}" for number in range(ADAPTERS))
            ),
        }
        return _compare(ways, runs, ITEMS * (CONTEXT + TARGET))


def _compare(ways: dict[str, Callable[[], object]], runs: int, tokens: int) -> dict[str, Any]:
    seconds = time_in_turn(ways, runs)
    result = summarize(seconds, tokens, "tokens")
    first, *others = ways
    result["ratios"] = {
        f"{name} / {first}": compare(seconds[name], seconds[first]) for name in others
    }
    return result


def _draw(seed: int, vocab: int, count: int, length: int) -> list[list[int]]:
    """Sequences of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(10, vocab) for _ in range(length)] for _ in range(count)]
