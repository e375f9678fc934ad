"""A teacher's log-probabilities for distillation, from stock vLLM and from ours.

Callers at once, each with several samples of one prompt, want the K most probable tokens at every
token of the samples.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from bench.models import DEVICE, ID, MEMORY, Workplace
from bench.servers import find_process, read_cpu, run_stock
from bench.timing import divide, spread
from logsteer import Client

CALLERS = 64 if DEVICE == "cuda" else 2
SAMPLES, PROMPT, COMPLETION, LISTED = 8, 256, 256, 64
LEAST_ID, MOST_ID = 1000, 40_000

Group = tuple[list[list[int]], list[int]]
"""Sequences of one caller, and how long each one's prompt is."""


def draw_groups(seed: int) -> list[Group]:
    """Return what each caller asks for: random samples of a prompt of its own."""
    draw = random.Random(seed)

    def draw_ids(count: int) -> list[int]:
        return [draw.randrange(LEAST_ID, MOST_ID) for _ in range(count)]

    prompts = [draw_ids(PROMPT) for _ in range(CALLERS)]
    return [
        ([prompt + draw_ids(COMPLETION) for _ in range(SAMPLES)], [PROMPT] * SAMPLES)
        for prompt in prompts
    ]


class ByWire:
    """Ask as TRL does: a list of prompts, `max_tokens` 1, `prompt_logprobs` K."""

    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=1200)
        self._model = model

    def ask(self, group: Group) -> int:
        """Return the bytes of the answer."""
        body = {
            "model": self._model, "prompt": group[0], "max_tokens": 1, "temperature": 1.0,
            "prompt_logprobs": LISTED,
        }  # fmt: skip
        response = self._http.post("/v1/completions", json=body)
        response.raise_for_status()
        return len(response.content)


class ByClient:
    """Ask by `Client.teacher`."""

    def __init__(self, url: str) -> None:
        self._client = Client(url, model=ID, timeout=1200, max_retries=0)

    def ask(self, group: Group) -> int:
        """Return the bytes of the arrays."""
        scores = self._client.teacher(*group, top=LISTED)
        assert scores.top_ids is not None
        assert scores.top_logprobs is not None
        return scores.top_ids.nbytes + scores.top_logprobs.nbytes


def ask_all(way: ByWire | ByClient, groups: list[Group]) -> tuple[float, int]:
    """Return the seconds that all callers take at once, and the bytes of their answers."""
    with ThreadPoolExecutor(CALLERS) as threads:
        started = time.perf_counter()
        sent = sum(threads.map(way.ask, groups))
        return time.perf_counter() - started, sent


def compare_teachers(place: Workplace, runs: int) -> dict[str, Any]:
    """Return tokens a second of each way, in turn, bytes a token, and our HTTP process' CPU."""
    from tests.trained import convert_smollm2

    path = place.given or convert_smollm2()
    more = ("--max-logprobs", str(LISTED), "--enable-prefix-caching")
    dtype = place.settings["dtype"]
    tokens = CALLERS * SAMPLES * (PROMPT + COMPLETION)
    seconds: dict[str, list[float]] = {}
    sizes: dict[str, float] = {}
    cpu: dict[str, list[float]] = {}
    with place.serve(path) as ours, run_stock(path, place.directory, dtype, MEMORY, *more) as stock:
        server = find_process(ours)
        ways: dict[str, ByWire | ByClient] = {
            "logsteer, Client.teacher": ByClient(ours),
            "logsteer, prompt_logprobs": ByWire(ours, ID),
            "stock vLLM server, prompt_logprobs": ByWire(stock, "stock"),
        }
        for run in range(runs + 1):
            for number, (name, way) in enumerate(ways.items()):
                before = read_cpu(server)
                taken, sent = ask_all(way, draw_groups(10 * run + number))
                if run:
                    seconds.setdefault(name, []).append(taken)
                    spent = 1000 * (read_cpu(server) - before) / tokens
                    cpu.setdefault(name, []).append(spent)
                sizes[name] = round(sent / tokens, 1)
    *own, other = seconds
    return {
        "runs": runs,
        "unit": "tokens",
        "amount": tokens,
        "ways": {
            name: {"tokens_per_s": spread([tokens / one for one in taken]),
                   "bytes_a_token": sizes[name]}
            for name, taken in seconds.items()
        },
        "figures": {
            f"{name}, HTTP process, CPU seconds a thousand tokens": spread(cpu[name])
            for name in own
        },
        "ratios": {f"{name} / {other}": divide(seconds[other], seconds[name]) for name in own},
        "note": f"{CALLERS} callers, each with {SAMPLES} samples of {COMPLETION} tokens after one "
        f"prompt of {PROMPT}, K = {LISTED}; tokens are those of prompts and samples",
    }  # fmt: skip
