"""What a request takes of the process that answers HTTP, on one machine and on Ray.

    .venv/bin/python -m bench.capacity.ingress          one machine
    .venv/bin/python -m bench.capacity.ingress --ray    beside it the same on Ray Serve

The model is the fake engine, whose answers take next to no work; CPU time is that of processes, all
their threads. Calls of three shapes tell apart what a request, a text and a token take; `/healthz`,
which asks no model, what of a request is HTTP's and Serve's. The figures go to `measured.json`.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import yaml

from bench.capacity.steps import BENCH, write_measured

sys.path.insert(0, str(BENCH))
from http_process import CALLERS, JSON, read_cpu, send_all
from models import DEMO
from servers import find_port, find_process, run_logsteer
from short_items import as_text, make_pairs
from timing import spread

FAKE = {"vocab_size": 2048, "context_length": 2048}
STORY = " Once upon a time there was a cat who had a hat and liked to sit in the sun all day."
SHAPES = {
    "one short text": (1, 1, 400),
    "256 short texts": (256, 1, 40),
    "16 long texts": (16, 20, 40),
}
"""Texts of a call, sentences of its target, calls of a run."""
PLAIN = 800
"""Calls of a run that ask no model."""
RUNS = 3
READY_S = 120.0


def make_calls(texts: int, sentences: int, calls: int, seed: int) -> list[bytes]:
    """Return bodies of calls of `/logprob`."""
    pairs = make_pairs(texts * calls, seed, ending=STORY * sentences)
    items = as_text(pairs)
    return [
        json.dumps({"model": "fake", "items": items[n : n + texts], "cache": False}).encode()
        for n in range(0, len(items), texts)
    ]


def measure_calls(url: str, parts: Mapping[str, list[psutil.Process]]) -> dict[str, Any]:
    """Return for each shape of calls what each part takes of the CPU, a call, and the bytes."""
    found: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=600) as client:
        for name, (texts, sentences, calls) in SHAPES.items():
            taken: dict[str, list[float]] = {part: [] for part in parts}
            for run in range(RUNS + 1):
                bodies = make_calls(texts, sentences, calls, seed=run)
                before = {part: sum(map(read_cpu, own)) for part, own in parts.items()}
                send_all(client, bodies, JSON)
                for part, own in parts.items() if run else ():
                    spent = sum(map(read_cpu, own)) - before[part]
                    taken[part].append(1e6 * spent / calls)
            answer = client.post("/logprob", content=bodies[0], headers=JSON)
            usage = answer.raise_for_status().json()["usage"]
            found[name] = {
                "texts": texts,
                "tokens": usage["prompt_tokens"],
                "bytes_in": len(bodies[0]),
                "bytes_out": len(answer.content),
                "us": {part: spread(own) for part, own in taken.items()},
            }
    return found


def measure_plain(url: str, parts: Mapping[str, list[psutil.Process]]) -> dict[str, list[float]]:
    """Return the µs of CPU that each part takes for a request that asks no model."""
    taken: dict[str, list[float]] = {part: [] for part in parts}

    def get(_number: int) -> None:
        client.get("/healthz").raise_for_status()

    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(CALLERS) as pool:
        for run in range(RUNS + 1):
            before = {part: sum(map(read_cpu, own)) for part, own in parts.items()}
            list(pool.map(get, range(PLAIN)))
            for part, own in parts.items() if run else ():
                taken[part].append(1e6 * (sum(map(read_cpu, own)) - before[part]) / PLAIN)
    return {part: spread(own) for part, own in taken.items()}


def fit(found: Mapping[str, Any], part: str) -> dict[str, float]:
    """Fit what a request, a text and a token take, none below 0, to the fastest runs."""
    from scipy.optimize import nnls

    rows = np.array([(1.0, own["texts"], own["tokens"]) for own in found.values()])
    taken = np.array([own["us"][part][0] for own in found.values()])
    parts, _ = nnls(rows / taken[:, None], np.ones(len(rows)))
    names = ("request_us", "text_us", "token_us")
    return {name: float(f"{value:.3g}") for name, value in zip(names, parts, strict=True)}


def measure_machine(directory: Path) -> dict[str, Any]:
    """Measure the HTTP process of a server."""
    with run_logsteer({"fake": DEMO}, directory, engine="fake", engine_args=FAKE) as url:
        parts = {"http": [find_process(url)]}
        plain, found = measure_plain(url, parts), measure_calls(url, parts)
    return {"shapes": found, "plain_us": plain, "http": fit(found, "http")}


@contextmanager
def run_on_ray(directory: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serve the fake engine on a Ray of its own in two replicas; the URL, and its first process."""
    port = find_port()
    model = {"id": "fake", "path": str(DEMO), "engine": "fake", "engine_args": FAKE, "replicas": 2}
    config = directory / "ray.yaml"
    store = {"store_directory": str(directory / "ray-store"), "cache_bytes": 0}
    config.write_text(yaml.safe_dump({"models": [model], **store}))
    command = [sys.executable, "-m", "logsteer_server.cluster", "--config", str(config)]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--nodes", "1"], stdout=subprocess.DEVNULL
    )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
        while True:
            try:
                if httpx.get(f"{url}/readyz", timeout=10).status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer within {READY_S:g} s")
            time.sleep(0.5)
        yield url, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def find_parts(first: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Return the processes of a Ray by what they are."""
    names = {
        "http": "ServeReplica:logsteer:ingress", "actors": "ServeReplica:logsteer-fake",
        "proxy": "ProxyActor", "controller": "ServeController",
    }  # fmt: skip
    ray = {own.pid: own for own in psutil.process_iter() if _is_below(own, first)}
    found: dict[str, list[psutil.Process]] = {}
    for part, name in names.items():
        found[part] = [own for own in ray.values() if name in " ".join(own.cmdline())]
    if not all(found.values()):
        raise RuntimeError(f"not found: {[part for part, own in found.items() if not own]}")
    return found


def _is_below(process: psutil.Process, first: psutil.Process) -> bool:
    """Return whether a process was started by the first one, or by one that it started."""
    try:
        return first in process.parents()
    except psutil.Error:
        return False


def measure_ray(directory: Path) -> dict[str, Any]:
    """Measure the processes of the service on Ray."""
    with run_on_ray(directory) as (url, first):
        time.sleep(2)
        parts = find_parts(first)
        plain, found = measure_plain(url, parts), measure_calls(url, parts)
        before, began = sum(map(read_cpu, parts["controller"])), time.monotonic()
        time.sleep(10)
        idle = (sum(map(read_cpu, parts["controller"])) - before) / (time.monotonic() - began)
    fitted = {part: fit(found, part) for part in ("http", "actors", "proxy")}
    return {"shapes": found, "plain_us": plain, **fitted, "controller_idle_cores": round(idle, 4)}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", action="store_true", help="on Ray Serve, in its place")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="logsteer-ingress-") as directory:
        measure = measure_ray if given.ray else measure_machine
        found = measure(Path(directory))
    write_measured("ray" if given.ray else "http", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
