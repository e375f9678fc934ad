"""Runs the vLLM engine without HTTP under pressure and prints what happened, as JSON.

A process of its own, because vLLM leaves none clean. The steps are so short that every prefill is
cut up, and running requests are thrown out of the cache in the middle of theirs.
"""

import json
import sys
from typing import Any

import numpy as np

from logsteer_server.engines.base import EngineSpec, ScoreJob, ScoreOutput
from logsteer_server.engines.vllm.engine import VllmEngine


def make_jobs(vocab: int) -> list[ScoreJob]:
    """Jobs of up to 300 tokens, some with a common beginning, all rows or some scored."""
    rng = np.random.default_rng(5)
    shared = rng.integers(10, vocab, 150)
    jobs = []
    for index in range(40):
        own = rng.integers(10, vocab, rng.integers(40, 150))
        ids = np.concatenate([shared, own] if index % 2 else [own]).astype(np.int32)
        scored = len(ids) - 1 if index % 3 == 0 else int(rng.integers(1, len(own)))
        jobs.append(ScoreJob(ids[:-1], ids[-scored:], ("logprob", "rank", "entropy"), top=2))
    return jobs


def run(engine: VllmEngine, jobs: dict[int, ScoreJob]) -> dict[int, list[float]]:
    """The log-probabilities of each job."""
    engine.add(list(jobs.items()))
    found = {}
    while engine.busy:
        found |= step(engine)
    return found


def step(engine: VllmEngine) -> dict[int, list[float]]:
    """The log-probabilities of the score jobs that one step finished."""
    results = engine.step()
    return {i: r.columns["logprob"].tolist() for i, r in results if isinstance(r, ScoreOutput)}


def main() -> None:
    """Run the jobs with and without pressure, and with half of them cancelled in the middle."""
    args = {"max_num_batched_tokens": 32, "max_num_seqs": 16}
    engine = VllmEngine(
        EngineSpec("probe", "vllm", sys.argv[1], dtype="float32", compile=False,
                   max_model_len=320, memory="2MiB", engine_args=args)
    )  # fmt: skip
    scheduler = engine._core.scheduler
    preempt = scheduler._preempt_request
    preempted: list[Any] = []

    def count(request: object, *rest: object, **more: object) -> object:
        preempted.append(request)
        return preempt(request, *rest, **more)

    scheduler._preempt_request = count
    jobs = dict(enumerate(make_jobs(engine.info.vocab_size)))
    alone = {index: run(engine, {index: job})[index] for index, job in jobs.items()}
    scheduler.reset_prefix_cache()
    preempted.clear()
    engine.add(list(jobs.items()))
    together: dict[int, list[float]] = {}
    for _ in range(12):
        together |= step(engine)
        together |= step(engine)
        scheduler.reset_prefix_cache(reset_running_requests=True)  # throws all running ones out
    while engine.busy:
        together |= step(engine)
    times_preempted = len(preempted)
    scheduler.reset_prefix_cache()
    engine.add(list(jobs.items()))
    kept: dict[int, list[float]] = {}
    for _ in range(3):
        kept |= step(engine)
    cancelled = [index for index in jobs if index % 2]
    engine.cancel(cancelled)
    while engine.busy:
        kept |= step(engine)
    print(json.dumps({
        "alone": alone, "together": together, "kept": kept, "cancelled": cancelled,
        "preempted": times_preempted, "left": len(engine._scoring),
    }))  # fmt: skip
    engine.close()


if __name__ == "__main__":
    main()
