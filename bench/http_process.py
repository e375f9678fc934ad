"""What the HTTP process and the pipe cost a short item, and how much memory a large call takes.

The model is the fake engine, whose answers take next to no work. CPU time is that of a process, all
its threads, from /proc; the client is another process and no part of it. A process of its own,

    .venv/bin/python -m bench.http_process TOKENIZER COUNT < ANSWER.json

prints the CPU microseconds an item of what any service has to do with such calls: read the JSON of
their bodies, encode the texts, write the JSON of the answer given; and those of the fake engine,
called where its jobs are made.
"""

import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import psutil
from tokenizers import Tokenizer

from bench.timing import divide, spread
from bench.workplace import (
    DEMO,
    corpus,
    find_engines,
    find_process,
    read_cpu,
    run_logsteer,
    run_module,
)
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.engines.fake import FakeEngine

Item = dict[str, Any]
AT_ONCE = 256
"""Items of a call."""
FAKE = {"vocab_size": 2048, "context_length": 512}
"""Settings of the fake engine that answers them."""


def make_pairs(
    count: int, seed: int, ending: str = " Once upon a time there was a cat."
) -> list[tuple[str, str]]:
    """Return contexts and targets of 25 tokens together, in the mean, with the demo's tokenizer.

    So many they are with the ending that is given where nothing else is.
    """
    draw = random.Random(seed)
    countries, cities = list(corpus.CAPITALS), list(corpus.CAPITALS.values())
    elements = list(corpus.SYMBOLS.items())
    pairs = []
    for _ in range(count):
        element, symbol = draw.choice(elements)
        facts = f"The chemical symbol for {element} is {symbol}. The capital of"
        pairs.append((f"{facts} {draw.choice(countries)} is", f" {draw.choice(cities)}.{ending}"))
    return pairs


def as_text(pairs: Sequence[tuple[str, str]]) -> list[Item]:
    """Return the pairs as items of `/logprob`."""
    return [{"context": context, "targets": [target]} for context, target in pairs]


def as_ids(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Item]:
    """Return the pairs as items of `/logprob` that are encoded already."""
    joined = tokenizer.encode_batch([context + target for context, target in pairs])
    contexts = tokenizer.encode_batch([context for context, _ in pairs])
    return [
        {"context_ids": own.ids[: len(first.ids)], "target_ids": [own.ids[len(first.ids) :]]}
        for own, first in zip(joined, contexts, strict=True)
    ]


def make_bodies(items: Sequence[Item], model: str = "fake") -> list[bytes]:
    """Return the bodies of the calls that score the items."""
    starts = range(0, len(items), AT_ONCE)
    return [orjson.dumps({"model": model, "items": items[n : n + AT_ONCE]}) for n in starts]


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint as the library `tokenizers` has it."""
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def time_minimum(bodies: Sequence[bytes], answer: dict[str, Any], tokenizer: Tokenizer) -> float:
    """Return the CPU seconds for reading the bodies, encoding their texts, writing the answers."""
    started = time.process_time()
    for body in bodies:
        items = orjson.loads(body)["items"]
        texts = [item["context"] + item["targets"][0] for item in items]
        ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        assert len(ids) == len(items)
        orjson.dumps(answer)
    return time.process_time() - started


def time_fake_engine(count: int) -> float:
    """Return the CPU seconds of the fake engine for so many items, made before."""
    engine = FakeEngine(EngineSpec("fake", "fake", str(DEMO), engine_args=FAKE))
    rng = np.random.default_rng(0)
    ids_NT = rng.integers(10, 500, (count, 26), dtype=np.int32)
    jobs = list(enumerate(ScoreJob(ids_T[:-1], ids_T[-13:]) for ids_T in ids_NT))
    started = time.process_time()
    for first in range(0, count, AT_ONCE):
        engine.add(jobs[first : first + AT_ONCE])
        engine.step()
    return time.process_time() - started


def main() -> None:
    """Measure once, after calls that warm up."""
    path, count = Path(sys.argv[1]), int(sys.argv[2])
    tokenizer = load_tokenizer(path)
    answer = json.load(sys.stdin)
    bodies = make_bodies(as_text(make_pairs(count, seed=1)))
    time_minimum(bodies[:8], answer, tokenizer)
    time_fake_engine(8 * AT_ONCE)
    found = {
        "tokenising and JSON alone": time_minimum(bodies, answer, tokenizer),
        "the fake engine alone": time_fake_engine(count),
    }
    per_item = {name: 1e6 * seconds / count for name, seconds in found.items()}
    print("result", json.dumps(per_item))


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
            figures = (
                score(TEXT, count)
                | score(IDS, count)
                | run_module("http_process", DEMO, count, input=answer.decode())
            )
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


if __name__ == "__main__":
    main()
