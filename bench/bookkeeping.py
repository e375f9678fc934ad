"""CPU time that vLLM spends on a short item beside its forward pass, in our engine and in stock
vLLM's in-process `LLM`: `bookkeeping.py compare RUNS [compiled]`.

A call has 4,096 items of 25 random tokens, of which 24 are scored, on a Llama of one layer. Each
side runs in a process of its own, on one thread, and is told when its turn is: A B A B and so on.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

ITEMS, LENGTH, VOCAB = 4_096, 25, 1_436
STEP_TOKENS, STEP_REQUESTS = 8_192, 1_024
CACHE_BYTES = 2**28
PARTS = {"forward": "_model_forward", "rows": "_get_prompt_logprobs_dict"}
"""What is measured apart, by the name of the model runner's method that does it."""

Worker = Callable[[list[list[int]]], object]


class Stopwatch:
    """Adds up the CPU time of the methods of a model runner that `PARTS` names."""

    def __init__(self, runner: Any) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        for part, name in PARTS.items():
            setattr(runner, name, self._wrap(part, getattr(runner, name)))

    def _wrap(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            started = time.process_time()
            try:
                return work(*args, **named)
            finally:
                self.seconds[part] += time.process_time() - started

        return timed


def start_ours(path: Path, compiled: bool) -> tuple[Worker, Any]:
    """Our engine; what runs texts in it, and its model runner."""
    from logsteer_server.contract.engine import EngineSpec
    from logsteer_server.contract.jobs import ScoreJob
    from logsteer_server.engines.vllm.engine import VllmEngine

    limits = {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": STEP_REQUESTS}
    spec = EngineSpec(
        "bench", "vllm", str(path), dtype="float32", compile=compiled, engine_args=limits,
        memory=f"{CACHE_BYTES >> 20}MiB",
    )  # fmt: skip
    engine = VllmEngine(spec)

    def score(texts: list[list[int]]) -> object:
        arrays = [np.array(text, np.int32) for text in texts]
        jobs = [ScoreJob(ids[:-1], ids[1:]) for ids in arrays]
        engine.add(list(enumerate(jobs)))
        results = []
        while engine.busy:
            results += engine.step()
        assert not any(result.failed for _, result in results), results[0]
        return sum(result.columns["logprob"].sum() for _, result in results)

    return score, engine._vllm.engine_core.model_executor.driver_worker.worker.model_runner


def start_stock(path: Path, compiled: bool) -> tuple[Worker, Any]:
    """Stock vLLM in this process; what runs texts in it, and its model runner."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(path), dtype="float32", enforce_eager=not compiled, block_size=32,
        kv_cache_memory_bytes=CACHE_BYTES, max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=STEP_REQUESTS, distributed_executor_backend="uni",
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)

    def score(texts: list[list[int]]) -> object:
        prompts = [{"prompt_token_ids": text} for text in texts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(
            row[token].logprob
            for output in outputs
            for token, row in list(
                zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            )[1:]
        )

    core = llm.llm_engine.engine_core.engine_core
    return score, core.model_executor.driver_worker.worker.model_runner


def serve(start: Callable[[Path, bool], tuple[Worker, Any]], path: Path, compiled: bool) -> None:
    """For each seed on stdin, score one call's texts; print the CPU seconds of its parts."""
    score, runner = start(path, compiled)
    watch = Stopwatch(runner)
    for line in sys.stdin:
        rng = np.random.default_rng(int(line))
        texts = rng.integers(10, VOCAB, (ITEMS, LENGTH)).tolist()
        watch.seconds = dict.fromkeys(PARTS, 0.0)
        started = time.process_time()
        total = score(texts)
        watch.seconds["all"] = time.process_time() - started
        print("found", json.dumps(watch.seconds | {"sum": float(total)}), flush=True)


class Side:
    """One side of the comparison, in a process of its own, on one thread."""

    ONE_THREAD: ClassVar = {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip

    def __init__(self, name: str, path: Path, compiled: bool) -> None:
        command = [sys.executable, __file__, name, str(path), str(int(compiled))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | self.ONE_THREAD,
        )  # fmt: skip

    def measure(self, seed: int) -> dict[str, float]:
        """CPU seconds of the parts of one call, and the sum of its log-probabilities."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seed, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("found "):
                found: dict[str, float] = json.loads(line.removeprefix("found "))
                return found
        raise RuntimeError(f"the process ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def compare_bookkeeping(directory: Path, runs: int, compiled: bool = False) -> dict[str, Any]:
    """CPU microseconds an item of both sides, by part, each as [minimum, median, maximum]."""
    from models import make_model

    path = make_model(directory, vocab=VOCAB, hidden=64, layers=1)
    sides = {name: Side(name, path, compiled) for name in STARTS}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    try:
        for seed in range(runs + 1):
            for name, side in sides.items():
                parts = side.measure(seed)
                parts["bookkeeping"] = parts["all"] - parts["forward"] - parts["rows"]
                if seed:
                    found[name].append(parts)
    finally:
        for side in sides.values():
            side.close()
    for ours, stock in zip(found["ours"], found["stock"], strict=True):
        assert abs(ours["sum"] - stock["sum"]) < 1e-5 * abs(stock["sum"]), (ours, stock)
    return {
        "runs": runs, "compiled": compiled, "unit": "microseconds of CPU an item",
        "ways": {name: _spread_parts(parts) for name, parts in found.items()},
        "ours_to_stock": {
            part: _spread([a[part] / b[part] for a, b in zip(*found.values(), strict=True)])
            for part in ("bookkeeping", "all")
        },
    }  # fmt: skip


def _spread_parts(found: list[dict[str, float]]) -> dict[str, list[float]]:
    return {
        part: _spread([parts[part] / ITEMS * 1e6 for parts in found])
        for part in ("all", "forward", "rows", "bookkeeping")
    }


def _spread(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [float(f"{x:.4g}") for x in (ordered[0], ordered[len(ordered) // 2], ordered[-1])]


STARTS = {"ours": start_ours, "stock": start_stock}


def main() -> None:
    """Compare and print what was found, or be one side of the comparison."""
    if sys.argv[1] in STARTS:
        serve(STARTS[sys.argv[1]], Path(sys.argv[2]), sys.argv[3] == "1")
        return
    with tempfile.TemporaryDirectory() as directory:
        result = compare_bookkeeping(Path(directory), int(sys.argv[2]), "compiled" in sys.argv)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
