"""What the HTTP process and the pipe cost a short item, and how much memory a large call takes.

The model is the fake engine, whose answers take next to no work. CPU time is that of a process, all
its threads, from /proc; the client is another process and no part of it.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil

from bench.models import DEMO
from bench.servers import find_engines, find_process, read_cpu, run_logsteer
from bench.short_items import (
    AT_ONCE,
    FAKE,
    as_ids,
    as_text,
    load_tokenizer,
    make_bodies,
    make_pairs,
)
from bench.timing import divide, spread

COUNT = 65_536
CALLERS = 4
WARM_UP = 16
"""Calls before those that count."""
JSON = {"Content-Type": "application/json", "Accept": "application/json"}
MSGPACK = JSON | {"Accept": "application/msgpack"}
TEXT, IDS = "text in, JSON out", "ids in, MessagePack out"
MINIMUM, FAKE_ALONE = "tokenising and JSON alone", "the fake engine alone"
MIB = 2**20
LARGE_CALL = {
    "max_items": COUNT,
    "max_answer_bytes": 2**30,
    "max_pending_bytes": 2**32,
}
"""Limits of a server that takes 65,536 items in one call; the body fits that of the defaults."""
LARGE_BODY = 8 * MIB


def post(client: httpx.Client, body: bytes, headers: dict[str, str]) -> bytes:
    """Return the answer to one call. Errors: RuntimeError with the answer where it is refused."""
    answer = client.post("/logprob", content=body, headers=headers)
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(answer.text[:2000])
    return answer.content


def measure_cpu(directory: Path, runs: int) -> dict[str, Any]:
    """CPU of the HTTP process and of the engine's, an item, against the least that it takes."""
    tokenizer = load_tokenizer(DEMO)
    seeds = itertools.count(10)
    found: dict[str, list[float]] = {}
    with (
        run_logsteer({"fake": DEMO}, directory, engine="fake", engine_args=FAKE) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        server = find_process(url)
        (engine,) = find_engines(server)

        def score(way: str, count: int) -> dict[str, float]:
            pairs = make_pairs(count, next(seeds))
            if way == TEXT:
                bodies, headers = make_bodies(as_text(pairs)), JSON
            else:
                bodies, headers = make_bodies(as_ids(pairs, tokenizer)), MSGPACK
            before = [read_cpu(process) for process in (server, engine)]
            send_all(client, bodies, headers)
            spent = [read_cpu(p) - b for p, b in zip((server, engine), before, strict=True)]
            names = (f"HTTP process, {way}", f"engine's process, {way}")
            return {n: 1e6 * s / count for n, s in zip(names, spent, strict=True)}

        first = make_bodies(as_text(make_pairs(AT_ONCE, 0)))[0]
        answer = post(client, first, JSON)
        for run in range(runs + 1):
            count = COUNT if run else WARM_UP * AT_ONCE
            figures = score(TEXT, count) | score(IDS, count) | measure_alone(answer, count)
            for name, figure in figures.items() if run else ():
                found.setdefault(name, []).append(figure)
    return report_cpu(found, runs)


def report_cpu(found: dict[str, list[float]], runs: int) -> dict[str, Any]:
    """Return microseconds of each way, and its ratio to tokenising and JSON of the same run."""
    alone, fake = found[MINIMUM], found[FAKE_ALONE]
    ratios = {}
    for way in (TEXT, IDS):
        ratios[f"HTTP process, {way} / {MINIMUM}"] = divide(found[f"HTTP process, {way}"], alone)
        whole = found[f"engine's process, {way}"]
        pipe = [total - own for total, own in zip(whole, fake, strict=True)]
        ratios[f"pipe and engine loop, {way} / {MINIMUM}"] = divide(pipe, alone)
    ways = {name: {"us_per_item": spread(figures)} for name, figures in found.items()}
    notes = [f"{COUNT} items of 25 tokens in the mean, calls of {AT_ONCE}, {CALLERS} callers"]
    return {"runs": runs, "ways": ways, "ratios": ratios, "notes": notes}


def measure_alone(answer: bytes, count: int) -> dict[str, float]:
    """Return the figures of `bench/short_items.py`."""
    command = [sys.executable, "-m", "bench.short_items", str(DEMO)]
    output = subprocess.run([*command, str(count)], input=answer, capture_output=True, check=True)
    found: dict[str, float] = json.loads(output.stdout)
    return found


def send_all(client: httpx.Client, bodies: Sequence[bytes], headers: dict[str, str]) -> None:
    """Send calls, as many at once as there are callers."""
    with ThreadPoolExecutor(CALLERS) as pool:
        for _ in pool.map(lambda body: len(post(client, body, headers)), bodies):
            pass


def measure_memory(directory: Path, runs: int) -> dict[str, Any]:
    """Peak of the HTTP process above its idle memory for 65,536 items in one call."""
    pairs = make_pairs(COUNT, seed=5, ending=" Once upon a time.")
    body = orjson.dumps({"model": "fake", "items": as_text(pairs)})
    assert len(body) <= LARGE_BODY
    peaks: list[float] = []
    with (
        run_logsteer(
            {"fake": DEMO}, directory, engine="fake", server=LARGE_CALL, engine_args=FAKE
        ) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        process = find_process(url)
        post(client, make_bodies(as_text(pairs[:AT_ONCE]))[0], JSON)
        idle = read_memory(process, "VmRSS")
        for _ in range(runs):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak begins anew
            answer = post(client, body, JSON)
            peaks.append(read_memory(process, "VmHWM") - idle)
    sizes = f"body of {len(body) / 1e6:.2f} MB, answer of {len(answer) / 1e6:.1f} MB"
    return {
        "runs": runs,
        "figures": {"HTTP process, MiB above idle": spread(peaks)},
        "notes": [f"{COUNT} items in one call, {sizes}; idle: {idle:.0f} MiB"],
    }


def read_memory(process: psutil.Process, name: str) -> float:
    """Return a figure of a process's status in MiB: `VmRSS` is now, `VmHWM` the peak."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024
