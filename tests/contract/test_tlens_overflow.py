"""Overflow in attention of a changed model: the job fails, whatever hides it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from logsteer_server.contract.jobs import GenerateJob, Job, JobFailure
from logsteer_server.contract.plan import Direction, Site, SteeringPlan
from logsteer_server.engines.tlens.overflow import CheckedAttention
from tests.contract.directions import at, write_direction
from tests.contract.lora import write_adapter
from tests.contract.test_overrides import store_adapter
from tests.contract.tlens_cases import (
    GREEDY,
    U,
    build,
    draw_ids,
    draw_vector,
    run,
    whole,
)

pytestmark = pytest.mark.engine

TEXTS = [draw_ids(np.random.default_rng(1), length) for length in (9, 30)]
"""Of so few keys as the first has, torch's fused attention on CPUs hides that scores are NaN."""
QUERIES = "model.layers.0.self_attn.q_proj.weight"
INSIDE = SteeringPlan((Site(2, "mlp_out", 0.001 * U),))
"""Has a block computed in parts."""


def draw_queries(directory: Path) -> Direction:
    torch.manual_seed(0)
    return write_direction(directory, {QUERIES: torch.randn(128, 128)})


def list_jobs(**changes: Any) -> list[Job]:
    return [
        job
        for ids in TEXTS
        for plan in (None, INSIDE)
        for job in (
            whole(ids, plan=plan, **changes),
            GenerateJob(ids, 3, policy=GREEDY, plan=plan, **changes),
        )
    ]


def check_failed(results: list[Any]) -> None:
    found = [r.code if isinstance(r, JobFailure) else r for r in results]
    assert found == ["non_finite"] * len(results)


@pytest.mark.parametrize(
    ("dtype", "eta"), [("float16", 3e3), ("float16", 1e4), ("float32", 1e37), ("float32", 1e38)]
)
def test_queries_beyond_the_dtype(dtype: str, eta: float, tmp_path: Path) -> None:
    engine = build(dtype=dtype)
    override = at(draw_queries(tmp_path), eta)
    *failed, beside = run(engine, *list_jobs(override=override), whole(TEXTS[0]))
    check_failed(failed)
    assert np.isfinite(beside.columns["logprob"]).all()


def test_an_adapter_of_queries(tmp_path: Path) -> None:
    adapter = store_adapter(write_adapter(tmp_path / "a"), 8e38, only="q_proj")
    check_failed(run(build(), *list_jobs(adapter=adapter)))


NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize("broken", ["queries", "keys"])
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sequence_whose_scores_overflow_is_lost(
    broken: str, count: int, dtype: torch.dtype
) -> None:
    """Whatever fused attention makes of them; the sequence beside it is as it was."""
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 4, count, 8).to(dtype)
    plain = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    for value in (NAN, INF, -INF, torch.finfo(dtype).max):
        (queries if broken == "queries" else keys)[1, 0, count // 2, 0] = value
        with CheckedAttention(None):
            found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        assert torch.equal(found[0], plain[0])
        assert found[1].isnan().all() == (value != torch.finfo(torch.float16).max)


@pytest.mark.parametrize("hook", ["resid_post", "ln1.hook_out"])
def test_changes_from_which_scores_may_overflow_fail(hook: str) -> None:
    """Queries and keys grow with what attention is given, and scores by its square."""
    engine = build()
    for norm in (1e13, 1e15, 1e18):
        plan = SteeringPlan((Site(1, hook, draw_vector(norm=norm)),))
        results = run(
            engine, *(whole(ids, plan=plan) for ids in TEXTS), GenerateJob(TEXTS[1], 3, plan=plan)
        )
        if norm > 1e14:
            check_failed(results)
        else:
            assert not any(isinstance(result, JobFailure) for result in results)


def test_attention_in_parts_of_a_query_that_sees_nothing_finite() -> None:
    least = torch.finfo(torch.float32).min
    scores = torch.tensor([[-INF, least, least], [1.0, -INF, least], [least, least, least]])
    padding = torch.tensor([[1, 1, 0]])
    with CheckedAttention(padding):
        pattern = functional.softmax(scores[None, None], dim=-1)[0, 0]
    assert pattern.isnan().all(-1).tolist() == [True, False, False]
    assert pattern[2].tolist() == [0, 0, 0]


def test_prompts_of_two_lengths_in_float64() -> None:
    engine = build(dtype="float64")
    jobs = [GenerateJob(ids, 4, policy=GREEDY, ignore_eos=True) for ids in TEXTS]
    for job, found in zip(jobs, run(engine, *jobs), strict=True):
        (alone,) = run(engine, job)
        assert found.token_ids.tolist() == alone.token_ids.tolist()
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-6)
