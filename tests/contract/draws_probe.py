"""Runs the vLLM engine without HTTP on a checkpoint and prints what it drew, as JSON.

A process of its own, because vLLM leaves none clean. `make_jobs` is also what TransformerLens gets.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import (
    Adjustments,
    GenerateJob,
    GenerateOutput,
    Job,
    Policy,
    ScoreJob,
)
from tests.probes import drain, finish, start_vllm

ADJUSTED = Adjustments(
    1.4, 0.3, 0.2, bias=((300, 2.0),), bad_words=((265,), (312, 277)), min_tokens=6,
    end_ids=(277, 534),
)  # fmt: skip
POLICIES = [
    Policy(), Policy(1e-3), Policy(0.0), Policy(1e-6, top_k=3), Policy(0.7, top_p=0.9),
    Policy(1.4, top_k=40), Policy(top_k=10**12), Policy(1.0, 200, 0.95, 0.01), Policy(5e-3),
    Policy(min_p=0.02), Policy(2.0), Policy(0.9, top_p=0.5),
    Policy(0.9, top_p=0.95, adjustments=ADJUSTED), Policy(0.0, adjustments=ADJUSTED),
]  # fmt: skip
SEEDS = [0, 1, 2, 2**31, 2**62, -1, -(2**63), 2**63 + 4, 11, 12, 13, 11, 14, 15]
LENGTH = 40


def make_jobs(prompt: list[int]) -> list[GenerateJob]:
    """Jobs of every kind of policy, from prompts of several lengths; the second half ends early."""
    ids = np.array(prompt, np.int32)
    return [
        GenerateJob(
            np.tile(ids, 1 + index % 5), LENGTH, policy, seed=seed, top=index % 3,
            logprobs=index % 4 < 3, ignore_eos=ignore_eos,
            columns=(("rank", "log_q", "eos_prob"), (), ("log_q",))[index % 3],
            double=index % 5 == 4,
        )
        for ignore_eos in (True, False)
        for index, (policy, seed) in enumerate(zip(POLICIES, SEEDS, strict=True))
    ]  # fmt: skip


def score(job: GenerateJob, drawn: list[int]) -> ScoreJob:
    """The job that reads what was drawn under the policy that drew it."""
    ids = np.array(drawn, np.int32)
    tokens = np.concatenate([job.tokens, ids[:-1]])
    columns = ("logprob", "rank", "log_q", "eos_prob")
    return ScoreJob(tokens, ids, columns, policy=job.policy, double=job.double)


def start(path: str, **fields: Any) -> Any:
    """An engine whose steps are so short that prefills are cut up; more fields of its spec."""
    args = {"max_num_batched_tokens": 32, "max_num_seqs": 16}
    spec = EngineSpec("probe", "vllm", path, dtype="float32", compile=False, max_model_len=320)
    return start_vllm(replace(spec, memory="4MiB", engine_args=args, **fields))


def run(engine: Any, jobs: dict[int, Job], preempt_every: int = 10**9) -> dict[int, Any]:
    """The results of jobs; all running ones are thrown out of the cache every so many steps."""
    engine.add(list(jobs.items()))
    found: dict[int, Any] = {}
    while engine.busy:
        found |= drain(engine, preempt_every)
        if engine.busy:
            scheduler = engine._vllm.engine_core.scheduler
            scheduler.reset_prefix_cache(reset_running_requests=True)
    return found


def count_preempted(engine: Any) -> list[Any]:
    """A list to which each request is added whenever it is thrown out."""
    scheduler = engine._vllm.engine_core.scheduler
    preempt = scheduler._preempt_request
    preempted: list[Any] = []

    def count(request: object, *rest: object, **more: object) -> object:
        preempted.append(request)
        return preempt(request, *rest, **more)

    scheduler._preempt_request = count
    return preempted


def show(results: dict[int, Any]) -> dict[int, list[Any]]:
    """What was drawn, why each ended, and what was read with the tokens."""
    assert all(isinstance(result, GenerateOutput) for result in results.values()), results
    return {
        i: [r.token_ids.tolist(), r.text, r.finish_reason, show_read(r)] for i, r in results.items()
    }


def show_read(output: GenerateOutput) -> dict[str, Any]:
    """What was read with the tokens, by name."""
    tops = {"top_ids": output.top_ids.tolist(), "top_logprobs": output.top_logprobs.tolist()}
    columns = {name: values.tolist() for name, values in output.columns.items()}
    return {"logprob": output.logprobs.tolist(), **tops, **columns}


def main() -> None:
    """Run the jobs alone, together, and thrown out in between; read what they drew."""
    engine = start(sys.argv[1])
    plain = make_jobs(json.loads(sys.argv[2]))
    jobs: dict[int, Job] = dict(enumerate(plain))
    alone = show({i: result for i in jobs for result in run(engine, {i: jobs[i]}).values()})
    together = show(run(engine, jobs))
    preempted = count_preempted(engine)
    thrown_out = show(run(engine, jobs, preempt_every=3))
    scored = run(engine, {i: score(job, together[i][0]) for i, job in enumerate(plain)})
    columns = {
        i: {name: values.tolist() for name, values in result.columns.items()}
        for i, result in scored.items()
    }
    finish({
        "eos_ids": engine.info.eos_ids, "alone": alone, "together": together,
        "preempted": thrown_out, "num_preempted": len(preempted), "columns": columns,
    }, engine)  # fmt: skip


if __name__ == "__main__":
    main()
