"""The simulation beside real replicas: the same requests at the same moments, over HTTP.

    .venv/bin/python -m bench.capacity.reality --model "18 M" --replicas 2

Serves a model in two processes on a core each, or with one of them given up; sends requests that
come as a Poisson process at parts of the capacity that the fitted steps promise, and once all at a
time. The simulation is given those requests, the fitted steps, and what a request takes beside
them, which is measured first with one at a time. The HTTP process and the client run on the same
cores. The figures go to `measured.json`.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import psutil

from bench.capacity.engine import EngineShape, count_pairs
from bench.capacity.rates import MODELS, TOKEN_BYTES, read_cost
from bench.capacity.report import summarize
from bench.capacity.simulation import Fleet, FleetShape
from bench.capacity.steps import BENCH, find_models, read_measured, write_measured
from bench.capacity.traffic import Mix, Request, draw_requests

MIX = Mix(
    1, items=4, lengths=(20, 60, 120, 180, 240, 320, 420, 600), prefix_tokens=256, groups=12,
    vocab=1400,
)  # fmt: skip
JSON = {"Content-Type": "application/json"}
LOADS = (0.5, 0.8)
SECONDS = 15.0
BURST_S = 8.0
"""Requests that come all at once, in seconds of work for the replicas."""
ALONE = 12
CACHE_BYTES = 2**30
SHOWN = ("scored_per_s", "busy_s", "latency_p50_s", "latency_p95_s", "hit_share")


def make_body(request: Request) -> bytes:
    """Return the call of `/logprob` that scores a request's texts."""
    shared = request.shared_tokens
    items = []
    for job in request.jobs:
        own = job.tokens.tolist()
        # The model reads all tokens of a job; the target has one more, which it need not.
        target = [*own[shared + 1 :], 5]
        items.append({"context_ids": own[: shared + 1], "target_ids": [target]})
    return orjson.dumps({"model": "model", "items": items, "cache": False})


async def send(url: str, requests: Sequence[Request]) -> dict[str, float]:
    """Send requests at their moments; return rates, and percentiles of their latencies."""
    bodies = [make_body(request) for request in requests]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        began = time.perf_counter()

        async def ask(request: Request, body: bytes) -> tuple[float, int]:
            await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - began)))
            answer = await client.post("/logprob", content=body, headers=JSON)
            if answer.status_code != httpx.codes.OK:
                raise RuntimeError(answer.text[:1000])
            cached = orjson.loads(answer.content)["usage"]["cached_tokens"]
            return time.perf_counter() - began - request.at, cached

        found = await asyncio.gather(*map(ask, requests, bodies))
        span = time.perf_counter() - began
    latencies = np.array([taken for taken, _ in found])[len(found) // 10 :]
    scored = sum(int(request.jobs.num_targets.sum()) for request in requests)
    shareable = sum(len(request.jobs) * request.shared_tokens for request in requests)
    return {
        "scored_per_s": scored / span,
        "latency_p50_s": float(np.percentile(latencies, 50)),
        "latency_p95_s": float(np.percentile(latencies, 95)),
        "hit_share": sum(cached for _, cached in found) / max(1, shareable),
    }


def measure_all() -> float:
    """Return the CPU seconds of this machine so far, of all processes."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


class Comparison:
    """One model in so many replicas: what is sent, what was measured, what the simulation says."""

    def __init__(self, model: str, replicas: int) -> None:
        self._replicas = replicas
        cache = CACHE_BYTES // TOKEN_BYTES[model]
        self._shape = EngineShape(read_cost(model), cache_tokens=cache)

    def draw_cases(self) -> dict[str, list[Request]]:
        """Return the requests of each case."""
        shape, length = self._shape, MIX.mean_length
        full = shape.cost.rate(shape.step_tokens, length, MIX.prefix_tokens)
        capacity = self._replicas * full / (length * MIX.items)
        cases = {
            f"{load:.0%} of the capacity": list(
                draw_requests(replace(MIX, per_s=load * capacity), SECONDS, seed=round(100 * load))
            )
            for load in LOADS
        }
        count = int(capacity * BURST_S)
        at_once = itertools.islice(draw_requests(replace(MIX, per_s=100), 1000, seed=7), count)
        cases["all at once"] = [replace(request, at=0.0) for request in at_once]
        return cases

    def simulate(self, requests: Sequence[Request], rest_s: float) -> dict[str, float]:
        """Return what the simulation says of the same requests."""
        shape = FleetShape(self._shape, self._replicas, http_request_s=rest_s)
        report = Fleet(shape).run(iter(requests))
        assert not report.unanswered
        found = summarize(report) | {"busy_s": report.counts.busy_s}
        return {name: found[name] for name in SHOWN}

    def measure_rest(self, url: str) -> float:
        """Return what a request takes beside its step, one at a time: the least, in seconds."""
        mix, found = replace(MIX, groups=0, prefix_tokens=0), []
        for request in itertools.islice(draw_requests(mix, 1000, 99), ALONE):
            taken = asyncio.run(send(url, [replace(request, at=0.0)]))
            lengths = request.jobs.num_tokens.tolist()
            pairs = sum(count_pairs(0, length) for length in lengths)
            step_s = self._shape.cost.measure(sum(lengths), len(lengths), pairs)
            found.append(taken["latency_p50_s"] - step_s)
        return max(0.0, min(found))

    def run(self, url: str, measure_cpu: Callable[[], float]) -> dict[str, Any]:
        """Return measured and predicted figures of each case; `measure_cpu` is of the engines."""
        cases = self.draw_cases()
        asyncio.run(send(url, [replace(own, at=0.0) for own in cases["all at once"][:8]]))
        rest_s = self.measure_rest(url)
        found: dict[str, Any] = {"rest_ms": round(1e3 * rest_s, 2)}
        for name, requests in cases.items():
            before, all_before, began = measure_cpu(), measure_all(), time.perf_counter()
            measured = asyncio.run(send(url, requests))
            measured["busy_s"] = measure_cpu() - before
            others = measure_all() - all_before - measured["busy_s"]
            taken = time.perf_counter() - began
            predicted = self.simulate(requests, rest_s)
            found[name] = {
                figure: [float(f"{side[figure]:.4g}") for side in (measured, predicted)]
                for figure in SHOWN
            } | {
                "requests": len(requests),
                "others_cores": round(others / taken, 2),
            }
        return found


def main() -> None:
    """Measure one model in so many replicas, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="18 M")
    parser.add_argument("--replicas", type=int, choices=(1, 2), default=2)
    given = parser.parse_args()
    sys.path.insert(0, str(BENCH))
    import replicas as pair
    from workplace import Workplace

    settings = {} if given.replicas == 2 else {"max_restarts": 0}
    with tempfile.TemporaryDirectory(prefix="logsteer-real-") as directory, ExitStack() as stack:
        place = Workplace(Path(directory), stack)
        path = find_models(Path(directory))[given.model]
        with place.serve(path, replicas=2, server=settings) as url:
            pair.wait_for_replicas(url, 2)
            if given.replicas == 1:
                pair.leave_one(url)
            engines = pair.find_engines(url)

            def measure_cpu() -> float:
                return sum(map(pair.measure_cpu, engines))

            found = Comparison(given.model, given.replicas).run(url, measure_cpu)
    name = f"{given.model}, {given.replicas}"
    write_measured("reality", read_measured().get("reality", {}) | {name: found})
    print(json.dumps({name: found}, indent=1))


if __name__ == "__main__":
    main()
