"""Runs vLLM with steering that leaves float32, beside and before neighbours; prints JSON.

A process of its own, because vLLM leaves none clean. The key-value cache has so few blocks that
every neighbour gets blocks that a steered request has had.
"""

import sys
from typing import Any

import numpy as np

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import (
    GenerateJob,
    Job,
    JobResult,
    Policy,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.contract.plan import Positions, ResidualOp, Site, SteeringPlan
from logsteer_server.engines.vllm.engine import VllmEngine
from tests.probes import drain, finish, start_vllm

NEIGHBOURS = 50
BLOCKS = 60
"""Of 32 tokens: a batch of neighbours takes more, so that some wait for those of others."""


def make_plan(width: int, kind: int) -> SteeringPlan:
    """Steering that is finite as it is given, and not in the activations."""
    rng = np.random.default_rng(kind)
    direction = rng.normal(size=width)
    direction = (direction / np.linalg.norm(direction)).astype(np.float32)
    operation = (
        ResidualOp(direction, per_component=1.0, low=3e38),
        ResidualOp(direction, per_component=1.0, per_norm=3e38),
        ResidualOp(direction, base=3e38, keep=3e38),
    )[kind % 3]
    positions = (Positions("all"), Positions("last_prompt"), Positions("slices", ((1, 2),)))
    return SteeringPlan((Site(kind % 4, "resid_post", None, (operation,)),), positions[kind // 3])


def make_neighbours(vocab: int) -> dict[int, Job]:
    """Unsteered texts of up to 90 tokens, every seventh of them to be continued."""
    rng = np.random.default_rng(1)
    jobs: dict[int, Job] = {}
    for index in range(NEIGHBOURS):
        ids = rng.integers(10, vocab, int(rng.integers(5, 90))).astype(np.int32)
        jobs[index] = ScoreJob(ids[:-1], ids[1:])
        if index % 7 == 6:
            jobs[index] = GenerateJob(ids, 40, policy=Policy(0.0), ignore_eos=True)
    return jobs


def make_poison(vocab: int, width: int, first: int) -> dict[int, Job]:
    """Steered texts whose streams are not finite."""
    rng = np.random.default_rng(first)
    jobs: dict[int, Job] = {}
    for index in range(18):
        ids = rng.integers(10, vocab, 80).astype(np.int32)
        plan = make_plan(width, index % 9)
        jobs[first + index] = ScoreJob(
            ids[:-1], ids[-60:], ("rank",) if index % 4 else ("logprob",), plan=plan
        )
        if index % 3 == 2:
            jobs[first + index] = GenerateJob(
                ids, 40, Policy(0.7), ignore_eos=True, logprobs=index % 2 == 0, plan=plan
            )
    return jobs


def make_misfits(width: int, first: int) -> dict[int, Job]:
    """Jobs over which vLLM or a worker raises: no schema lets them through."""
    ids = np.arange(10, 20, dtype=np.int32)
    narrow = SteeringPlan((Site(1, "resid_post", np.ones(width - 1, np.float32)),))
    far = SteeringPlan((Site(99, "resid_post", np.ones(width, np.float32)),))
    return {
        first: GenerateJob(ids, 3, top=10**6),
        first + 1: ScoreJob(ids, ids, plan=narrow),
        first + 2: ScoreJob(ids, ids, plan=far),
        first + 3: GenerateJob(ids, 3, stop=(7,)),  # type: ignore[arg-type]
    }


def read(result: JobResult) -> Any:
    """A job's numbers, or the code of its failure."""
    if result.failed:
        return result.code
    if isinstance(result, ScoreOutput):
        (column,) = result.columns.values()
        return np.nan_to_num(column, nan=1e9).tolist()
    return np.nan_to_num(result.logprobs, nan=1e9).tolist()


def run(engine: VllmEngine, jobs: dict[int, Job], steps: int = 10**9) -> dict[int, Any]:
    """What came of the jobs in so many steps."""
    engine.add(list(jobs.items()))
    return {index: read(result) for index, result in drain(engine, steps).items()}


def main() -> None:
    """Run the neighbours alone; beside and behind poison that ends; behind poison cancelled."""
    args = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 512}
    engine = start_vllm(
        EngineSpec("probe", "vllm", sys.argv[1], dtype="float32", compile=sys.argv[2] == "compiled",
                   max_model_len=320, engine_args=args)
    )  # fmt: skip
    scheduler = engine._vllm.engine_core.scheduler
    vocab, width = engine.info.vocab_size, engine.info.hidden_size
    neighbours = make_neighbours(vocab)

    def forget() -> None:
        assert scheduler.reset_prefix_cache()

    found = {"quiet": run(engine, neighbours)}
    forget()
    misfits = make_misfits(width, 3000)
    found["among"] = run(engine, misfits | neighbours)
    found["misfits"] = {index: found["among"].pop(index) for index in misfits}
    forget()
    poison = make_poison(vocab, width, 1000)
    found["beside"] = run(engine, poison | neighbours)
    found["poison"] = {index: found["beside"].pop(index) for index in poison}
    forget()
    run(engine, {index: job for index, job in poison.items() if isinstance(job, ScoreJob)})
    found["behind"] = run(engine, neighbours)
    forget()
    cancelled = {
        index: job
        for index, job in make_poison(vocab, width, 2000).items()
        if isinstance(job, GenerateJob)
    }
    run(engine, cancelled, steps=1)
    engine.cancel(list(cancelled))
    found["cancelled"] = run(engine, neighbours)
    found["left"] = len(engine._running)
    finish(found, engine)


if __name__ == "__main__":
    main()
