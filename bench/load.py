"""Chaos: many callers with mixed requests on one server, while engines are killed and stopped.

    .venv/bin/python -m bench.load --requests 20000 --clients 256 --seed 0

Three models on two engines serve scores, perplexities of streamed texts, steered streams, sweeps,
uploads and calls that are broken off; some readers are slow, and some requests are not to be
answered. Every answer is compared with that of the same request on the quiet server before. At
times drawn from the seed, an engine is killed (SIGKILL) or stopped (SIGSTOP). All of it runs on
this machine's loopback and ends by itself.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from tests.conftest import DEMO_MODEL, STORIES_MODEL, tlens_model, vllm_model
from tests.faults.processes import find_engines
from tests.servers import Server

from logsteer._events import EventParser
from logsteer.errors import APIError, problem_error

TOLERANCE = 1e-3
"""Nats by which a sum over a request's tokens may differ from that of the quiet server."""
WORDS = [
    "the",
    "little",
    "cat",
    "ran",
    "to",
    "see",
    "a",
    "big",
    "red",
    "ball",
    "and",
    "then",
    "went",
    "home",
    "with",
    "her",
    "friend",
]


@dataclass(frozen=True)
class Plan:
    """A request, and what is done with its answer. `refused`: the status that it is to have."""

    kind: str
    path: str
    body: Any
    refused: int | None = None


def write_text(rng: random.Random, words: int) -> str:
    """Return so many words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def draw_plans(rng: random.Random, models: Sequence[str], count: int) -> list[Plan]:
    """Draw requests of all kinds; equal ones are drawn again and again."""
    plans = []
    for n in range(count):
        model = models[n % len(models)]
        vector = [round(rng.gauss(0, 0.3), 3) for _ in range(WIDTHS[model])]
        steering = {"vectors": [{"data": {"1": vector}, "scale": rng.choice([0.5, 1.0])}]}
        item = {"context": write_text(rng, 12), "targets": [" cat", " red ball", " went home"]}
        text = write_text(rng, 400)
        generation = {"prompts": [write_text(rng, 6)], "max_tokens": 16, "seed": n}
        score = {"model": model, "items": [item]}
        drawn = {"model": model, "stream": True, **generation}
        clamp = {"data": {"1": vector}, "op": "clamp", "params": {"min": 1e308}}
        poison = {"model": model, "prompts": ["a"], "steering": {"vectors": [clamp]}}
        steered = {"steering": steering}
        plans += [
            Plan("score", "/logprob", score),
            Plan("steered score", "/logprob", score | steered),
            Plan("perplexity", f"/perplexity/stream?model={model}&context_length=64", text),
            Plan("steer", "/steer", drawn | steered),
            Plan("slow", "/generate", drawn),
            Plan("cancel", "/generate", drawn | {"n": 4}),
            Plan("sweep", "/sweep", score | steered | {"scales": [-1, 0, 1]}),
            Plan("upload", f"/vectors/load-{n}", vector),
            Plan("poison", "/steer", poison, 422),
            Plan("poison", "/logprob", {"model": model, "items": [{"context": 1}] * 50}, 422),
        ]
    return plans


WIDTHS = {"demo": 128, "bridge": 128, "stories": 64}


def read_numbers(kind: str, document: dict[str, Any]) -> list[float] | None:
    """Return what of an answer has to be equal, in one row: ids, log-probabilities and counts."""
    match kind:
        case "score" | "steered score":
            return [x for r in document["results"] for t in r["targets"] for x in t["logprobs"]]
        case "perplexity":
            return [document["total"]["sum_logprob"], document["total"]["num_tokens"]]
        case "steer" | "slow":
            found = [c for r in document["results"] for c in r["completions"]]
            return [x for c in found for x in (*c["token_ids"], *c["logprobs"])]
        case "sweep":
            return [t["logprob"] for p in document["points"] for i in p["items"]
                    for t in i["targets"]]  # fmt: skip
    return None


def differs(found: list[float] | None, wanted: list[float] | None) -> bool:
    """Return whether two answers differ by more than rounding."""
    if found is None or wanted is None:
        return found is not wanted
    return len(found) != len(wanted) or not np.allclose(found, wanted, 0, TOLERANCE)


JSON = "application/json"


def check(answer: httpx.Response) -> dict[str, Any]:
    """Return an answer's document. Errors: APIError; ValueError where it is none."""
    document: dict[str, Any] = answer.json()
    if answer.is_error:
        raise problem_error(document, retry_after=float(answer.headers.get("retry-after", 0)))
    return document


MAX_TRIES = 200
LONGEST_WAIT_S = 5.0


@dataclass
class Report:
    """What came of all requests."""

    done: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


class Caller:
    """Sends requests, again where the server says that it helps, and notes what comes back."""

    def __init__(self, http: httpx.AsyncClient, report: Report) -> None:
        self._http = http
        self._report = report

    async def ask(self, plan: Plan, rng: random.Random) -> Any:
        """Return what `read_numbers` reads of the answer, nothing where it is refused as planned.

        Errors: APIError for another refusal; RuntimeError.
        """
        for _ in range(MAX_TRIES):
            try:
                answer = await self._send(plan)
                if plan.refused is not None:
                    raise RuntimeError(f"answered, not refused: {answer}")
                return answer
            except APIError as refusal:
                if refusal.status == plan.refused:
                    return None
                if not refusal.retryable:
                    raise
                self._report.retried[refusal.code] += 1
                wait = min(LONGEST_WAIT_S, refusal.retry_after or 1)
                await asyncio.sleep(wait * rng.uniform(0.8, 1.2))
        raise RuntimeError(f"{plan.path} was put off {MAX_TRIES} times")

    async def _send(self, plan: Plan) -> Any:
        match plan.kind:
            case "upload":
                return await self._upload(plan)
            case "perplexity":
                document = await self._stream(plan, plan.body.encode(), "text/plain")
            case "steer" | "slow" | "cancel":
                document = await self._stream(plan, json.dumps(plan.body).encode(), JSON)
            case _:
                document = check(await self._http.post(plan.path, json=plan.body))
        return read_numbers(plan.kind, document)

    async def _upload(self, plan: Plan) -> None:
        from safetensors.numpy import save

        content = save({"layers.1": np.array(plan.body, np.float32)})
        name = f"{plan.path}-{random.getrandbits(64):x}"
        check(await self._http.put(name, content=content))
        back = await self._http.get(f"{name}/content")
        if back.is_error:
            check(back)
        check(await self._http.delete(name))

    async def _stream(self, plan: Plan, content: bytes, kind: str) -> Any:
        """Return the result of a stream; nothing of one that is broken off."""
        headers = {"Content-Type": kind}
        async with self._http.stream("POST", plan.path, content=content, headers=headers) as answer:
            if answer.is_error:
                await answer.aread()
                check(answer)
            if plan.kind == "slow":
                await asyncio.sleep(2.0)
            events, found = EventParser(), None
            async for chunk in answer.aiter_bytes():
                for event in events.feed(chunk):
                    if event.name == "error":
                        raise problem_error(json.loads(event.data))
                    if event.name == "piece" and plan.kind == "cancel":
                        return None
                    if event.name == "result":
                        found = json.loads(event.data)
        if found is None:
            raise RuntimeError(f"{plan.path}: the stream had no result")
        return found


async def run_client(
    caller: Caller,
    plans: Sequence[Plan],
    wanted: Sequence[Any],
    todo: "asyncio.Queue[int]",
    report: Report,
    seed: int,
) -> None:
    """Send requests off the list until none is left."""
    rng = random.Random(seed)
    while not todo.empty():
        index = todo.get_nowait()
        plan = plans[index]
        began = time.monotonic()
        try:
            found = await caller.ask(plan, rng)
            if plan.kind not in ("cancel", "upload") and differs(found, wanted[index]):
                report.wrong.append(f"{plan.kind}: {found} is not {wanted[index]}"[:600])
        except Exception as error:
            report.wrong.append(f"{plan.kind}: {type(error).__name__}: {error}")
        report.done[plan.kind] += 1
        report.waits.append(time.monotonic() - began)


async def inject(server: Server, report: Report, rng: random.Random, every_s: float) -> None:
    """Kill or stop an engine again and again."""
    while True:
        await asyncio.sleep(every_s * rng.uniform(0.7, 1.3))
        if engines := find_engines(server):
            victim, what = rng.choice(engines), rng.choice([signal.SIGKILL, signal.SIGSTOP])
            os.kill(victim, what)
            report.faults.append(f"{what.name} of {victim}")


async def watch(pid: int, report: Report, total: int) -> None:
    """Note the server's memory in MiB by the share of requests that are done."""
    while True:
        share = sum(report.done.values()) / total
        report.memory.append((share, psutil.Process(pid).memory_info().rss >> 20))
        await asyncio.sleep(1)


def read_left(pid: int, metrics: str) -> dict[str, float]:
    """Return what the server has open or reserved."""
    process = psutil.Process(pid)
    lines = [line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#")]
    left = {name: float(value) for name, value in lines if "pending" in name}
    return left | {"descriptors": process.num_fds(), "threads": process.num_threads()}


async def run_load(server: Server, arguments: argparse.Namespace, models: Sequence[str]) -> int:
    """Ask quietly, then with all clients and faults; print what came of it."""
    assert server.process is not None
    pid, rng, report = server.process.pid, random.Random(arguments.seed), Report()
    plans = draw_plans(rng, models, arguments.variants)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:
        began = time.monotonic()
        quiet = Caller(http, Report())
        wanted = [await quiet.ask(plan, rng) for plan in plans]
        print(
            f"{len(plans)} requests asked quietly in {time.monotonic() - began:.0f} s", flush=True
        )
        before = read_left(pid, (await http.get("/metrics")).text)
        todo: asyncio.Queue[int] = asyncio.Queue()
        for _ in range(arguments.requests):
            todo.put_nowait(rng.randrange(len(plans)))
        began = time.monotonic()
        others = [asyncio.create_task(watch(pid, report, arguments.requests))]
        if arguments.fault_every_s:
            others.append(asyncio.create_task(inject(server, report, rng, arguments.fault_every_s)))
        caller = Caller(http, report)
        await asyncio.gather(
            *(run_client(caller, plans, wanted, todo, report, n) for n in range(arguments.clients))
        )
        seconds = time.monotonic() - began
        for task in others:
            task.cancel()
    await asyncio.sleep(arguments.settle_s)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        after = read_left(pid, (await http.get("/metrics")).text)
        cards = (await http.get("/models")).json()["models"]
    show(report, seconds, before, after, cards)
    return 1 if report.wrong else 0


def show(
    report: Report, seconds: float, before: dict[str, float], after: dict[str, float], cards: Any
) -> None:
    """Print the whole report."""
    second = [m for share, m in report.memory if 0.1 <= share < 0.2]
    last = [m for share, m in report.memory if share >= 0.9]
    print(f"\n{sum(report.done.values())} requests in {seconds:.0f} s: {dict(report.done)}")
    print(f"faults: {dict(Counter(f.split()[0] for f in report.faults))}")
    print(f"tried again after: {dict(report.retried)}")
    waits = sorted(report.waits)
    print(f"seconds a request: median {statistics.median(waits):.2f}, longest {waits[-1]:.1f}")
    if second and last:
        early, late = statistics.median(second), statistics.median(last)
        most = max(size for _, size in report.memory)
        print(f"memory: second tenth {early} MiB, last {late} MiB: {late / early:.3f}; most {most}")
    print("left, before and after:", {k: (before.get(k), v) for k, v in after.items()})
    print("models:", {card["id"]: (card["state"], card["restarts"]) for card in cards})
    print(f"wrong: {len(report.wrong)}")
    for line, count in Counter(report.wrong).most_common(20):
        print(f"  {count} x {line}")


def main() -> int:
    """Start the server, run the load, end the server; the exit status says whether all was well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", type=int, default=20, help="times ten different requests")
    parser.add_argument("--fault-every-s", type=float, default=60.0, help="0: no faults")
    parser.add_argument("--settle-s", type=float, default=15.0)
    arguments = parser.parse_args()
    configured = [vllm_model("demo", DEMO_MODEL), tlens_model("bridge", DEMO_MODEL)]
    if STORIES_MODEL.is_dir():
        configured.append(vllm_model("stories", STORIES_MODEL))
    with tempfile.TemporaryDirectory(prefix="load-") as directory:
        config = {"models": configured, "max_restarts": 1000}
        server = Server.start(config, Path(directory))
        try:
            server.wait_until_ready()
            return asyncio.run(run_load(server, arguments, [m["id"] for m in configured]))
        finally:
            server.stop()
            print(f"the server ended with {server.process.returncode if server.process else None}")
            errors = [x for x in server.lines if " ERROR " in x or "Traceback" in x]
            print(f"errors logged: {len(errors)}", *errors[:10], sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())
