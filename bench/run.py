"""Runs the benchmarks, prints what is asked of them, writes bench/results.json and results.md.

    make bench                      everything
    .venv/bin/python -m bench.run --only choices --runs 7
    .venv/bin/python -m bench.run --table
    .venv/bin/python -m bench.run --model smollm2 --output bench/smollm2-results.json

Peers run on the same machine, in turn with logsteer: one run of each, then the next of each. With a
checkpoint of the user's, the rows that can take one run with it, and the others are left out.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from tests.trained import convert_smollm2

from bench import (
    captures,
    exactness,
    host_time,
    http_process,
    load_generator,
    replicas,
    score_file,
    scoring,
    start,
    steering,
    teacher,
)
from bench.bars import write_page, write_result, write_table
from bench.models import DEVICE, Workplace
from bench.servers import run_module
from bench.timing import spread
from logsteer_server.engines.needs import choose_dtype

BENCH = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A row: what measures it, how many counted runs of each way, whether it takes a model of the
    user's, and on a GPU, too.
    """

    measure: Callable[[Workplace, int], dict[str, Any]]
    runs: int = 3
    any_model: bool = False
    on_gpu: bool = True


def in_directory(measure: Callable[[Path, int], dict[str, Any]]) -> Benchmark:
    """Return the row of a function that only wants a directory for its files."""
    return Benchmark(lambda place, runs: measure(place.directory, runs))


def measure_memory(_place: Workplace, runs: int) -> dict[str, Any]:
    """What `bench/rows.py` says of 2,048 rows over a vocabulary of 128 k, on a GPU if any."""
    found = run_module("rows", runs)
    added = [way["peak_mib_added"] for name, way in found["ways"].items() if "rows" in name]
    return found | {"figures": {"MiB added at most": spread([max(added)])}}


# The rows that share a server come first, one after another.
BENCHMARKS = {
    "choices": Benchmark(scoring.compare_choices, any_model=True),
    "overhead": Benchmark(scoring.compare_with_own_engine, runs=5, any_model=True),
    "replicas": Benchmark(replicas.compare_replicas, runs=5, any_model=True, on_gpu=False),
    "lm_eval": Benchmark(scoring.compare_harnesses, any_model=True),
    "full_text": Benchmark(scoring.compare_full_text, runs=5, any_model=True),
    "steered_decoding": Benchmark(steering.compare_decoding, runs=5, any_model=True),
    "load_generator": Benchmark(load_generator.compare_load, any_model=True),
    "captures": Benchmark(captures.compare_captures, any_model=True),
    "teacher": Benchmark(teacher.compare_teachers, any_model=True),
    "hooks": Benchmark(steering.compare_hooks, runs=5, any_model=True),
    "steering_tlens": Benchmark(steering.compare_tlens, any_model=True),
    "patching": Benchmark(steering.compare_patching, runs=5, any_model=True),
    "diagnostics": Benchmark(scoring.compare_diagnostics, any_model=True),
    "exactness": Benchmark(exactness.measure_exactness, runs=1, any_model=True, on_gpu=False),
    "memory": Benchmark(measure_memory, runs=1),
    "host_time": in_directory(host_time.measure_host_time),
    "http_cpu": in_directory(http_process.measure_cpu),
    "http_memory": in_directory(http_process.measure_memory),
    "score_file": in_directory(score_file.compare_with_loop),
    "start": Benchmark(start.measure_start, any_model=True),
}
SHARING = ("choices", "overhead")
"""Rows whose server is the same one."""


def run_all(names: list[str], options: argparse.Namespace) -> list[str]:
    """Run these rows, write the results after each; return the names of those that failed."""
    path: Path = options.output
    results = json.loads(path.read_text()) if path.is_file() else {}
    failed = []
    with (
        tempfile.TemporaryDirectory(prefix="logsteer-bench-") as directory,
        contextlib.ExitStack() as stack,
    ):
        place = Workplace(Path(directory), stack)
        if options.model is not None:
            place.given = find_checkpoint(options.model)
            place.dtype = choose_dtype(options.dtype, place.given)
        for name in names:
            if name not in SHARING:
                place.stop_shared()
            benchmark, started = BENCHMARKS[name], time.monotonic()
            try:
                result = benchmark.measure(place, options.runs or benchmark.runs)
            except Exception:
                traceback.print_exc()
                failed.append(name)
                continue
            results[name] = result | place.describe() | {
                "seconds_taken": round(time.monotonic() - started),
                "command": write_command(name, options),
                "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            }  # fmt: skip
            path.write_text(json.dumps(results, indent=1) + "\n")
            path.with_suffix(".md").write_text(write_page(results))
            print(f"\n{write_result(name, results[name])}", flush=True)
    print(f"\n{write_table(results, set(names))}")
    return failed


def find_checkpoint(name: str) -> Path:
    """Return the checkpoint at a path; of `smollm2` the one that the test dependency brings."""
    return convert_smollm2() if name == "smollm2" else Path(name)


def write_command(name: str, options: argparse.Namespace) -> str:
    """Return what runs this row again."""
    words = [".venv/bin/python -m bench.run --only", name]
    if options.model is not None:
        words += ["--model", Path(options.model).name]
    if options.dtype != "auto":
        words += ["--dtype", options.dtype]
    return " ".join(words)


def main() -> int:
    """Run what was asked for; the exit status is 1 where a row failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), metavar="ROW")
    parser.add_argument("--runs", type=int, help="counted runs of each way; else the row's own")
    parser.add_argument("--output", type=Path, default=BENCH / "results.json")
    parser.add_argument("--model", help="a checkpoint to measure with, or smollm2")
    parser.add_argument("--dtype", default="auto", help="of that checkpoint; auto: the one it has")
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    options = parser.parse_args()
    if options.table:
        print(write_table(json.loads(options.output.read_text())))
        return 0
    wanted = options.only or [
        name
        for name, row in BENCHMARKS.items()
        if options.model is None or (row.any_model and (row.on_gpu or DEVICE == "cpu"))
    ]
    failed = run_all(list(filter(wanted.__contains__, BENCHMARKS)), options)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
