"""What the client itself costs: `Client.sample` on the fake engine, whose answers take no work.

    .venv/bin/python bench/run.py --only client_sampling

Each figure is of a process of its own, which only samples: its CPU time (so waiting is no part of
it), and by how much its memory has grown at its peak. `limit_us_per_draw` is what a draw may take.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from logsteer import AsyncClient, Client
from servers import run_logsteer
from timing import spread

DEMO = Path(__file__).resolve().parents[1] / "demo" / "model"
POOL, DRAWS = 1_000, 32_768
BATCH, AT_ONCE = 256, 4
TOKENS = 16
LONG = 64
LIMIT_US = 40.0
"""Of client time, a draw."""
COLUMNS = ["log_q", "rb_entropy"]


def measure_sampling(directory: Path, runs: int) -> dict[str, Any]:
    """Measure 32,768 draws with replacement from 1,000 prompts, by what is done with them."""
    engine = {"vocab_size": 512, "context_length": 512}
    ways: dict[str, list[str]] = {
        "Client, into a file": [],
        "the same, with rewards": ["--reward"],
        "AsyncClient, into a file": ["--asynchronous"],
        "Client, into a file, 64 tokens and two columns": ["--long"],
    }
    found: dict[str, Any] = {}
    with run_logsteer({"fake": DEMO}, directory, engine="fake", engine_args=engine) as url:
        for name, flags in ways.items():
            times = [_run(url, directory, flags) for _ in range(runs)]
            found[name] = {
                "us_per_draw": spread([one["us_per_draw"] for one in times]),
                "limit_us_per_draw": LIMIT_US,
                "memory_mib": spread([one["memory_mib"] for one in times]),
                "draws_per_s": spread([one["draws_per_s"] for one in times]),
            }
    note = f"{DRAWS} draws of {POOL} prompts, {TOKENS} tokens, {AT_ONCE} x {BATCH} prompts at once"
    return {"runs": runs, "ways": found, "notes": [note]}


def _run(url: str, directory: Path, flags: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, url, str(directory), *flags]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    found: dict[str, float] = json.loads(output)
    return found


def _rate(_row: Any, _prompt: str, completion: str) -> float:
    return float(len(completion))


async def _sample_async(url: str, prompts: list[str], **options: Any) -> int:
    async with AsyncClient(url) as client:
        return len(await client.sample(prompts, **options))


def main() -> None:
    """Sample once, and print the figures of this process as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("directory", type=Path)
    for flag in ("--reward", "--asynchronous", "--long"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    prompts = [f"Once upon a time there were {number} cats" for number in range(POOL)]
    options: dict[str, Any] = {
        "with_replacement": True, "batch_size": BATCH, "concurrency": AT_ONCE, "progress": False,
        "seed": 0, "max_tokens": LONG if given.long else TOKENS,
    }  # fmt: skip
    if given.long:
        options["columns"] = COLUMNS
    if given.reward:
        options["reward"] = _rate

    def sample(count: int) -> None:
        path = given.directory / "samples.jsonl"
        path.unlink(missing_ok=True)
        own = {**options, "count": count, "file": path}
        if given.asynchronous:
            found = asyncio.run(_sample_async(given.url, prompts, **own))
        else:
            with Client(given.url) as client:
                found = len(client.sample(prompts, **own))
        assert found == count

    # As many batches as are under way at once: their memory is what may be taken.
    sample(2 * BATCH * AT_ONCE)
    before, cpu, wall = _peak_mib(), time.process_time(), time.perf_counter()
    sample(DRAWS)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    figures = {
        "us_per_draw": 1e6 * cpu / DRAWS,
        "memory_mib": _peak_mib() - before,
        "draws_per_s": DRAWS / wall,
    }
    sys.stdout.write(json.dumps(figures))


def _peak_mib() -> float:
    # getrusage tells of the parent's peak, too, where that was larger.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main()
