"""Two replicas of a model on one core each against one replica on one core, over HTTP.

Both servers are configured alike, with two replicas that share the cores out; of the second one's,
one is killed and given up, so that what is left has the core that it would have beside the other.
The HTTP process and the client run on the same cores.
"""

import os
import random
import time
from typing import Any

import httpx
import psutil

from bench.models import DEVICE, ID, Workplace, corpus
from bench.servers import find_engines, find_process, read_cpu
from bench.timing import divide, spread, summarize
from logsteer import Client

TEXTS = 48
STORIES = 5
"""Stories of the demo's corpus in one text, which then has about 300 tokens."""
WAIT_S = 120.0
TWO, ONE = "two replicas, a core each", "one replica on one core"


def compare_replicas(place: Workplace, runs: int) -> dict[str, Any]:
    """Texts scored in full by two replicas and by one; how busy processes were, and differences."""
    if (os.cpu_count() or 1) < 2 or DEVICE != "cpu":
        raise RuntimeError("this row takes two cores and no GPU")
    path = place.find_model()
    with (
        place.serve(path, replicas=2) as two,
        place.serve(path, replicas=2, server={"max_restarts": 0}) as one,
        Client(two, timeout=600) as client,
        Client(one, timeout=600) as other,
    ):
        wait_for_replicas(two, "ready", "ready")
        wait_for_replicas(one, "ready", "ready")
        max(find_engines(find_process(one)), key=psutil.Process.create_time).kill()
        wait_for_replicas(one, "failed", "ready")
        ways = {TWO: client, ONE: other}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        shares, busiest = [], {name: list[float]() for name in ways}
        difference, tokens = 0.0, 0
        for run in range(runs + 1):
            texts = make_texts(run)
            found: dict[str, Any] = {}
            for name, asked in ways.items():
                server = find_process(two if name == TWO else one)
                engines = find_engines(server)
                before, *used = map(read_cpu, (server, *engines))
                started = time.perf_counter()
                found[name] = asked.perplexity(texts)
                taken = time.perf_counter() - started
                if run:
                    seconds[name].append(taken)
                    own = zip(engines, used, strict=True)
                    busiest[name].append(max(read_cpu(engine) - past for engine, past in own))
                    if name == TWO:
                        shares.append((read_cpu(server) - before) / taken)
            pairs = zip(found[TWO].results, found[ONE].results, strict=True)
            difference = max(
                difference,
                *(
                    abs((a.sum_logprob or 0) - (b.sum_logprob or 0)) / a.num_scored
                    for a, b in pairs
                ),
            )
            tokens = found[TWO].total.num_scored
    figures = {
        "HTTP process of two replicas, cores": spread(shares),
        "the ratio in CPU seconds of the busiest engine": divide(busiest[ONE], busiest[TWO]),
    }
    result = summarize(seconds, tokens, "tokens") | {"figures": figures}
    return result | {"largest_difference_nats": float(f"{difference:.2g}")}


def make_texts(seed: int) -> list[str]:
    """Texts of several stories each, others with every seed."""
    draw = random.Random(seed)
    moods: list[corpus.Mood] = ["happy", "sad"]
    return [
        " ".join(corpus.story(draw, draw.choice(moods)) for _ in range(STORIES))
        for _ in range(TEXTS)
    ]


def _states(url: str) -> list[str]:
    card = httpx.get(f"{url}/models/{ID}", timeout=30).json()
    return [replica["state"] for replica in card["replicas"]]


def wait_for_replicas(url: str, *states: str) -> None:
    """Wait until the replicas have these states. Errors: RuntimeError after WAIT_S seconds."""
    deadline = time.monotonic() + WAIT_S
    while (found := sorted(_states(url))) != sorted(states):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the replicas are {found} and not {states} after {WAIT_S:g} s")
        time.sleep(0.2)
