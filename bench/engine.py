"""Measures the vLLM engine without HTTP: `engine.py full_text|seeds MODEL RUNS SETTINGS`."""

import json
import sys
import time
from typing import Any

import numpy as np
import torch

from bench.scoring import make_choices
from bench.timing import compare_with_first, summarize, time_in_turn
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.engines.vllm.engine import VllmEngine

TEXTS, LENGTH = 16, 512


def make_job(tokens: list[int], scored: int) -> ScoreJob:
    """A job that scores the last `scored` of some tokens."""
    ids = np.array(tokens, dtype=np.int32)
    return ScoreJob(ids[:-1], ids[-scored:])


def run_jobs(engine: VllmEngine, jobs: list[ScoreJob]) -> None:
    """Run jobs to their end."""
    engine.add(list(enumerate(jobs)))
    while engine.busy:
        engine.step()


def measure_full_text(engine: VllmEngine, vocab: int, hidden: int, runs: int) -> dict[str, Any]:
    """All rows of every text, against reading one row of each plus the bare product of the rest."""
    rng = np.random.default_rng(0)
    worker = engine._vllm.engine_core.model_executor.driver_worker.worker
    project = worker.model_runner.model.compute_logits
    dtype = worker.model_runner.dtype
    hidden_RD = torch.randn(TEXTS * (LENGTH - 1), hidden, device=worker.device, dtype=dtype)

    def texts() -> list[list[int]]:
        return [rng.integers(10, vocab, LENGTH).tolist() for _ in range(TEXTS)]

    def score() -> None:
        run_jobs(engine, [make_job(text, LENGTH - 1) for text in texts()])

    def prefill() -> None:
        run_jobs(engine, [make_job(text, 1) for text in texts()])

    def multiply() -> None:
        for part in torch.split(hidden_RD, 128):
            project(part)[0, 0].item()  # waits for a GPU

    with torch.inference_mode():
        seconds = time_in_turn({"scored": score, "prefill": prefill, "product": multiply}, runs)
    limit = [a + b for a, b in zip(seconds["prefill"], seconds["product"], strict=True)]
    ways = {"all rows scored": seconds["scored"], "limit: prefill + bare product": limit}
    result = summarize(ways, TEXTS * (LENGTH - 1), "tokens")
    return result | {"ratios": compare_with_first(ways), "parts_s": seconds}


def answer_seeds(engine: VllmEngine, vocab: int) -> None:
    """For each seed on stdin, score what `bench/scoring.py` sends over HTTP; print the seconds."""
    for line in sys.stdin:
        items = make_choices(vocab, 64, 200, 1, 20, seed=int(line))
        jobs = [make_job(item["context_ids"] + item["target_ids"][0], 20) for item in items]
        started = time.perf_counter()
        run_jobs(engine, jobs)
        print(f"seconds {time.perf_counter() - started}", flush=True)


def main() -> None:
    """Measure full texts and print what was found, or answer seeds until stdin ends."""
    part, path, runs, settings = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    engine = VllmEngine(EngineSpec("bench", "vllm", path, **json.loads(settings)))
    vocab = engine.info.vocab_size
    if part == "full_text":
        result = measure_full_text(engine, vocab, engine.info.hidden_size, runs)
        print("result", json.dumps(result))
    else:
        answer_seeds(engine, vocab)
    engine.close()


if __name__ == "__main__":
    main()
