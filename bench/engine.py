"""Measures the vLLM engine without HTTP: `engine.py full_text|seeds MODEL RUNS SETTINGS`."""

import json
import sys
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.models import run_jobs
from bench.scoring import make_choices
from bench.servers import answer_questions, print_result
from bench.timing import summarize, time_call, time_in_turn
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.engines.vllm.engine import VllmEngine

TEXTS, LENGTH = 16, 512


def make_job(tokens: list[int], scored: int) -> ScoreJob:
    """A job that scores the last `scored` of some tokens."""
    ids = np.array(tokens, dtype=np.int32)
    return ScoreJob(ids[:-1], ids[-scored:])


def measure_full_text(engine: VllmEngine, runs: int) -> dict[str, Any]:
    """All rows of every text, against reading one row of each plus the bare product of the rest."""
    rng = np.random.default_rng(0)
    hidden = engine.info.hidden_size
    worker = engine._vllm.engine_core.model_executor.driver_worker.worker
    project = worker.model_runner.model.compute_logits
    dtype = worker.model_runner.dtype
    hidden_RD = torch.randn(TEXTS * (LENGTH - 1), hidden, device=worker.device, dtype=dtype)

    def texts() -> list[list[int]]:
        return [rng.integers(10, engine.info.vocab_size, LENGTH).tolist() for _ in range(TEXTS)]

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
    return summarize(ways, TEXTS * (LENGTH - 1), "tokens") | {"parts_s": seconds}


def time_choices(engine: VllmEngine, seed: int) -> float:
    """Return the seconds for what `bench/scoring.py` sends over HTTP for a seed."""
    items = make_choices(engine.info.vocab_size, 64, 200, 1, 20, seed=seed)
    jobs = [make_job(item["context_ids"] + item["target_ids"][0], 20) for item in items]
    return time_call(partial(run_jobs, engine, jobs))


def main() -> None:
    """Measure full texts and print what was found, or answer seeds until stdin ends."""
    part, path, runs, settings = sys.argv[1:]
    engine = VllmEngine(EngineSpec("bench", "vllm", path, **json.loads(settings)))
    if part == "full_text":
        print_result(measure_full_text(engine, int(runs)))
    else:
        answer_questions(None, partial(time_choices, engine))
    engine.close()


if __name__ == "__main__":
    main()
