"""Time and peak memory of reading scored rows, against the whole log-softmax and the bare matmul.

.venv/bin/python -m bench.rows --device cuda --rows 2048 --vocab 128256 --hidden 4096
"""

import argparse
import gc
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from logsteer_server.numerics.hidden_rows import HiddenRows, RowBounds, read_hidden
from logsteer_server.numerics.rows import RowSpec

MIB = 2**20


def current_rss() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class PeakMemory:
    """Bytes above the level at entry, at the peak: the allocator's on CUDA, sampled RSS on CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.added = 0

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._before = self._peak = current_rss()
            self._stop = threading.Event()
            self._sampler = threading.Thread(target=self._sample)
            self._sampler.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self._peak = max(self._peak, current_rss())

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
    times = []
    for index in range(runs + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if index:
            times.append(1e3 * (time.perf_counter() - started))
    return times


def main() -> None:
    """Print one JSON object with a record per way of reading."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    hidden_RD = torch.randn(options.rows, options.hidden, device=device, dtype=dtype)
    head_VD = torch.randn(options.vocab, options.hidden, device=device, dtype=dtype) / 64
    targets_R = torch.randint(options.vocab, (options.rows,), device=device)

    def project(hidden_rD: torch.Tensor) -> torch.Tensor:
        return hidden_rD @ head_VD.T

    def read(spec: RowSpec, chunk: int) -> torch.Tensor:
        rows = HiddenRows.of(hidden_RD, targets_R)
        return read_hidden(rows, project, options.vocab, spec, RowBounds(chunk, chunk))

    def read_whole() -> torch.Tensor:
        log_probs_RV = project(hidden_RD).float().log_softmax(-1)
        return log_probs_RV.gather(-1, targets_R[:, None])

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "bare matmul": lambda: project(hidden_RD),
        "whole log-softmax, logprob": read_whole,
    }
    full = RowSpec(("logprob", "rank", "entropy"), top=5)
    for chunk_mib in options.chunk_mib:
        chunk = chunk_mib * MIB
        ways[f"rows, logprob, {chunk_mib} MiB"] = partial(read, RowSpec(("logprob",)), chunk)
        ways[f"rows, logprob + rank, {chunk_mib} MiB"] = partial(
            read, RowSpec(("logprob", "rank")), chunk
        )
    ways[f"rows, 3 columns + top 5, {options.chunk_mib[0]} MiB"] = lambda: read(
        full, options.chunk_mib[0] * MIB
    )
    records = {}
    with torch.inference_mode():
        expected = read_whole()
        for name, work in ways.items():
            work()
            with PeakMemory(device) as memory:
                result = work()
            times = time_runs(work, device, options.runs)
            record = {
                "ms_median": round(statistics.median(times), 3),
                "ms_min": round(min(times), 3),
                "ms_max": round(max(times), 3),
                "peak_mib_added": round(memory.added / MIB, 1),
            }
            if name.startswith("rows"):
                record["max_error"] = float((result[:, :1] - expected).abs().max())
            records[name] = record
    chip = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    found = {"chip": chip, "torch": torch.__version__, **vars(options), "ways": records}
    print("result", json.dumps(found))


if __name__ == "__main__":
    main()
