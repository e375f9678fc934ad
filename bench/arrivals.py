"""Continuations that arrive one after the other, on TransformerLens: `arrivals.py [RUNS]`.

32 callers ask for 64 tokens each, evenly over 5 seconds of work; then 32 at once. Time is the CPU
time of the engine's thread and those that it computes with, so that waiting for the next caller
costs nothing: a caller comes when the engine has worked so long, and where it has nothing to do
the clock is set forward to the next one.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from decoding import GREEDY
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import GenerateJob
from logsteer_server.engines.tlens.engine import TransformerLensEngine
from models import make_model
from timing import compare, summarize

CALLERS, GENERATED, SECONDS = 32, 64, 5.0
WIDTH, LAYERS = 768, 12
"""A model that is slow enough for callers to meet: those of a fast one find nobody to join."""
PROMPT = (8, 24)
"""Tokens that a prompt has, at least and at most."""


def make_jobs(vocab: int) -> list[GenerateJob]:
    """The callers' jobs, the same every time."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(10, vocab, rng.integers(*PROMPT)) for _ in range(CALLERS)]
    return [
        GenerateJob(ids.astype(np.int32), GENERATED, GREEDY, ignore_eos=True) for ids in prompts
    ]


def run_arrivals(engine: Any, jobs: list[GenerateJob], seconds: float) -> tuple[float, list[Any]]:
    """Seconds of work for jobs that come evenly over so many seconds, and their tokens."""
    found: list[Any] = [None] * len(jobs)
    waiting = [(n * seconds / len(jobs), n) for n in range(len(jobs))]
    clock = worked = 0.0
    while waiting or engine.busy:
        if not engine.busy:
            clock = max(clock, waiting[0][0])
        while waiting and waiting[0][0] <= clock:
            n = waiting.pop(0)[1]
            engine.add([(n, jobs[n])])
        started = time.process_time()
        for n, output in engine.step():
            found[n] = output.token_ids.tolist()
        took = time.process_time() - started
        clock, worked = clock + took, worked + took
    return worked, found


def compare_arrivals(directory: Path, runs: int) -> dict[str, Any]:
    """Tokens a second of the engine's CPU time: arriving over 5 s, and as one batch."""
    path = make_model(directory, hidden=WIDTH, layers=LAYERS)
    engine = TransformerLensEngine(
        EngineSpec("bench", "transformer_lens", str(path), dtype="float32")
    )
    jobs = make_jobs(engine.info.vocab_size)
    one, over = "one batch", f"arriving over {SECONDS:g} s"
    seconds: dict[str, list[float]] = {over: [], one: []}
    tokens: dict[str, list[Any]] = {}
    for index in range(runs + 1):  # the first of each is not counted
        for name in seconds:
            took, tokens[name] = run_arrivals(engine, jobs, SECONDS if name == over else 0.0)
            seconds[name] += [took] if index else []
    result = summarize(seconds, CALLERS * GENERATED, "tokens")
    result["ratios"] = {f"{over} / {one}": compare(seconds[over], seconds[one])}
    same = sum(a == b for a, b in zip(tokens[over], tokens[one], strict=True))
    result["ways"][over]["sequences_as_in_one_batch"] = same
    return result


def main() -> None:
    """Measure, and print what was found."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory(prefix="logsteer-bench-") as directory:
        print(json.dumps(compare_arrivals(Path(directory), runs), indent=1))


if __name__ == "__main__":
    main()
