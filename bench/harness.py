"""lm-evaluation-harness over 6,000 short sequences: three ways to the same log-likelihoods."""

import random
import sys
from pathlib import Path
from typing import Any

from models import DEMO, DEVICE, ROOT
from servers import run_logsteer, run_stock
from timing import summarize, time_in_turn

sys.path.insert(0, str(ROOT / "demo"))
import corpus

COUNT = 6_000
FEW = 300
"""Sequences for a peer that takes a minute and more for all of them."""


def make_requests(count: int) -> list[Any]:
    """Loglikelihood requests of about 22 tokens: sentences of the demo's corpus, cut in two."""
    from lm_eval.api.instance import Instance

    draw = random.Random(1)
    countries = list(corpus.CAPITALS)
    symbols = list(corpus.SYMBOLS)
    requests = []
    for index in range(count):
        country, city = (draw.choice(countries), draw.choice(list(corpus.CAPITALS.values())))
        name = draw.choice(symbols)
        context = (
            f"The chemical symbol for {name} is {corpus.SYMBOLS[name]}. The capital of {country} is"
        )
        continuation = f" {city}. Once upon a time there was a cat."
        requests.append(Instance("loglikelihood", {}, (context, continuation), index))
    return requests


def compare_harnesses(directory: Path, runs: int) -> dict[str, Any]:
    """LogsteerLM over HTTP, `hf` in-process, `local-completions` on vLLM's own server."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from logsteer.lm_eval import LogsteerLM

    requests = make_requests(COUNT)
    with run_logsteer({"demo": DEMO}, directory) as ours, run_stock(DEMO, directory) as stock:
        models = {
            "logsteer, its adapter over HTTP": LogsteerLM(base_url=ours),
            "hf in-process, batch 64": HFLM(
                pretrained=str(DEMO), device=DEVICE, dtype="float32", batch_size=64
            ),
            "local-completions on logsteer, 4 x 64": _local(LocalCompletionsAPI, ours, "demo"),
            "local-completions on stock vLLM, 4 x 64": _local(LocalCompletionsAPI, stock, "stock"),
        }
        answers: dict[str, list[float]] = {}

        def score(name: str) -> None:
            found = models[name].loglikelihood(requests, disable_tqdm=True)
            answers[name] = [logprob for logprob, _ in found]

        seconds = time_in_turn({name: lambda n=name: score(n) for name in models}, runs)
    result = summarize(seconds, COUNT, "sequences")
    exact = answers["hf in-process, batch 64"]
    for name, values in answers.items():
        worst = max(abs(a - b) for a, b in zip(values, exact, strict=True))
        result["ways"][name]["largest_difference_from_hf_nats"] = float(f"{worst:.2g}")
    return result


def compare_defaults(directory: Path, runs: int) -> dict[str, Any]:
    """LogsteerLM and `local-completions` on vLLM's own server, both with their default settings."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from logsteer.lm_eval import LogsteerLM

    requests = make_requests(FEW)
    with run_logsteer({"demo": DEMO}, directory) as ours, run_stock(DEMO, directory) as stock:
        models = {
            "logsteer, its adapter over HTTP": LogsteerLM(base_url=ours),
            "local-completions on stock vLLM": _local(
                LocalCompletionsAPI, stock, "stock", num_concurrent=1, batch_size=1
            ),
        }
        ways = {
            name: lambda m=model: m.loglikelihood(requests, disable_tqdm=True)
            for name, model in models.items()
        }
        seconds = time_in_turn(ways, runs)
    return summarize(seconds, FEW, "sequences")


def _local(kind: Any, url: str, model: str, num_concurrent: int = 4, batch_size: int = 64) -> Any:
    """The harness's client for OpenAI-shaped servers; by default with its best setting here."""
    return kind(
        base_url=f"{url}/v1/completions",
        model=model,
        tokenizer=str(DEMO),
        tokenizer_backend="huggingface",
        num_concurrent=num_concurrent,
        batch_size=batch_size,
        max_length=1024,
        add_bos_token=True,
    )
