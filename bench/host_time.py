"""How long a device waits for the host in a step of decoding: `host_time.py RUNNER MODEL RUNS`.

RUNNER is `v1`, `v2`, or `stock`: vLLM's own engine core and worker on V2. That makes no text and no
results, which vLLM's server does in a process of its own; and it has one step under way where all
is done as soon as it is begun, as here, so only the host's own time is given.

The device is pretended, and the host is real: CPU time in which it takes tokens in, makes results,
schedules and prepares. What a device would compute (the model, the draw, and the kernels of the V2
runner, which a CPU interprets) is left out of it. The device takes DEVICE_MS for a step; it begins
when the step has been handed over and the one before is done. Counted is how long it has nothing
to do in between.
"""

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bench.models import GREEDY, generate, make_model
from bench.servers import print_result, run_module
from bench.timing import spread
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import GenerateJob
from logsteer_server.contract.plan import Site, SteeringPlan
from logsteer_server.engines.vllm.config import interpret_kernels

BATCHES = (1, 32, 256)
PROMPT, GENERATED = 16, 24
SHAPE: dict[str, Any] = {"vocab": 2048, "hidden": 64, "layers": 36}
SIZES = {"max_num_seqs": max(BATCHES), "max_num_batched_tokens": 8192}

DEVICE_MS = 4.8
"""A step of an H100 at least: it reads the weights of 8 B in bfloat16, at 3.35 TB/s."""


class PretendedDevice:
    """A device beside a host whose clock is CPU time, of which some parts are left out.

    `idle_ms`: by step, how long the device had nothing to do before it. `host_ms`: by step, the
    host's own time since the step before it was handed over.
    """

    def __init__(self) -> None:
        self.idle_ms: list[float] = []
        self.host_ms: list[float] = []
        self._ends: deque[float] = deque()
        self._last_end: float | None = None
        self._shift = 0.0
        self._handed_over = 0.0
        self._is_left_out = False

    def now(self) -> float:
        """Return the host's clock, in ms."""
        return 1e3 * time.thread_time() + self._shift

    def forget(self) -> None:
        """Begin with no step."""
        self.idle_ms, self.host_ms, self._last_end = [], [], None
        self._ends.clear()

    def leave_out(self, owner: Any, name: str) -> None:
        """Leave the time of this function out of the host's."""

        def stop_clock(call: Callable[[], Any]) -> Any:
            if self._is_left_out:
                return call()
            started, self._is_left_out = self.now(), True
            try:
                return call()
            finally:
                self._is_left_out = False
                self._shift -= self.now() - started

        wrap(owner, name, stop_clock)

    def hand_over_after(self, owner: Any, name: str) -> None:
        """Have a step handed over where this function returns."""

        def hand_over(call: Callable[[], Any]) -> Any:
            found, now = call(), self.now()
            if self._last_end is not None:
                self.idle_ms.append(max(0.0, now - self._last_end))
                self.host_ms.append(now - self._handed_over)
            self._handed_over = now
            self._last_end = max(now, self._last_end or 0.0) + DEVICE_MS
            self._ends.append(self._last_end)
            return found

        wrap(owner, name, hand_over)

    def wait_before(self, owner: Any, name: str) -> None:
        """Have the host wait, before this function is called, for the first step handed over."""

        def wait(call: Callable[[], Any]) -> Any:
            if self._ends:
                waited = max(0.0, self._ends.popleft() - self.now())
                self._shift += waited
                self._handed_over += waited  # no time of the host's own
            return call()

        wrap(owner, name, wait)


def wrap(owner: Any, name: str, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Have calls of a function go through another one, which is given what makes the call."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *args, **named: around(lambda: function(*args, **named)))


def watch(core: Any, runner: str) -> PretendedDevice:
    """Measure vLLM's engine core as that of a device which works beside this process."""
    device = PretendedDevice()
    own = core.model_executor.driver_worker.worker.model_runner
    draw = (own.sampler, "forward") if runner == "v1" else (own, "sample")
    device.leave_out(own.model, "forward")
    device.leave_out(*draw)
    device.hand_over_after(*draw)
    device.wait_before(core.scheduler, "update_from_output")
    if runner != "v1":
        from triton.runtime.interpreter import GridExecutor

        device.leave_out(GridExecutor, "__call__")
    return device


def make_jobs(count: int, *, steered: bool) -> list[GenerateJob]:
    """Jobs of as many sequences, greedy, without log-probabilities."""
    rng = np.random.default_rng(count)
    vector_D = rng.normal(size=SHAPE["hidden"]).astype(np.float32)
    plan = SteeringPlan((Site(SHAPE["layers"] // 2, "resid_post", vector_D),)) if steered else None
    prompts = rng.integers(10, SHAPE["vocab"], (count, PROMPT), dtype=np.int32)
    return [
        GenerateJob(prompt, GENERATED, GREEDY, ignore_eos=True, logprobs=False, plan=plan)
        for prompt in prompts
    ]


def start_stock(path: str) -> Any:
    """Return vLLM's own engine core on V2, which schedules as it does on GPUs."""
    os.environ |= {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    interpret_kernels()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    config = EngineArgs(
        model=path, dtype="float32", enforce_eager=True, distributed_executor_backend="uni", **SIZES
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True  # which vLLM's platform for CPUs switches off
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    type(core.model_executor.driver_worker.worker.model_runner.sampler).__call__ = draw
    return core


def draw(sampler: Any, logits: Tensor, batch: Any) -> Any:
    """Take the most probable tokens, as vLLM's own sampler does by a kernel that asks for a GPU."""
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    num_sampled, num_rejected = get_num_sampled_and_rejected(
        batch.seq_lens.new_ones(batch.num_reqs),
        batch.seq_lens,
        batch.cu_num_logits,
        batch.idx_mapping,
        sampler.req_states.prefill_len.gpu,
    )
    ids_R1 = logits.argmax(-1, keepdim=True)
    return SamplerOutput(ids_R1, None, None, num_sampled, num_rejected)


def generate_in_stock(core: Any, jobs: Sequence[GenerateJob]) -> None:
    """Generate as `generate` does, unsteered."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
    for index, job in enumerate(jobs):
        hasher = core.request_block_hasher
        core.add_request(
            Request(f"{id(jobs)}-{index}", job.tokens.tolist(), params, None, block_hasher=hasher)
        )
    while core.scheduler.has_requests():
        core.step_fn()


def measure_host_time(directory: Path, runs: int) -> dict[str, Any]:
    """Milliseconds that a device waits in a step, of 36 tiny layers, by runner and sequences."""
    path, found = make_model(directory, **SHAPE), dict[str, Any]()
    for runner in ("v1", "v2", "stock"):
        found |= run_module("host_time", runner, path, runs)
    figures = {name: way["idle_ms"] for name, way in found.items() if "idle_ms" in way}
    return {"runs": runs, "device_ms": DEVICE_MS, "ways": found, "figures": figures}


def main() -> None:
    """Print the medians of runs, smallest, median and largest, by runner, kind and sequences."""
    runner, path, runs = sys.argv[1:]
    engine: Any = None
    if runner == "stock":
        core, kinds = start_stock(path), ["unsteered"]
    else:
        from logsteer_server.engines.vllm.engine import VllmEngine

        engine = VllmEngine(
            EngineSpec(
                "bench", "vllm", path, dtype="float32", memory="512MiB", compile=False,
                runner=runner, engine_args=SIZES,
            )
        )  # fmt: skip
        core, kinds = engine._vllm.engine_core, ["unsteered", "steered"]
    device, found = watch(core, runner), dict[str, Any]()
    for count in BATCHES:
        for kind in kinds:
            idle, host = [], []
            for _ in range(int(runs) + 1):
                device.forget()
                jobs = make_jobs(count, steered=kind == "steered")
                if engine:
                    generate(engine, jobs)
                else:
                    generate_in_stock(core, jobs)
                # The first steps read prompts, after the last ones requests end.
                idle.append(statistics.median(device.idle_ms[4:-2]))
                host.append(statistics.median(device.host_ms[4:-2]))
            way = found[f"{runner}, {count} {kind}"] = {"host_ms": spread(host[1:])}
            if engine:
                way["idle_ms"] = spread(idle[1:])
    print_result(found)
    if engine:
        engine.close()
    else:
        core.shutdown()


if __name__ == "__main__":
    main()
