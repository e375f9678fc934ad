"""lm-evaluation-harness over 6,000 short sequences: several ways to the same log-likelihoods."""

import json
import random
import sys
from pathlib import Path
from typing import Any

from bench.models import DEMO, DEVICE, ROOT
from bench.stock import ask_choices, describe_stock
from bench.timing import compare_with_first, summarize, time_call
from bench.workplace import ID, Workplace

sys.path.insert(0, str(ROOT / "demo"))
import corpus

COUNT = 6_000
FEW = 300
"""Sequences for a peer that takes a minute and more for all of them."""
MAX_LENGTH = 512
SHARED = ROOT.parent / "shared"
BLIMP = SHARED / "data" / "blimp"
STORIES = SHARED / "models" / "stories260k"
EXACT = "hf in-process"
FEW_ONLY = "local-completions on stock vLLM, its default settings"


def make_requests(count: int) -> tuple[str, list[Any]]:
    """Return what the sequences are, and log-likelihood requests of about 22 tokens each.

    They are BLiMP's sentences, good and bad ones, where ../shared has three of its sets; else
    sentences of the demo's corpus, cut in two.
    """
    from lm_eval.api.instance import Instance

    name, pairs = ("BLiMP", read_blimp()) if BLIMP.is_dir() else ("demo corpus", cut_sentences())
    if len(pairs) < count:
        raise ValueError(f"{BLIMP} has {len(pairs)} sentences, and {count} are needed")
    return name, [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs[:count])]


def read_blimp() -> list[tuple[str, str]]:
    """Return each sentence of ../shared/data/blimp behind an empty context, as its tasks ask."""
    lines = [line for path in sorted(BLIMP.glob("*.jsonl")) for line in path.open()]
    documents = map(json.loads, lines)
    return [("", doc[name]) for doc in documents for name in ("sentence_good", "sentence_bad")]


def cut_sentences() -> list[tuple[str, str]]:
    """Return contexts and continuations of the demo's corpus."""
    draw = random.Random(1)
    countries, cities = list(corpus.CAPITALS), list(corpus.CAPITALS.values())
    elements = list(corpus.SYMBOLS.items())
    pairs = []
    for _ in range(COUNT):
        element, symbol = draw.choice(elements)
        country, city = draw.choice(countries), draw.choice(cities)
        context = f"The chemical symbol for {element} is {symbol}. The capital of {country} is"
        pairs.append((context, f" {city}. Once upon a time there was a cat."))
    return pairs


def find_model(place: Workplace) -> Path:
    """Return the user's model, else the smallest trained one at hand."""
    return place.given or (STORIES if STORIES.is_dir() else DEMO)


def compare_harnesses(place: Workplace, runs: int) -> dict[str, Any]:
    """LogsteerLM over HTTP, `hf` in-process, `local-completions` on vLLM's own server."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from logsteer.lm_eval import LogsteerLM

    path = find_model(place)
    dtype = place.settings["dtype"]
    sort, requests = make_requests(COUNT)
    with (
        place.serve(path) as ours,
        place.serve_stock(path) as stock,
    ):

        def ask_locally(url: str, model: str, at_once: int, batch: int) -> Any:
            return LocalCompletionsAPI(
                base_url=f"{url}/v1/completions", model=model, tokenizer=str(path),
                tokenizer_backend="huggingface", num_concurrent=at_once, batch_size=batch,
                max_length=MAX_LENGTH, add_bos_token=True,
            )  # fmt: skip

        models = {
            "logsteer": LogsteerLM(base_url=ours),
            EXACT: HFLM(pretrained=str(path), device=DEVICE, dtype=dtype, batch_size=64),
            "local-completions on logsteer, 4 x 64": ask_locally(ours, ID, 4, 64),
            "local-completions on stock vLLM, 4 x 64": ask_locally(stock, "stock", 4, 64),
            FEW_ONLY: ask_locally(stock, "stock", 1, 1),
        }
        answers: dict[str, list[float]] = {}

        def score(name: str) -> None:
            asked = requests[: FEW if name == FEW_ONLY else COUNT]
            found = models[name].loglikelihood(asked, disable_tqdm=True)
            answers[name] = [logprob for logprob, _ in found]

        seconds: dict[str, list[float]] = {name: [] for name in models}
        for run in range(runs + 1):
            for name in models:
                taken = time_call(lambda name=name: score(name))  # type: ignore[misc]
                if run:
                    seconds[name].append(taken / len(answers[name]))
    result = summarize(seconds, 1, "sequences") | {"ratios": compare_with_first(seconds)}
    for name, values in answers.items():
        worst = max(abs(a - b) for a, b in zip(values, answers[EXACT], strict=False))
        result["ways"][name]["largest_difference_from_hf_nats"] = float(f"{worst:.2g}")
    notes = [f"{COUNT} sequences of {sort}, {FEW} of them by default settings, model {path.name}"]
    return result | {"notes": [*notes, describe_stock(ask_choices(path, dtype))]}
