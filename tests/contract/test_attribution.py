"""Attributions of log-probabilities to input tokens, against a loop over transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logsteer import APIError, Client
from logsteer.schemas import TargetGradient
from logsteer_server.contract.jobs import GradientJob, InputPoint, JobFailure
from tests.conftest import DEMO_MODEL
from tests.contract.directions import load_model, save_model
from tests.contract.tlens_cases import LAYER, OTHERS, build, draw_ids, draw_vector, run

pytestmark = pytest.mark.engine

ITEM = {"context": "Once upon a time there was a little girl", "targets": [" named Lily", " and"]}
BASELINE = 7


def differentiate(model: Any, x_BTD: Tensor, ids: np.ndarray, count: int) -> tuple[float, Tensor]:
    """Summed log p of the last tokens, and its gradient with respect to the embeddings put in."""
    leaf_BTD = x_BTD.clone().requires_grad_()
    with torch.enable_grad():
        rows = model(inputs_embeds=leaf_BTD).logits[:, -count:].log_softmax(-1)
        targets_R = torch.tensor(ids[-count:].astype(np.int64))
        total = rows[:, range(count), targets_R].sum()
        (gradient_BTD,) = torch.autograd.grad(total, leaf_BTD)
    return float(total.detach()), gradient_BTD


def attribute(model: Any, ids: np.ndarray, count: int, steps: int, baseline: int) -> Tensor:
    """Integrated gradients as captum's `LayerIntegratedGradients` on the embedding: [T]."""
    embed = model.get_input_embeddings()
    x_TD = embed(torch.tensor(ids[:-1].astype(np.int64))).detach()
    base_TD = embed(torch.full((len(x_TD),), baseline)).detach()
    nodes_S, weights_S = np.polynomial.legendre.leggauss(steps)
    total_TD = torch.zeros_like(x_TD)
    for node, weight in zip(nodes_S.tolist(), weights_S.tolist(), strict=True):
        moved_1TD = (base_TD + (node + 1) / 2 * (x_TD - base_TD))[None]
        total_TD += weight / 2 * differentiate(model, moved_1TD, ids, count)[1][0]
    return ((x_TD - base_TD) * total_TD).sum(-1)


@pytest.mark.parametrize("name", ["llama", *OTHERS])
def test_gradients_at_points_of_the_line_are_transformers(name: str, tmp_path: Path) -> None:
    """Sequences of many lengths, points and baselines in one batch."""
    path = DEMO_MODEL if name == "llama" else save_model(OTHERS[name], tmp_path / "model")
    model, rng = load_model(path), np.random.default_rng(1)
    embed = model.get_input_embeddings()
    cases = [
        (draw_ids(rng, length), count, InputPoint(alpha, baseline))
        for length, count in ((12, 4), (40, 1), (9, 8))
        for alpha, baseline in ((1.0, None), (0.3, None), (0.7, BASELINE))
    ]
    engine = build(path)
    outputs = run(engine, *(GradientJob(ids[:-1], ids[-count:], input_point=point)
                            for ids, count, point in cases))  # fmt: skip
    engine.close()
    for (ids, count, point), output in zip(cases, outputs, strict=True):
        x_TD = embed(torch.tensor(ids[:-1].astype(np.int64))).detach()
        base_1D = embed(torch.tensor([BASELINE])).detach() * (point.baseline is not None)
        moved_TD = base_1D + point.alpha * (x_TD - base_1D)
        total, gradient_1TD = differentiate(model, moved_TD[None], ids, count)
        wanted_T = (gradient_1TD[0] * (x_TD - base_1D)).sum(-1).numpy()
        assert output.logprobs.sum() == pytest.approx(total, abs=1e-4 * count)
        assert np.abs(output.attributions - wanted_T).max() < 1e-4 * max(np.abs(wanted_T).max(), 1)


def test_points_that_cannot_be_are_refused(engine: Any) -> None:
    ids = draw_ids(np.random.default_rng(2), 8)
    for fields, reason in (
        ({"input_point": InputPoint(1.0, 10**6)}, "the vocabulary"),
        ({"input_point": InputPoint(1.0), "sites": ((LAYER, "resid_post"),)}, "give one"),
    ):
        (failure,) = run(engine, GradientJob(ids[:-1], ids[-2:], **fields))  # type: ignore[arg-type]
        assert isinstance(failure, JobFailure) and reason in failure.detail


def ask(client: Client, **options: Any) -> list[TargetGradient]:
    return client.gradient([ITEM], None, **options).results[0].targets


@pytest.mark.parametrize("options", [{"steps": 300}, {"baseline": BASELINE, "steps": 200}])
def test_integrated_gradients_are_complete_and_transformers(
    tlens_client: Client, options: Any
) -> None:
    model = load_model(DEMO_MODEL)
    steps, baseline = options["steps"], options.get("baseline", 0)
    worst = 0.0
    for found in ask(tlens_client, attribution="integrated", **options):
        assert found.input_tokens is not None and found.logprob is not None
        ids = np.array([*found.input_ids, found.token_ids[-1]])
        wanted_T = attribute(model, ids, len(found.token_ids), steps, baseline)
        assert found.attributions == pytest.approx(wanted_T.tolist(), abs=1e-3)
        gap = sum(found.attributions) - (found.logprob - found.baseline_logprob)  # type: ignore[arg-type]
        assert found.convergence_delta == pytest.approx(gap, abs=1e-9)
        worst = max(worst, abs(gap))
        assert abs(found.logprob - found.baseline_logprob) > 1
        assert "".join(found.input_tokens).startswith(f"<s>{ITEM['context']}")
    print(f"\nbaseline {baseline}: completeness to {worst:.1e} nats with {steps} steps")
    assert worst < 0.01


def test_completeness_comes_with_the_steps(tlens_client: Client) -> None:
    gaps = [
        abs(ask(tlens_client, attribution="integrated", steps=steps)[0].convergence_delta or 0)
        for steps in (2, 300)
    ]
    print(f"\ncompleteness with 2 and 300 steps: {gaps[0]:.1e}, {gaps[1]:.1e} nats")
    assert gaps[1] < 1e-3 < gaps[0]


def test_gradient_times_input_is_of_the_steered_model(tlens_client: Client) -> None:
    vector = draw_vector()
    steering = {"vectors": [{"data": {str(LAYER): vector.tolist()}}]}
    model = load_model(DEMO_MODEL)
    model.model.layers[LAYER].register_forward_hook(
        lambda _, __, output: (output[0] + torch.tensor(vector), *output[1:])
        if isinstance(output, tuple) else output + torch.tensor(vector)
    )  # fmt: skip
    answer = tlens_client.gradient([ITEM], attribution="gradient_x_input", steering=steering)
    assert answer.steering is not None
    for found in answer.results[0].targets:
        assert found.input_ids is not None and found.baseline_logprob is None
        ids = np.array([*found.input_ids, found.token_ids[-1]])
        x_TD = model.get_input_embeddings()(torch.tensor(ids[:-1])).detach()
        total, gradient_1TD = differentiate(model, x_TD[None], ids, len(found.token_ids))
        assert found.logprob == pytest.approx(total, abs=1e-3)
        wanted = (gradient_1TD[0] * x_TD).sum(-1).tolist()
        assert found.attributions == pytest.approx(wanted, abs=1e-3)
    table = answer.to_pandas()
    assert table.attribution.tolist() == [
        n for found in answer.results[0].targets for n in found.attributions or []
    ]
    assert table.token[0] == answer.results[0].targets[0].input_tokens[0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({}, "invalid_request", "exactly one of wrt, attribution"),
        ({"wrt": {"layers": [1]}, "attribution": "integrated"}, "invalid_request", "exactly one"),
        ({"attribution": "gradient_x_input", "steps": 3}, "invalid_request", "steps and baseline"),
        ({"attribution": "integrated", "baseline": 10**6}, "invalid_request", "the vocabulary"),
        ({"attribution": "integrated", "steps": 1001}, "invalid_request", "1000"),
    ],
)
def test_attributions_that_are_refused(
    tlens_client: Client, fields: Any, code: str, reason: str
) -> None:
    with pytest.raises(APIError, match=reason) as caught:
        tlens_client.gradient([ITEM], **{"wrt": None, **fields})
    assert caught.value.code == code


def test_too_many_tokens_at_all_steps_are_refused(tlens_client: Client) -> None:
    items = [{"context_ids": [5] * 200, "target_ids": [[6]] * 30}]
    with pytest.raises(APIError, match="1002 points of 6000 tokens are 6012000 to read"):
        tlens_client.gradient(items, attribution="integrated", steps=1000)
