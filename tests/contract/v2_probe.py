"""Runs a table of jobs on one of vLLM's runners and prints the numbers of each, as JSON.

    python -m tests.contract.v2_probe v1|v2 ADAPTER

A process of its own, because vLLM leaves none clean. On v2 the jobs are thrown out of the cache
again and again, on v1 they are not; and there it is counted where a step's own code waits.
"""

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from torch.overrides import TorchFunctionMode

from logsteer_server.contract.captures import Capture
from logsteer_server.contract.engine import HOOKS, EngineSpec
from logsteer_server.contract.jobs import GenerateJob, Job, Policy, ScoreJob
from logsteer_server.contract.plan import Adapter
from tests.conftest import DEMO_MODEL
from tests.contract import draws_probe
from tests.contract.engine_probe import GREEDY, SOFT, add_capture, make_capture, make_plans, read
from tests.probes import drain, finish, recapture, start_vllm

KINDS = (
    "all", "prompt", "completion", "predicting", "slices", "read", "if token", "if prompt", "apart",
)  # fmt: skip
"""What the plans of `make_plans` are, in order."""
COLUMNS = ("logprob", "rank", "entropy", "log_q", "rb_entropy", "eos_prob")
LENGTH = 16
STOP = ("e",)
"""It ends replies where nobody but the reader of the text knows: on V2, a step late."""
COUNTED_STEPS = 4
THROWN_OUT = {"v1": (), "v2": (6, 12, 18, 24, 32, 40, 50)}
"""By runner, the steps after which whatever runs is preempted."""


def make_jobs(vocab: int, width: int, adapter: Adapter) -> dict[str, Job]:
    """Jobs of every kind, by name; half of them begin with the same tokens."""
    rng = np.random.default_rng(5)
    shared = rng.integers(10, vocab, 70)
    texts = []
    for index in range(len(KINDS)):
        own = rng.integers(10, vocab, 30 + 5 * index)
        texts.append(np.concatenate([shared, own] if index % 2 else [own]).astype(np.int32))
    long = texts[7]
    jobs: dict[str, Job] = {
        "plain": ScoreJob(long[:-1], long[1:], COLUMNS, top=3),
        "shared row": ScoreJob(long, np.arange(5, dtype=np.int32), shares_row=True),
        "adapter": ScoreJob(long[:-1], long[-20:], adapter=adapter),
    }
    plans = make_plans(width)
    for n, (ids, kind, plan) in enumerate(zip(texts, KINDS, plans, strict=True)):
        score = ScoreJob(ids[:-1], ids[-20:], COLUMNS, top=2, policy=SOFT, plan=plan)
        drawn = GenerateJob(ids[:40], LENGTH, SOFT, seed=len(jobs), ignore_eos=True, plan=plan)
        drawn = add_capture(4 * n + 2, drawn)
        jobs |= {
            f"score, {kind}": add_capture(4 * n, score),
            f"generate, {kind}": drawn,
            f"stop, {kind}": replace(drawn, stop=STOP),
        }
    jobs["adapter, steered"] = replace(jobs["generate, all"], adapter=adapter)
    jobs |= {f"capture, {n}": make_capture(n, texts[n], plans) for n in range(5)}
    drawn = draws_probe.make_jobs(shared[:9].tolist())
    jobs |= {f"draw, {n}": replace(job, max_tokens=LENGTH) for n, job in enumerate(drawn)}
    return jobs


class Waits(TorchFunctionMode):
    """Count where our own code makes the host wait for what a GPU has computed."""

    NAMES = frozenset({
        "item", "tolist", "cpu", "nonzero", "equal", "masked_select", "unique",
        "__bool__", "__int__", "__float__", "__index__", "__contains__",
    })  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1)
        if func.__name__ in self.NAMES and "logsteer_server" in caller.f_code.co_filename:
            self.places[f"{func.__name__} in {caller.f_code.co_qualname}"] += 1
        return func(*args, **(kwargs or {}))


def count_waits(engine: Any) -> dict[str, dict[str, int]]:
    """Where our code waits in decode steps of four requests each, by what they decode."""
    plan = make_plans(engine.info.hidden_size)[0]
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"policy": GREEDY, "logprobs": False},
        "log-probabilities": {"policy": GREEDY, "columns": COLUMNS[1:], "top": 3},
        "cut": {"policy": Policy(0.8, top_p=0.9), "logprobs": False},
        "steered": {"policy": GREEDY, "logprobs": False, "plan": plan},
        "captured": {"policy": GREEDY, "logprobs": False, "capture": Capture((1,), read="each")},
    }
    found = {}
    for kind, fields in kinds.items():
        ids = np.arange(10, 19, dtype=np.int32)
        job = GenerateJob(ids, 12, ignore_eos=True, **fields)
        engine.add([(number, job) for number in range(4)])
        drain(engine, 3)
        with Waits() as waits:
            drain(engine, COUNTED_STEPS)
        drain(engine)
        found[kind] = dict(waits.places)
    with Waits() as waits:
        engine.add([(0, ScoreJob(ids[:-1], ids[1:]))])
        drain(engine)
    return found | {"scored": dict(waits.places)}


def warm_up(engine: Any) -> None:
    """Do what vLLM does on a GPU before it serves: measure memory, run requests of its own."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    worker = engine._vllm.engine_core.model_executor.driver_worker.worker
    ended = SchedulerOutput.make_empty()
    ended.finished_req_ids = set(worker.model_runner.params)  # of the probe of the stream
    worker.execute_model(ended)
    worker.model_runner.profile_run()
    worker.model_runner.kv_block_zeroer.warmup = lambda _: None  # of a kernel that GPUs have
    warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
    assert not worker.model_runner.params, "requests of the warm-up are forgotten"


def main() -> None:
    """Run the table, print its numbers, how often a request was preempted, and prefix hits."""
    runner, adapter = sys.argv[1], Adapter(sys.argv[2], "0" * 64)
    args = {"max_num_batched_tokens": 64, "max_num_seqs": 16}
    engine = start_vllm(
        EngineSpec("probe", "vllm", str(DEMO_MODEL), dtype="float32", compile=False,
                   max_model_len=320, memory="4MiB", adapter_slots=1, adapter_rank=8,
                   runner=runner, hooks=HOOKS, engine_args=args)
    )  # fmt: skip
    if runner == "v2":
        warm_up(engine)
    jobs = make_jobs(engine.info.vocab_size, engine.info.hidden_size, adapter)
    names = list(jobs)
    preempted = draws_probe.count_preempted(engine)
    engine.add(list(enumerate(jobs.values())))
    engine._vllm.steps.begin()
    depth = len(engine._vllm.steps)
    found: dict[str, list[float]] = {}
    steps = 0
    while engine.busy:
        found |= {names[number]: read(result) for number, result in engine.step()}
        steps += 1
        if steps in THROWN_OUT[runner]:
            scheduler = engine._vllm.engine_core.scheduler
            scheduler.reset_prefix_cache(reset_running_requests=True)
    context, end = jobs["plain"].tokens, np.arange(9, dtype=np.int32)
    again: dict[str, Any] = {}
    for which in ("first", "second"):  # of which the second finds the prefix of the first
        engine.add([(0, ScoreJob(np.concatenate([context, end[:-1]]), end))])
        again[which] = drain(engine)[0]
    captured = {n: job for n, job in enumerate(jobs.values()) if job.capture}
    recaptured = recapture(engine, captured)
    finish({
        "numbers": found, "preempted": len(preempted), "computed_on": engine.info.computed_on,
        "cached": again["second"].cached_tokens,
        "again": {which: read(result) for which, result in again.items()},
        "waits": count_waits(engine), "depth": depth, "recaptured": recaptured,
    }, engine)  # fmt: skip


if __name__ == "__main__":
    main()
