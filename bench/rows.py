"""Time and peak memory of reading scored rows, against the whole log-softmax and the bare matmul:
`rows.py RUNS`.
"""

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch

from bench.models import DEVICE
from bench.servers import print_result
from bench.timing import spread, time_in_turn
from logsteer_server.numerics.hidden_rows import HiddenRows, RowBounds, read_hidden
from logsteer_server.numerics.rows import RowSpec

MIB = 2**20
ROWS, VOCAB, WIDTH = 2048, 128_256, 256
CHUNK = 256 * MIB
LISTED = 256


class PeakMemory:
    """Bytes above the level at entry, at the peak: the allocator's on CUDA, sampled RSS on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self.added = 0

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._before = self._peak = self._process.memory_info().rss
            self._stop = threading.Event()
            self._sampler = threading.Thread(target=self._sample)
            self._sampler.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            self.added = torch.cuda.max_memory_allocated() - self._before
        else:
            self._stop.set()
            self._sampler.join()
            self.added = self._peak - self._before


def time_runs(work: Callable[[], torch.Tensor], device: torch.device, runs: int) -> list[float]:
    """Milliseconds of each run, after one that is not counted."""

    def wait_for_work() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds = time_in_turn({"work": wait_for_work}, runs)["work"]
    return [1e3 * taken for taken in seconds]


def main() -> None:
    """Read the rows in each way, as often as the command line says; print what it took."""
    runs, device = int(sys.argv[1]), torch.device(DEVICE)
    torch.manual_seed(0)
    hidden_RD = torch.randn(ROWS, WIDTH, device=device)
    head_VD = torch.randn(VOCAB, WIDTH, device=device) / 64
    targets_R = torch.randint(VOCAB, (ROWS,), device=device)

    def project(hidden_rD: torch.Tensor) -> torch.Tensor:
        return hidden_rD @ head_VD.T

    others_RK = torch.randint(VOCAB, (ROWS, LISTED), device=device)

    def read(spec: RowSpec) -> torch.Tensor:
        rows = replace(HiddenRows.of(hidden_RD, targets_R), alternatives_TK=others_RK)
        return read_hidden(rows, project, VOCAB, spec, RowBounds(CHUNK, CHUNK))

    def read_whole() -> torch.Tensor:
        log_probs_RV = project(hidden_RD).float().log_softmax(-1)
        return log_probs_RV.gather(-1, targets_R[:, None])

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "bare matmul": lambda: project(hidden_RD),
        "whole log-softmax, logprob": read_whole,
        "rows, logprob, 256 MiB": partial(read, RowSpec(("logprob",))),
        "rows, logprob + rank, 256 MiB": partial(read, RowSpec(("logprob", "rank"))),
        "rows, 3 columns + top 5, 256 MiB": partial(
            read, RowSpec(("logprob", "rank", "entropy"), top=5)
        ),
        f"rows, top {LISTED}, {LISTED} alternatives and tails, 256 MiB": partial(
            read, RowSpec(("logprob",), top=LISTED, alternatives=LISTED, tail=True)
        ),
    }
    found: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        expected = read_whole()
        for name, work in ways.items():
            work()
            with PeakMemory(device) as memory:
                result = work()
            added = round(memory.added / MIB, 1)
            found[name] = {"ms": spread(time_runs(work, device, runs)), "peak_mib_added": added}
            if name.startswith("rows"):
                found[name]["max_error"] = float((result[:, :1] - expected).abs().max())
    print_result({"runs": runs, "ways": found})


if __name__ == "__main__":
    main()
