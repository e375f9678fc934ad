"""Scoring against vLLM's own server, the arithmetic's limit, the bare engine and other ways of
lm-evaluation-harness; and what diagnostics cost a generation.
"""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx

from bench.models import DEMO, DEVICE, ID, ROOT, Workplace, draw_ids, read_vocab
from bench.servers import run_module, start_worker
from bench.short_items import make_pairs
from bench.stock import describe_stock
from bench.timing import join_results, summarize, time_call, time_in_turn
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
    result = summarize(seconds, TARGETS, "pairs")
    notes = [f"{CONTEXTS} contexts a run; {CONTEXTS_ON_STOCK} on the stock server"]
    result["notes"] = [*notes, describe_stock(run_module("stock", path, place.settings["dtype"]))]
    return result | {"largest_difference_nats": float(f"{difference:.2g}")}


def compare_full_text(place: Workplace, runs: int) -> dict[str, Any]:
    """Texts scored in full by the engine, against plain prefill plus the head's bare product."""
    path, settings = place.find_model(), json.dumps(place.settings)
    return run_module("engine", "full_text", path, runs, settings)


def compare_with_own_engine(place: Workplace, runs: int) -> dict[str, Any]:
    """The service over HTTP against its own engine, called in a process without HTTP."""
    vocab = read_vocab(place.find_model())
    seconds: dict[str, list[float]] = {"logsteer over HTTP": [], "its engine in-process": []}
    settings, log = json.dumps(place.settings), place.directory / "engine.log"
    with (
        Client(place.share(), timeout=600) as client,
        start_worker(log, "engine", "seeds", place.find_model(), 0, settings) as engine,
    ):
        for run in range(runs + UNCOUNTED):
            seed = OVERHEAD_SEED + run
            own = engine.ask(seed)
            items = make_choices(vocab, 64, 200, 1, 20, seed=seed)
            taken = time_call(partial(client.logprob, items, per_token=False))
            if run >= UNCOUNTED:
                seconds["logsteer over HTTP"].append(taken)
                seconds["its engine in-process"].append(own)
    return summarize(seconds, 64, "pairs")


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

    name, pairs = "demo corpus", make_pairs(COUNT, seed=1)
    if BLIMP.is_dir():
        name, pairs = "BLiMP", read_blimp()
    if len(pairs) < count:
        raise ValueError(f"{BLIMP} has {len(pairs)} sentences, and {count} are needed")
    return name, [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs[:count])]


def read_blimp() -> list[tuple[str, str]]:
    """Return each sentence of ../shared/data/blimp behind an empty context, as its tasks ask."""
    lines = [line for path in sorted(BLIMP.glob("*.jsonl")) for line in path.open()]
    documents = map(json.loads, lines)
    return [("", doc[name]) for doc in documents for name in ("sentence_good", "sentence_bad")]


def compare_harnesses(place: Workplace, runs: int) -> dict[str, Any]:
    """LogsteerLM over HTTP, `hf` in-process, `local-completions` on vLLM's own server."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from logsteer.lm_eval import LogsteerLM

    path = place.given or (STORIES if STORIES.is_dir() else DEMO)
    dtype = place.settings["dtype"]
    # With a model of the user's, 6,000 take an hour on a CPU.
    count = COUNT if place.given is None or DEVICE == "cuda" else COUNT // 4
    sort, requests = make_requests(count)
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
            asked = requests[: FEW if name == FEW_ONLY else count]
            found = models[name].loglikelihood(asked, disable_tqdm=True)
            answers[name] = [logprob for logprob, _ in found]

        seconds = time_in_turn({name: partial(score, name) for name in models}, runs)
    each = {name: [t / len(answers[name]) for t in taken] for name, taken in seconds.items()}
    result = summarize(each, 1, "sequences")
    for name, values in answers.items():
        worst = max(abs(a - b) for a, b in zip(values, answers[EXACT], strict=False))
        result["ways"][name]["largest_difference_from_hf_nats"] = float(f"{worst:.2g}")
    notes = [f"{count} sequences of {sort}, {FEW} of them by default settings, model {path.name}"]
    return result | {"notes": [*notes, describe_stock(run_module("stock", path, dtype))]}


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

    def generate(**options: Any) -> None:
        seed = next(seeds)
        prompts = draw_ids(seed, PROMPTS, PROMPT, vocab)
        client.generate(
            None, prompt_ids=prompts, n=SAMPLES, max_tokens=GENERATED, seed=seed,
            ignore_eos=True, **POLICY, **options,
        )  # fmt: skip

    ways: dict[str, Callable[[], object]] = {
        "without diagnostics": generate,
        "log_q and rb_entropy": partial(
            generate, diagnostics=True, columns=["log_q", "rb_entropy"]
        ),
        "all columns": partial(generate, diagnostics=True),
    }
    first, *others = ways
    pairs = [(name, first) for name in others]
    return summarize(time_in_turn(ways, runs), PROMPTS * SAMPLES * GENERATED, "tokens", pairs)
