"""`logsteer score-file` against a loop over the same requests that reads no answer.

    .venv/bin/python -m bench.run --only score_file

The server is on one core, with its engine, and what asks it on another, each run a process of its
own. The fake engine's answers take next to no work: rows come as fast as HTTP can take them.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

import logsteer
from bench.servers import print_result, run_logsteer, run_module
from bench.timing import divide, spread
from logsteer.corpus import JobLimits

ROWS = {"fake": 49_152, "vllm": 4_096}
"""Engine -> rows of a file."""
FIELD = {"logprob": "items", "perplexity": "texts"}
"""Endpoint -> field of its rows in a request."""
AT_ONCE = 8
"""Requests of the loop that are under way at once."""
JOB, LOOP = "score-file", "loop that reads no answer"
LIMITS = JobLimits(batch_size=256)


def compare_with_loop(directory: Path, runs: int) -> dict[str, object]:
    """Rows per second and CPU time a row of a job and of a loop, by engine and endpoint."""
    from bench.models import DEMO
    from bench.short_items import FAKE, as_text, make_pairs

    if (os.cpu_count() or 1) < 2:
        raise RuntimeError("this row takes two cores")
    ways: dict[str, dict[str, list[float]]] = {}
    ratios: dict[str, list[float]] = {}
    for engine, count in ROWS.items():
        pairs = make_pairs(count, seed=3)
        rows: dict[str, Sequence[object]] = {
            "logprob": as_text(pairs),
            "perplexity": [a + b for a, b in pairs],
        }
        own = {"engine_args": FAKE} if engine == "fake" else {}
        with on_cores({0}), run_logsteer({"demo": DEMO}, directory, engine, **own) as url:
            for endpoint in FIELD:
                source = directory / f"{endpoint}.jsonl"
                source.write_text("".join(json.dumps(row) + "\n" for row in rows[endpoint]))
                turns = [
                    {way: _run(url, endpoint, source, way) for way in (JOB, LOOP)}
                    for _ in range(runs + 1)
                ]
                found = {way: [turn[way] for turn in turns[1:]] for way in (JOB, LOOP)}
                for way, figures in found.items():
                    ways[f"{engine}, {endpoint}, {way}"] = {
                        "rows_per_s": spread([count / one["seconds"] for one in figures]),
                        "us_per_row": spread([1e6 * one["cpu_s"] / count for one in figures]),
                    }
                own_s, loop_s = ([one["seconds"] for one in found[way]] for way in (JOB, LOOP))
                ratios[f"{engine}, {endpoint}, {JOB} / {LOOP}"] = divide(loop_s, own_s)
    note = "items of 25 tokens, requests of 256; server and client on a core each"
    return {"runs": runs, "ways": ways, "ratios": ratios, "notes": [note]}


@contextlib.contextmanager
def on_cores(numbers: set[int]) -> Iterator[None]:
    """Have this process, and those that it starts, on some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, numbers)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _run(url: str, endpoint: str, source: Path, way: str) -> dict[str, float]:
    with on_cores({1}):
        return run_module("score_file", url, endpoint, source, way)


def run_job(url: str, endpoint: str, source: Path) -> None:
    """Score the file."""
    target = source.with_name(f"{endpoint}-scores.jsonl")
    scores = logsteer.score_file(
        source, target, endpoint, base_url=url, restart=True, progress=False, limits=LIMITS
    )
    if scores.failed:
        raise RuntimeError(f"{scores.failed} rows failed: see {target}")


async def run_loop(url: str, endpoint: str, source: Path) -> None:
    """Send requests with the file's rows, and look at nothing of their answers but the status."""
    lines = source.read_bytes().splitlines()
    parts = (lines[first : first + 256] for first in range(0, len(lines), 256))
    headers = {"Content-Type": "application/json", "X-Priority": "batch"}
    async with httpx.AsyncClient(base_url=url, timeout=600, headers=headers) as client:

        async def send() -> None:
            for part in parts:
                body = b'{"%b":[%b]}' % (FIELD[endpoint].encode(), b",".join(part))
                answer = await client.post(f"/{endpoint}", content=body)
                answer.raise_for_status()

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))


def main() -> None:
    """Run one way once, and print its seconds and CPU seconds."""
    url, endpoint, source, way = sys.argv[1:]
    cpu, started = time.process_time(), time.perf_counter()
    if way == LOOP:
        asyncio.run(run_loop(url, endpoint, Path(source)))
    else:
        run_job(url, endpoint, Path(source))
    figures = {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    print_result(figures)


if __name__ == "__main__":
    main()
