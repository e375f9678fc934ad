"""What diagnostics cost a generation, and what LoRA adapters cost a score."""

import itertools
import random
from collections.abc import Callable
from typing import Any

from logsteer import Client
from models import make_adapter, read_vocab
from timing import compare, join_results, summarize, time_in_turn
from workplace import Workplace

PROMPTS, PROMPT, SAMPLES, GENERATED = 16, 32, 2, 64
ITEMS, CONTEXT, TARGET = 32, 200, 20
POLICY: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
ADAPTERS = 4
ADAPTER_SEED = 30_000
"""The first seed of a row that shares its server."""


def compare_diagnostics(place: Workplace, runs: int) -> dict[str, Any]:
    """32 sampled continuations of 64 tokens on each engine, by what is told of them."""
    found = {}
    path = place.find_model(sharpness=10.0)
    for engine in ("vllm", "transformer_lens"):
        with place.serve(path, engine) as url, Client(url, timeout=600) as client:
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


def compare_adapters(place: Workplace, runs: int) -> dict[str, Any]:
    """32 sequences of 220 tokens, 20 scored, on vLLM with and without room for adapters."""
    path = place.find_model()
    vocab = read_vocab(path)
    seeds = itertools.count(ADAPTER_SEED)
    with (
        place.serve(path, adapter_slots=ADAPTERS) as roomy,
        Client(place.share(), timeout=600) as without,
        Client(roomy, timeout=600) as client,
    ):
        client.adapters.put("a", make_adapter(path, place.directory / "a", seed=0))

        def score(client: Client, adapter: str | None = None) -> Callable[[], object]:
            def run() -> None:
                both = _draw(next(seeds), vocab, ITEMS, CONTEXT + TARGET)
                items = [
                    {"context_ids": ids[:CONTEXT], "target_ids": [ids[CONTEXT:]]} for ids in both
                ]
                client.logprob(items, adapter=adapter)

            return run

        ways = {
            "no slots": score(without),
            "slots, no adapter": score(client),
            "slots, one adapter": score(client, "a"),
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
