"""Score jobs that share a context: it is read once, and the numbers are those of each alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.contract.plan import Positions, Site, SteeringPlan
from tests.contract.tlens_cases import (
    BATCH,
    PER_TOKEN,
    add_plan,
    build,
    draw_ids,
    draw_vector,
    run,
)

pytestmark = pytest.mark.engine

RNG = np.random.default_rng(6)
CONTEXTS = [draw_ids(RNG, length, 600) for length in (60, 47, 60)]
TARGETS = [draw_ids(RNG, length, 600) for length in (1, 6, 3)]


@pytest.fixture
def read(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tokens, padding included, the model reads in each pass."""
    counts: list[int] = []
    own = type(engine._model).read

    def count(self: Any, tokens_BT: Tensor, *args: Any, **options: Any) -> Tensor:
        counts.append(tokens_BT.numel())
        return own(self, tokens_BT, *args, **options)

    monkeypatch.setattr(type(engine._model), "read", count)
    return counts


def make_jobs(plan: SteeringPlan | None = None) -> list[ScoreJob]:
    return [
        ScoreJob(np.concatenate([context, target[:-1]]), target, plan=plan)
        for context in CONTEXTS
        for target in TARGETS
    ]


PLANS = {
    "plain": None,
    "all": add_plan(),
    "prompt": add_plan("prompt"),
    "last_prompt": add_plan("last_prompt"),
    "completion": add_plan("completion"),
    "predicting": add_plan("predicting"),
    "slices": SteeringPlan(
        (Site(1, "resid_pre", draw_vector()), Site(3, "resid_post", draw_vector(seed=1))),
        Positions("slices", ((3, 48),)),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_context_is_read_once(engine: Any, read: list[int], name: str) -> None:
    jobs = make_jobs(PLANS[name])
    alone = [run(engine, job)[0] for job in jobs]
    read.clear()
    together = run(engine, *jobs)
    # Contexts up to the first scored row, padded; behind each the row and its target's tokens.
    assert read == [3 * 59, 9 * 6]
    for one, two in zip(alone, together, strict=True):
        assert two.columns["logprob"] == pytest.approx(one.columns["logprob"], abs=BATCH)
        if one.trace:
            assert two.trace.tokens == one.trace.tokens
            for site, (count, ratio) in one.trace.sites.items():
                assert two.trace.sites[site] == (count, pytest.approx(ratio, rel=1e-4))


def test_what_differs_is_not_shared(engine: Any, read: list[int]) -> None:
    """Other steering is another context, and what is read or steered inside of blocks is whole."""
    inside = SteeringPlan((Site(2, "mlp_out", draw_vector()),))
    for plans in ((None, add_plan()), (add_plan(), add_plan(seed=1)), (inside, inside)):
        jobs = [make_jobs(plan)[0] for plan in plans]
        alone = [run(engine, job)[0] for job in jobs]
        read.clear()
        together = run(engine, *jobs)
        assert read == [2 * 60]
        for one, two in zip(alone, together, strict=True):
            assert two.columns["logprob"] == pytest.approx(one.columns["logprob"], abs=BATCH)


def test_others_are_scored_beside(engine: Any, read: list[int]) -> None:
    jobs = [*make_jobs(), ScoreJob(TARGETS[1][:-1], TARGETS[1][1:])]
    alone = [run(engine, job)[0] for job in jobs]
    read.clear()
    together = run(engine, *jobs)
    assert read == [5, 3 * 59, 9 * 6]
    for one, two in zip(alone, together, strict=True):
        assert two.columns["logprob"] == pytest.approx(one.columns["logprob"], abs=BATCH)


@pytest.mark.parametrize("name", ["mistral", "gpt2", "opt", "bloom", "gemma2"])
def test_families(name: str, tmp_path: Path) -> None:
    """A window shorter than the context, and positions that are learned or found in the mask."""
    from tests.families.checkpoints import FAMILIES

    FAMILIES[name].make(tmp_path)
    engine = build(tmp_path)
    jobs = make_jobs()
    alone = [run(engine, job)[0] for job in jobs]
    for one, two in zip(alone, run(engine, *jobs), strict=True):
        assert two.columns["logprob"] == pytest.approx(one.columns["logprob"], abs=PER_TOKEN)
