"""How long an engine's steps take: fitted to measurements of the real engine, on this machine.

    .venv/bin/python -m bench.capacity.steps                    the demo model and one of 18 M
    .venv/bin/python -m bench.capacity.steps --model CHECKPOINT --dtype bfloat16 --compile

A step is timed by itself: texts of random tokens that fit into it, all of which are scored, in an
engine that is called where it runs. On a CPU the engine has one thread and its time is that of the
CPU, which neighbours disturb less; on a GPU it is the clock's. The figures go to `measured.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.capacity.engine import StepCost, count_pairs

BENCH = Path(__file__).resolve().parents[1]
MEASURED = Path(__file__).with_name("measured.json")
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
LENGTHS = (25, 100, 400, 900)
TOKENS = (25, 400, 1600, 3600, 7200)
"""About so many tokens in a step, of texts of each length."""
RUNS = 5


def time_steps(path: str, dtype: str, compiled: bool) -> list[tuple[int, int, float]]:
    """Return tokens, sequences and the median seconds of steps of each size.

    Errors: RuntimeError where a text could not be scored.
    """
    import torch

    from logsteer_server.contract.engine import EngineSpec
    from logsteer_server.contract.jobs import ScoreJob
    from logsteer_server.engines.process import build_engine

    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    memory = 0.85 if torch.cuda.is_available() else "256MiB"
    spec = EngineSpec("steps", "vllm", path, dtype=dtype, compile=compiled, memory=memory)
    engine = build_engine(spec)
    rng = np.random.default_rng(0)
    found = []
    for length in [n for n in LENGTHS if n < engine.info.context_length]:
        for count in sorted({max(1, tokens // length) for tokens in TOKENS}):
            times = []
            for run in range(RUNS + 1):
                ids = rng.integers(10, engine.info.vocab_size, (count, length + 1), dtype=np.int32)
                engine.add([(n, ScoreJob(own[:-1], own[1:])) for n, own in enumerate(ids)])
                started, results = clock(), []
                while engine.busy:
                    results += engine.step()
                if run:
                    times.append(clock() - started)
                if len(results) != count or any(result.failed for _, result in results):
                    raise RuntimeError(f"{count} texts of {length} tokens: {results[:1]}")
            found.append((count * length, count, float(np.median(times))))
    engine.close()
    return found


def fit(steps: Sequence[tuple[int, int, float]]) -> StepCost:
    """Fit the parts of a step's time, none below 0, so that relative errors are least."""
    from scipy.optimize import nnls

    rows = np.array([(1.0, n, texts, texts * count_pairs(0, n / texts)) for n, texts, _ in steps])
    seconds = np.array([taken for *_, taken in steps])
    parts, _ = nnls(rows / seconds[:, None], np.ones(len(steps)))
    return StepCost(*map(float, parts))


def describe(steps: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    """Return the fitted parts, the steps themselves, and how far off the fit is of them."""
    cost = fit(steps)
    errors = [
        abs(cost.measure(n, texts, texts * count_pairs(0, n / texts)) / taken - 1)
        for n, texts, taken in steps
    ]
    return {
        "fixed_ms": float(f"{1e3 * cost.fixed_s:.4g}"),
        "token_us": float(f"{1e6 * cost.token_s:.4g}"),
        "sequence_us": float(f"{1e6 * cost.sequence_s:.4g}"),
        "pair_ns": float(f"{1e9 * cost.pair_s:.4g}"),
        "largest_error": round(max(errors), 3),
        "mean_error": round(float(np.mean(errors)), 3),
        "steps": [[n, count, float(f"{1e3 * taken:.4g}")] for n, count, taken in steps],
    }


def measure(path: Path, dtype: str, compiled: bool) -> dict[str, Any]:
    """Time the steps of a checkpoint in a process of its own, and fit them."""
    command = [sys.executable, "-m", "bench.capacity.steps", "--inside", str(path), dtype]
    output = subprocess.run(
        [*command, *(["--compile"] if compiled else [])],
        stdout=subprocess.PIPE, text=True, check=True, env=os.environ | ONE_THREAD,
        cwd=BENCH.parent,
    ).stdout  # fmt: skip
    steps = json.loads(output[output.rindex("\nfound ") + len("\nfound ") :])
    return describe([(int(n), int(count), taken) for n, count, taken in steps])


def read_measured() -> dict[str, Any]:
    """Return what has been measured."""
    found: dict[str, Any] = json.loads(MEASURED.read_text()) if MEASURED.is_file() else {}
    return found


def write_measured(section: str, found: dict[str, Any]) -> None:
    """Put a section into `measured.json`, in place of what it had there."""
    everything = read_measured() | {section: found}
    MEASURED.write_text(json.dumps(dict(sorted(everything.items())), indent=1) + "\n")


def find_models(directory: Path) -> dict[str, Path]:
    """Return the demo model and one of 18 M parameters, with random weights."""
    sys.path.insert(0, str(BENCH))
    from models import DEMO, make_model

    return {"demo": DEMO, "18 M": make_model(directory)}


def main() -> None:
    """Measure, print, and write; with --inside, be the process that is timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint of yours")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--inside", nargs=2, metavar=("PATH", "DTYPE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        steps = time_steps(*given.inside, given.compile)
        print(f"\nfound {json.dumps(steps)}", flush=True)
        os._exit(0)
    with tempfile.TemporaryDirectory(prefix="logsteer-steps-") as directory:
        if given.model:
            found = measure(given.model, given.dtype, given.compile)
            print(json.dumps(found, indent=1))
            return
        models = find_models(Path(directory))
        found = {name: measure(path, given.dtype, given.compile) for name, path in models.items()}
    write_measured("steps", found)
    print(json.dumps({n: {k: v for k, v in f.items() if k != "steps"} for n, f in found.items()}))


if __name__ == "__main__":
    main()
