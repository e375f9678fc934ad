"""What diagnostics cost a generation."""

import itertools
import random
from collections.abc import Callable
from typing import Any

from bench.models import read_vocab
from bench.timing import compare, join_results, summarize, time_in_turn
from bench.workplace import Workplace
from logsteer import Client

PROMPTS, PROMPT, SAMPLES, GENERATED = 16, 32, 2, 64
POLICY: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}


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
    seconds = time_in_turn(ways, runs)
    result = summarize(seconds, PROMPTS * SAMPLES * GENERATED, "tokens")
    first, *others = ways
    result["ratios"] = {
        f"{name} / {first}": compare(seconds[name], seconds[first]) for name in others
    }
    return result


def _draw(seed: int, vocab: int, count: int, length: int) -> list[list[int]]:
    """Sequences of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(10, vocab) for _ in range(length)] for _ in range(count)]
