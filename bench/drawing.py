"""Prints what drawing a token costs, and what its columns cost: `bench/drawing.py [VOCABULARY …]`.

Microseconds of one CPU core a token (`time.process_time`), medians of interleaved runs.
"""

import statistics
import sys
import time

import numpy as np
import torch

from logsteer_server.contract.jobs import Policy
from logsteer_server.numerics.drawing import RowSampler
from logsteer_server.numerics.rows import PUBLIC_COLUMNS, RowSpec

ROWS, RUNS = 32, 25
POLICIES = {
    "temperature 0.8, top_p 0.9": Policy(0.8, top_p=0.9),
    "temperature 1": Policy(),
    "greedy": Policy(0.0),
}
WISHES = {
    "tokens alone": (),
    "logprob": ("logprob",),
    "log_q and rb_entropy": ("logprob", "log_q", "rb_entropy"),
    "all columns": PUBLIC_COLUMNS,
}


def measure(vocab: int, policy: Policy) -> dict[str, float]:
    """Microseconds a token of each wish."""
    generator = torch.Generator().manual_seed(0)
    logits_RV = 4 * torch.randn((ROWS, vocab), generator=generator)
    index_R = np.zeros(ROWS, np.int64)
    samplers = {
        name: RowSampler([RowSpec(columns, policy=policy, eos_ids=(2,))] * ROWS, range(ROWS))
        for name, columns in WISHES.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in WISHES}
    for _ in range(RUNS):
        for name, sampler in samplers.items():
            started = time.process_time()
            sampler.draw(logits_RV, index_R)
            seconds[name].append(time.process_time() - started)
    return {name: 1e6 * statistics.median(found) / ROWS for name, found in seconds.items()}


def main() -> None:
    """Measure vocabularies and print a line for each policy."""
    torch.set_num_threads(1)
    for vocab in [int(given) for given in sys.argv[1:]] or [1_436, 32_000]:
        for name, policy in POLICIES.items():
            found = measure(vocab, policy)
            shown = ", ".join(f"{wish} {cost:.1f}" for wish, cost in found.items())
            print(f"{vocab} tokens, {name}: {shown}")


if __name__ == "__main__":
    main()
