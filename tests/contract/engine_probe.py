"""Runs the vLLM engine without HTTP under pressure and prints what happened, as JSON.

A process of its own, because vLLM leaves none clean. The steps are so short that every prefill is
cut up, and running requests are thrown out of the cache in the middle of theirs.
"""

import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from logsteer_server.contract.captures import Capture, CaptureRead
from logsteer_server.contract.engine import HOOKS, EngineSpec
from logsteer_server.contract.jobs import (
    CaptureJob,
    CaptureOutput,
    GenerateJob,
    GenerateOutput,
    Job,
    JobResult,
    Policy,
    ScoreJob,
    ScoreOutput,
)
from logsteer_server.contract.plan import (
    Condition,
    Positions,
    Probe,
    ResidualOp,
    Site,
    SteeringPlan,
)
from logsteer_server.engines.vllm.engine import VllmEngine
from tests.probes import drain, finish, recapture, start_vllm

GREEDY = Policy(temperature=0.0)
SOFT = Policy(temperature=0.7)
CAPTURE_BYTES = 460 * 4 * 128
"""Of the capture buffer: the largest capture fits, and leaves little room for others."""
SLOTS = 3
"""Of the steering tables: fewer than there are plans, so that some requests wait."""


def make_plans(width: int) -> list[SteeringPlan]:
    """A plan for each kind of positions, each with sites of its own, and one whose vectors have
    positions of their own.
    """
    rng = np.random.default_rng(6)

    def draw(norm: float) -> np.ndarray:
        vector = rng.normal(size=width)
        return (norm * vector / np.linalg.norm(vector)).astype(np.float32)

    plain = [
        SteeringPlan(
            (
                Site(n % 5, "resid_post", draw(2.0)),
                Site((n + 2) % 5, "resid_post", draw(1.0), (ResidualOp(draw(1.0)),)),
            ),
            positions,
        )
        for n, positions in enumerate([
            Positions("all"), Positions("prompt"), Positions("completion"),
            Positions("predicting"), Positions("slices", ((3, 9), (40, 90))),
        ])
    ]  # fmt: skip
    inside = Site(1, "attn_out", draw(2.0)), Site(3, "mlp_out", None, (ResidualOp(draw(1.0)),))
    apart = [
        SteeringPlan(inside[:1], Positions("slices", ((30, 50),))),
        SteeringPlan(inside[1:], Positions("every", number=2)),
    ]
    return [*plain, *make_read_plans(draw), replace(apart[0], more=(apart[1],))]


def make_read_plans(draw: Callable[[float], np.ndarray]) -> list[SteeringPlan]:
    """Plans with probes: one that changes nothing, and two with a condition of each kind."""
    probes = tuple(Probe(layer, "resid_post", draw(1.0)) for layer in (0, 1, 4))
    plans = [SteeringPlan((), probes=probes, kept="scored")]
    for of in ("token", "prompt"):
        op = ResidualOp(draw(1.0), base=2.0, per_component=1.0, condition=0)
        plans.append(
            SteeringPlan(
                (Site(2, "resid_post", None, (op,)), Site(3, "resid_post", draw(1.0))),
                probes=probes, conditions=(Condition(1, above=0.0, of=of),), kept="all",
            )
        )  # fmt: skip
    return plans


def make_capture(number: int, ids: np.ndarray, plans: list[SteeringPlan]) -> CaptureJob:
    """A capture of each kind in turn, of all tokens and of some, plain and steered."""
    read: CaptureRead = ("mean", "each", "last")[number % 3]  # type: ignore[assignment]
    where = Positions("slices", ((3, 9), (30, 35))) if number % 2 else Positions()
    plan = plans[number % len(plans)] if number > 3 else None
    layers, hook = (0, 3) if number % 2 else (4, 1, 2), HOOKS[number % len(HOOKS)]
    return CaptureJob(ids, capture=Capture(layers, hook, read, where), plan=plan)


def make_jobs(vocab: int, width: int) -> list[Job]:
    """Jobs of up to 300 tokens, half of them steered, some with a common beginning."""
    rng = np.random.default_rng(5)
    shared = rng.integers(10, vocab, 150)
    plans = make_plans(width)
    jobs: list[Job] = []
    for index in range(48):
        own = rng.integers(10, vocab, rng.integers(40, 150))
        ids = np.concatenate([shared, own] if index % 2 else [own]).astype(np.int32)
        plan = plans[index // 4 % len(plans)] if index % 4 < 2 else None
        if index % 8 == 6:
            jobs.append(make_capture(index // 8, ids, plans))
        elif index % 6 == 5:
            job = GenerateJob(ids[:200], 12, policy=GREEDY, ignore_eos=True, plan=plan)
            jobs.append(job)
        else:
            scored = len(ids) - 1 if index % 3 == 0 else int(rng.integers(2, len(own)))
            columns = ("logprob", "entropy", "log_q", "rb_entropy")
            job = ScoreJob(ids[:-1], ids[-scored:], columns, top=2, policy=SOFT, plan=plan)
            jobs.append(job)
    jobs += [
        GenerateJob(shared[: 50 + 20 * n].astype(np.int32), 16, policy=SOFT, seed=n,
                    ignore_eos=True, plan=plan)
        for n, plan in enumerate(plans[-4:])
    ]  # fmt: skip
    jobs += [
        GenerateJob(
            shared[:60].astype(np.int32), 16, GREEDY, stop=("e",), ignore_eos=True, plan=plan
        )
        for plan in (None, plans[0])
    ]
    return [add_capture(n, job) for n, job in enumerate(jobs)]


J = TypeVar("J", bound=Job)
WINDOWS = (
    Positions(), Positions("completion"), Positions("slices", ((20, 25), (148, 156))),
    Positions("last_prompt"), Positions("every", number=3),
)  # fmt: skip


def add_capture(number: int, job: J) -> J:
    """Every fourth job that scores and every other one that generates, with a capture in flight."""
    if isinstance(job, CaptureJob) or number % (2 if isinstance(job, GenerateJob) else 4):
        return job
    read: CaptureRead = ("each", "mean", "last")[number // 2 % 3]  # type: ignore[assignment]
    hook, where = HOOKS[number % len(HOOKS)], WINDOWS[number // 2 % len(WINDOWS)]
    before = job.plan is not None and number % 8 == 0
    return replace(job, capture=Capture((3, 1), hook, read, where, before))


def run(engine: VllmEngine, jobs: dict[int, Job]) -> dict[int, list[float]]:
    """The numbers of each job."""
    engine.add(list(jobs.items()))
    return go_on(engine)


def go_on(engine: VllmEngine, steps: int = 10**9) -> dict[int, list[float]]:
    """The numbers of the jobs that are finished in so many steps, or when nothing is left."""
    return {index: read(result) for index, result in drain(engine, steps).items()}


def empty_cache(engine: VllmEngine, *, running: bool = True) -> None:
    """Empty the prefix cache, and throw running requests out of it."""
    engine._vllm.engine_core.scheduler.reset_prefix_cache(reset_running_requests=running)


def read(result: JobResult) -> list[float]:
    """What a job gave: scores or activations, and how many tokens were steered."""
    match result:
        case ScoreOutput():
            listed = result.columns.keys() - {"top_ids", "top_logprobs"}
            numbers = np.concatenate([result.columns[name] for name in sorted(listed)]).tolist()
        case GenerateOutput():
            numbers = [*result.logprobs.tolist(), *result.token_ids.tolist()]
        case CaptureOutput():
            numbers = []
        case failure:
            raise AssertionError(failure)
    if result.activations is not None:
        numbers += result.activations.activations_LTD.flatten().tolist()
    if result.trace is not None:
        sites = [measured for _, measured in sorted(result.trace.sites.items())]
        numbers += [
            float(sum(result.trace.tokens)),
            *result.trace.passed,
            *np.ravel(sites).tolist(),
        ]
    if result.readings is not None:
        numbers += [float(result.readings.first), *result.readings.values_TGR.flatten().tolist()]
    return numbers


def resume(engine: VllmEngine, jobs: dict[int, Job]) -> dict[int, list[float]]:
    """The numbers of jobs that are thrown out of the cache whenever they have generated a bit."""
    engine.add(list(jobs.items()))
    found: dict[int, list[float]] = {}
    for steps in (13, 14, 15):  # they are read in eleven
        found |= go_on(engine, steps)
        empty_cache(engine)
    return found | go_on(engine)


def cancel_refused(engine: VllmEngine) -> None:
    """Cancel one of two jobs that were refused at once: it gives no result."""
    job = ScoreJob(np.ones(10_000, np.int32), np.ones(1, np.int32))
    engine.add([(0, job), (1, job)])
    engine.cancel([1])
    reported = [job_id for job_id, _ in engine.step()]
    assert reported == [0], f"results of {reported}, 1 was cancelled"
    assert not engine.busy


def run_pressed(engine: VllmEngine, jobs: dict[int, Job]) -> dict[int, list[float]]:
    """The numbers of jobs that run together, and are thrown out of the cache in between."""
    empty_cache(engine, running=False)
    engine.add(list(jobs.items()))
    found: dict[int, list[float]] = {}
    for _ in range(12):
        found |= go_on(engine, 2)
        empty_cache(engine)
    return found | go_on(engine)


def run_cancelled(
    engine: VllmEngine, jobs: dict[int, Job], cancelled: list[int]
) -> dict[int, list[float]]:
    """The numbers of jobs of which some are cancelled after three steps."""
    empty_cache(engine, running=False)
    engine.add(list(jobs.items()))
    kept = go_on(engine, 3)
    engine.cancel(cancelled)
    return kept | go_on(engine)


def main() -> None:
    """Run the jobs with and without pressure, and with half of them cancelled in the middle."""
    args = {"max_num_batched_tokens": 32, "max_num_seqs": 16}
    engine = start_vllm(
        EngineSpec("probe", "vllm", sys.argv[1], dtype="float32", compile=False,
                   max_model_len=320, memory="2MiB", capture_bytes=CAPTURE_BYTES,
                   steering_slots=SLOTS, hooks=HOOKS, engine_args=args)
    )  # fmt: skip
    children_s, own_s = (
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF))
    )
    scheduler = engine._vllm.engine_core.scheduler
    preempt = scheduler._preempt_request
    preempted: list[int] = []
    """By preemption, how many tokens its request had generated."""
    seen = 0

    def count(request: Any, *rest: object, **more: object) -> object:
        nonlocal seen
        seen += 1
        preempted.append(request.num_output_tokens)
        return preempt(request, *rest, **more)

    scheduler._preempt_request = count
    cancel_refused(engine)
    jobs = dict(enumerate(make_jobs(engine.info.vocab_size, engine.info.hidden_size)))
    alone = {index: run(engine, {index: job})[index] for index, job in jobs.items()}
    cancelled = [index for index in jobs if index % 2]
    preempted.clear()
    together = run_pressed(engine, jobs)
    times_preempted = len(preempted)
    kept = run_cancelled(engine, jobs, cancelled)
    scheduler.reset_prefix_cache()
    preempted.clear()
    drawn = {i: job for i, job in jobs.items() if isinstance(job, GenerateJob)}
    resumed = resume(engine, {i: job for i, job in drawn.items() if job.policy == SOFT})
    recaptured = recapture(engine, {i: job for i, job in jobs.items() if job.capture})
    finish(
        {"alone": alone, "cancelled": cancelled, "together": together, "kept": kept,
         "preempted": times_preempted, "left": len(engine._running), "resumed": resumed,
         "times_resumed": sum(count > 0 for count in preempted),
         "recaptured": recaptured, "children_s": children_s, "own_s": own_s, "seen": seen,
         "counted": engine.read().preemptions},
        engine,
    )  # fmt: skip


if __name__ == "__main__":
    main()
