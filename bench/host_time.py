"""How long a device waits for the host between two decode steps: `host_time.py RUNNER MODEL RUNS`.

It is the time of this thread's CPU from where the tokens of a step are drawn, which a device has
computed by then, to where the model of the next step is called: tokens are taken in, results made,
the next step scheduled and prepared. The engine is told that a device works beside it. On a CPU the
kernels of the V2 runner are interpreted: they are counted, and their time is left out.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.timing import spread
from bench.workplace import GREEDY, generate, make_model, run_module
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import GenerateJob
from logsteer_server.contract.plan import Site, SteeringPlan

BATCHES = (1, 32, 256)
PROMPT, GENERATED = 16, 48


class Gaps:
    """Milliseconds from the end of one function to the beginning of another, by step.

    `kernels`: calls in between whose time is left out.
    """

    def __init__(self) -> None:
        self.ms: list[float] = []
        self.kernels: list[int] = []
        self._ended: float | None = None
        self._left_out = [0.0]

    def begin_after(self, owner: Any, name: str) -> None:
        """Have a gap begin where this function returns."""

        def end(call: Callable[[], Any]) -> Any:
            found = call()
            self._left_out, self._ended = [], time.thread_time()
            return found

        wrap(owner, name, end)

    def end_before(self, owner: Any, name: str) -> None:
        """Have a gap end where this function is called."""

        def begin(call: Callable[[], Any]) -> Any:
            if self._ended is not None:
                self.ms.append(1e3 * (time.thread_time() - self._ended - sum(self._left_out)))
                self.kernels.append(len(self._left_out))
                self._ended = None
            return call()

        wrap(owner, name, begin)

    def leave_out(self, owner: Any, name: str) -> None:
        """Leave the time of this function out."""

        def time_call(call: Callable[[], Any]) -> Any:
            started = time.thread_time()
            found = call()
            self._left_out.append(time.thread_time() - started)
            return found

        wrap(owner, name, time_call)


def wrap(owner: Any, name: str, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Have calls of a function go through another one, which is given what makes the call."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *args, **named: around(lambda: function(*args, **named)))


def watch(engine: Any, runner: str) -> Gaps:
    """Measure an engine as that of a device which works beside this process."""
    engine._vllm.overlaps = True
    gaps, own = Gaps(), engine._vllm.engine_core.model_executor.driver_worker.worker.model_runner
    gaps.end_before(own.model, "forward")
    if runner == "v1":
        gaps.begin_after(own.sampler, "forward")
    else:
        from triton.runtime.interpreter import GridExecutor

        gaps.begin_after(own, "sample")
        gaps.leave_out(GridExecutor, "__call__")
    return gaps


def make_jobs(engine: Any, count: int, *, steered: bool) -> list[GenerateJob]:
    """Jobs of as many sequences, greedy, without log-probabilities."""
    rng, info = np.random.default_rng(count), engine.info
    vector_D = rng.normal(size=info.hidden_size).astype(np.float32)
    plan = SteeringPlan((Site(info.num_layers // 2, "resid_post", vector_D),)) if steered else None
    prompts = rng.integers(10, info.vocab_size, (count, PROMPT), dtype=np.int32)
    return [
        GenerateJob(prompt, GENERATED, GREEDY, ignore_eos=True, logprobs=False, plan=plan)
        for prompt in prompts
    ]


def measure_host_time(directory: Path, runs: int) -> dict[str, Any]:
    """Milliseconds that a step waits for the host, of 36 tiny layers, by runner and sequences."""
    path, found = make_model(directory, vocab=2048, hidden=64, layers=36), dict[str, Any]()
    for runner in ("v1", "v2"):
        found |= run_module("host_time", runner, path, runs)
    figures = {name: way["ms"] for name, way in found.items()}
    return {"runs": runs, "ways": found, "figures": figures}


def main() -> None:
    """Print the medians of runs, smallest, median and largest, by runner, kind and sequences."""
    from logsteer_server.engines.vllm.engine import VllmEngine

    runner, path, runs = sys.argv[1:]
    engine = VllmEngine(
        EngineSpec(
            "bench", "vllm", path, dtype="float32", memory="512MiB", compile=False, runner=runner,
            engine_args={"max_num_seqs": max(BATCHES), "max_num_batched_tokens": 8192},
        )
    )  # fmt: skip
    gaps, found = watch(engine, runner), dict[str, Any]()
    for count in BATCHES:
        for kind in ("unsteered", "steered"):
            medians = []
            for _ in range(int(runs) + 1):
                gaps.ms, gaps.kernels = [], []
                generate(engine, make_jobs(engine, count, steered=kind == "steered"))
                # The first steps read prompts, after the last ones requests end.
                medians.append(statistics.median(gaps.ms[4:-2]))
            found[f"{runner}, {count} {kind}"] = {
                "ms": spread(medians[1:]),
                "kernels_left_out": statistics.median(gaps.kernels),
            }
    print("result", json.dumps(found), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
