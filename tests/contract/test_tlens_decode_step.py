"""The decode step of the TransformerLens engine, beside the modules that it takes the place of."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from logsteer_server.contract.jobs import GenerateJob, Policy
from logsteer_server.contract.plan import Positions, ResidualOp, Site, SteeringPlan
from logsteer_server.engines.tlens.decode_step import DecodeStep, NextTokens
from tests.conftest import DEMO_MODEL
from tests.contract.tlens_cases import (
    GREEDY,
    add_plan,
    build,
    draw_ids,
    draw_vector,
    run,
    score,
    whole,
)
from tests.families.checkpoints import FAMILIES

pytestmark = pytest.mark.engine

STEPPED = ("llama", "qwen2", "qwen3", "gemma")
CLOSE = 1e-4
"""Nats; what families differ from transformers by is a tenth of it."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many sequences each read of a decode step had."""
    found: list[int] = []
    read = DecodeStep.read

    def count(self: DecodeStep, tokens: NextTokens) -> torch.Tensor:
        found.append(len(tokens.tokens_B1))
        return read(self, tokens)

    monkeypatch.setattr(DecodeStep, "read", count)
    return found


def make_jobs(engine: Any, max_tokens: int = 12, seed: int = 30) -> list[GenerateJob]:
    """Prompts of several lengths, steered by several plans, by operations, and not at all.

    From these seeds no draw falls as near to an edge of its CDF as rounding reaches: 3e-5 or more.
    """
    rng = np.random.default_rng(8)
    vocab, width = engine.info.vocab_size, engine.info.hidden_size
    vector = draw_vector(width, norm=1.0)
    turn = ResidualOp(vector, per_component=1, degrees=20)
    plans = (
        None,
        SteeringPlan((Site(1, "resid_post", 3 * vector),)),
        SteeringPlan((Site(0, "resid_pre", 2 * vector),), Positions("completion")),
        SteeringPlan((Site(1, "resid_post", None, (turn,)),)),
    )
    prompts = [draw_ids(rng, length, vocab) for length in (9, 3, 17, 9)]
    return [
        GenerateJob(ids, max_tokens + i, Policy(0.9), seed=seed + i, ignore_eos=True, plan=plan)
        for i, (ids, plan) in enumerate(zip(prompts, plans, strict=True))
    ]


@pytest.mark.parametrize("family", STEPPED)
def test_a_family_decodes_as_by_its_modules(
    family: str, tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES[family].make(tmp_path / family)
    engine = build(tmp_path / family)
    jobs = make_jobs(engine)
    reads.clear()
    together = run(engine, *jobs)
    assert reads[0] == len(jobs)
    alone = run(engine, jobs[2])[0]
    assert reads[-1] == 1
    reads.clear()
    monkeypatch.setattr(engine._model, "_decode_step", None)
    expected = run(engine, *jobs)
    assert not reads
    for job, found, wanted in zip(jobs, together, expected, strict=True):
        assert found.token_ids.tolist() == wanted.token_ids.tolist()
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=CLOSE)
        if job.plan:
            assert found.trace.tokens == wanted.trace.tokens
            for name, (count, ratio) in wanted.trace.sites.items():
                assert found.trace.sites[name] == (count, pytest.approx(ratio, rel=1e-4))
    assert alone.token_ids.tolist() == expected[2].token_ids.tolist()


def test_bfloat16_within_its_own_noise(reads: list[int]) -> None:
    """Beside the same tokens in float32, the step is as far off as the modules are."""
    coarse, exact = build(dtype="bfloat16"), build()
    ids = draw_ids(np.random.default_rng(5), 20)
    jobs = [GenerateJob(ids[: 20 - 4 * i], 60, seed=i, ignore_eos=True) for i in range(3)]
    reads.clear()
    found = run(coarse, *jobs)
    assert reads == [3] * 59
    errors = []
    for job, output in zip(jobs, found, strict=True):
        text = np.concatenate([job.tokens, output.token_ids])
        wanted, by_modules = (score(e, whole(text))[0][-60:] for e in (exact, coarse))
        errors.append([output.logprobs - wanted, by_modules - wanted])
    own, modules = np.sqrt((np.array(errors) ** 2).mean((0, 2)))
    assert own <= 1.5 * modules


def test_who_joins_a_running_batch_gets_what_it_gets_alone(reads: list[int]) -> None:
    engine = build()
    first, *others = make_jobs(engine, max_tokens=80, seed=100)
    engine.add([(0, first)])
    found: dict[int, Any] = {}
    for step in range(200):
        if step == 20:
            engine.add(list(enumerate(others, 1)))
        found |= dict(engine.step())
        if not engine.busy:
            break
    assert max(reads) == 1 + len(others)
    for i, job in enumerate((first, *others)):
        (alone,) = run(engine, job)
        assert found[i].token_ids.tolist() == alone.token_ids.tolist()
        assert found[i].logprobs == pytest.approx(alone.logprobs, abs=CLOSE)


def test_a_hook_inside_a_block_is_left_to_the_bridge(reads: list[int]) -> None:
    engine = build()
    vector = draw_vector(engine.info.hidden_size)
    ids = draw_ids(np.random.default_rng(2), 6)
    reads.clear()
    inside = SteeringPlan((Site(2, "mlp_out", vector),))
    run(engine, GenerateJob(ids, 5, policy=GREEDY, plan=inside))
    assert not reads
    run(engine, GenerateJob(ids, 5, policy=GREEDY, plan=add_plan(), ignore_eos=True))
    assert reads == [1] * 4  # the prompt is read by the modules


def test_longer_than_the_angles_that_were_computed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = draw_ids(np.random.default_rng(3), 30)
    job = GenerateJob(ids, 40, policy=GREEDY, ignore_eos=True)
    (wanted,) = run(build(), job)
    monkeypatch.setattr("logsteer_server.engines.tlens.decode_step.FIRST_ANGLES", 16)
    (found,) = run(build(), job)
    assert found.token_ids.tolist() == wanted.token_ids.tolist()


def test_a_step_that_gives_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = DecodeStep.read

    def falsify(self: DecodeStep, tokens: NextTokens) -> torch.Tensor:
        hidden_BD = read(self, tokens)
        return hidden_BD + 1e-3 * hidden_BD.abs().max()

    monkeypatch.setattr(DecodeStep, "read", falsify)
    with caplog.at_level(logging.WARNING, "logsteer_server"):
        engine = build()
    assert engine._model._decode_step is None
    assert "its decode step gives something else" in caplog.text


def test_parameters_keep_their_names_and_numbers() -> None:
    engine = build()
    parameters = engine._model.parameters.by_name

    saved = load_file(DEMO_MODEL / "model.safetensors")
    assert saved.keys() <= parameters.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in saved.items())
    assert not any(parameter.is_inference() for parameter in parameters.values())


def test_few_rows_times_a_large_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()._model
    hidden_RD = torch.randn(20, model.hidden_size, generator=torch.Generator().manual_seed(0))
    expected_RV = hidden_RD @ model._linear_head.weight.T
    monkeypatch.setattr("logsteer_server.engines.tlens.model.LARGE_HEAD", 1)
    for count in (1, 2, 16, 17, 20):
        logits_RV = model.project(hidden_RD[:count])
        assert logits_RV.is_contiguous()
        torch.testing.assert_close(logits_RV, expected_RV[:count], rtol=1e-5, atol=1e-5)
