"""Runs the benchmarks, prints the ratios, and writes bench/results.json.

    make bench                      everything
    .venv/bin/python bench/run.py --only choices --runs 7

Peers run on the same machine, in turn with logsteer: one run of each, then the next of each.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import client
import harness
import sampling
import scoring
import steering

BENCH = Path(__file__).resolve().parent

BENCHMARKS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "lm_eval": harness.compare_harnesses,
    "lm_eval_defaults": harness.compare_defaults,
    "choices": scoring.compare_choices,
    "full_text": scoring.compare_full_text,
    "overhead": scoring.compare_with_own_engine,
    "growth": scoring.measure_growth,
    "steered_decoding": steering.compare_decoding,
    "steering_cost": steering.measure_cost,
    "steering_tlens": steering.compare_tlens,
    "diagnostics": sampling.compare_diagnostics,
    "adapters": sampling.compare_adapters,
    "client_sampling": client.measure_sampling,
}


def measure_memory() -> dict[str, Any]:
    """What `bench/rows.py` says of 2,048 tokens and a vocabulary of 128 k, on a GPU if any."""
    command = [
        sys.executable, str(BENCH / "rows.py"), "--dtype", "float32", "--hidden", "256",
        "--runs", "3", "--chunk-mib", "256",
    ]  # fmt: skip
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(output)
    return found


def show(name: str, result: dict[str, Any]) -> None:
    """Print one benchmark's ways, ratios and notes, a line each."""
    print(f"\n{name}")
    for way, values in result.get("ways", {}).items():
        print(f"  {way:<52} {json.dumps(values)}")
    for ratio, (low, median, high) in result.get("ratios", {}).items():
        print(f"  {ratio:<72} {median} ({low} to {high})")
    for note in result.get("notes", []):
        print(f"  {note}")


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*BENCHMARKS, "memory"], default=None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=BENCH / "results.json")
    options = parser.parse_args()
    wanted = options.only or [*BENCHMARKS, "memory"]
    path = options.output
    results = json.loads(path.read_text()) if path.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="logsteer-bench-") as directory:
        for name in wanted:
            started = time.monotonic()
            if name == "memory":
                results[name] = measure_memory()
            else:
                results[name] = BENCHMARKS[name](Path(directory), options.runs)
            results[name]["seconds_taken"] = round(time.monotonic() - started)
            results[name]["command"] = f".venv/bin/python bench/run.py --only {name}"
            results[name]["machine"] = f"{os.cpu_count()} cores, {platform.machine()}"
            path.write_text(json.dumps(results, indent=1) + "\n")
            show(name, results[name])
    if "growth" in wanted:
        subprocess.run([sys.executable, str(BENCH / "plot.py")], check=True)


if __name__ == "__main__":
    main()
