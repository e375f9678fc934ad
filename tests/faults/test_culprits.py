"""A job over which an engine raises fails alone: TransformerLens in this process."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from logsteer_server.contract.captures import Capture
from logsteer_server.contract.jobs import CaptureJob, GenerateJob, Job, JobFailure, Policy, ScoreJob
from logsteer_server.contract.plan import Positions, ResidualOp, Site, SteeringPlan
from tests.contract.tlens_cases import build, check_failure, draw_ids, run, run_pieces, whole

pytestmark = pytest.mark.engine

POISON = 77
"""A token over which the model breaks."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    found = build()
    yield found
    assert not found.busy
    found.close()


def make_jobs(count: int = 5, **fields: Any) -> list[Job]:
    rng = np.random.default_rng(3)
    texts = [draw_ids(rng, 20) for _ in range(count)]
    for text in texts:
        text[text == POISON] = 78
    texts[2][9] = POISON
    return [
        job
        for text in texts
        for job in (
            whole(text),
            GenerateJob(text, 6, Policy(0.0), ignore_eos=True, **fields),
            CaptureJob(text, capture=Capture((1,))),
        )
    ]


def break_over_poison(engine: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    read = engine._model.read

    def read_or_break(tokens_BT: Any, *rest: Any, **options: Any) -> Any:
        if (tokens_BT == POISON).any():
            raise error
        return read(tokens_BT, *rest, **options)

    monkeypatch.setattr(engine._model, "read", read_or_break)


@pytest.mark.parametrize("error", [IndexError("index 77"), RuntimeError("a shape"), TypeError("?")])
def test_only_the_job_over_which_a_batch_breaks_fails(
    engine: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    jobs = make_jobs()
    quiet = run(engine, *jobs)
    with monkeypatch.context() as patch:
        break_over_poison(engine, patch, error)
        found = run(engine, *jobs)
    for index, (job, result, alone) in enumerate(zip(jobs, found, quiet, strict=True)):
        if POISON in job.tokens:
            assert isinstance(result, JobFailure), index
            assert result.code == "internal"
            assert type(error).__name__ in result.detail
            continue
        assert not isinstance(result, JobFailure), (index, result)
        if isinstance(job, ScoreJob):
            np.testing.assert_allclose(
                result.columns["logprob"], alone.columns["logprob"], atol=1e-4
            )
        elif isinstance(job, GenerateJob):
            np.testing.assert_array_equal(result.token_ids, alone.token_ids)


def test_a_batch_that_breaks_while_it_runs_begins_again(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {i: job for i, job in enumerate(make_jobs()) if isinstance(job, GenerateJob)}
    jobs[99] = GenerateJob(jobs[1].tokens, 6, Policy(0.0), ignore_eos=True, stream=True)
    quiet = run_pieces(engine, jobs)
    read, calls = engine._model.read, 0

    def break_once(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise IndexError("once")
        return read(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "read", break_once)
        found = run_pieces(engine, jobs)
    assert found[99][-1].failed
    for index in jobs.keys() - {99}:
        np.testing.assert_array_equal(found[index][0].token_ids, quiet[index][0].token_ids)


@pytest.mark.parametrize("error", [OverflowError("too large"), KeyError("?")])
def test_a_job_that_cannot_even_be_added_fails_alone(
    engine: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    check = engine._model.check_tokens

    def check_or_break(tokens: np.ndarray) -> None:
        if POISON in tokens:
            raise error
        check(tokens)

    jobs = make_jobs()
    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "check_tokens", check_or_break)
        found = run(engine, *jobs)
    for job, result in zip(jobs, found, strict=True):
        assert isinstance(result, JobFailure) == (POISON in job.tokens)


def test_steering_that_leaves_float32_fails_alone(engine: Any) -> None:
    direction = np.zeros(128, np.float32)
    direction[0] = 1
    plan = SteeringPlan((Site(1, "resid_post", None, (ResidualOp(direction, low=3e38),)),))
    ids = draw_ids(np.random.default_rng(4), 20)
    steered = [
        ScoreJob(ids[:-1], ids[1:], columns, plan=plan)
        for columns in (("logprob",), ("rank",), ("entropy", "log_q"))
    ]
    later = SteeringPlan(plan.sites, Positions("completion"))  # it overflows in a decode step
    steered += [GenerateJob(ids, 20, plan=own) for own in (plan, later)]
    fine = GenerateJob(ids, 20, seed=2)
    *failures, output, drawn = run(engine, *steered, whole(ids), fine)
    for failure in failures:
        check_failure(failure, "non_finite", "smaller scale")
    assert np.isfinite(output.columns["logprob"]).all()
    assert drawn.token_ids.tolist() == run(engine, fine)[0].token_ids.tolist()
