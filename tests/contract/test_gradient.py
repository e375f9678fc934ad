"""Gradients and attributions against autograd on transformers and finite differences."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logsteer import APIError, Client
from logsteer.schemas import TargetGradient
from logsteer_server.contract.gradients import GradientJob, InputPoint
from logsteer_server.contract.jobs import ScoreJob
from logsteer_server.contract.plan import Direction, Positions, ResidualOp, Site, SteeringPlan
from tests.conftest import DEMO_MODEL
from tests.contract.directions import (
    at,
    draw_direction,
    load_model,
    move,
    moved_model,
    save_model,
    write_direction,
)
from tests.contract.tlens_cases import (
    LAYER,
    OTHERS,
    build,
    draw_ids,
    draw_vector,
    run,
)
from tests.refusals import refused

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def fine_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's architecture: transformers computes parts of the others in float32 always."""
    return save_model(OTHERS["gpt2"], tmp_path_factory.mktemp("fine"))


@pytest.fixture(scope="module")
def fine(fine_path: Path) -> Iterator[Any]:
    """An engine in float64."""
    found = build(fine_path, dtype="float64")
    yield found
    found.close()


@pytest.fixture(scope="module")
def fine_tensors(fine_path: Path) -> dict[str, Tensor]:
    return draw_direction(load_model(fine_path))


@pytest.fixture(scope="module")
def fine_direction(fine_tensors: Any, tmp_path_factory: pytest.TempPathFactory) -> Direction:
    return write_direction(tmp_path_factory.mktemp("directions"), fine_tensors)


def tail(ids: np.ndarray, count: int, **fields: Any) -> GradientJob:
    """The job that differentiates the last tokens' log-probability."""
    return GradientJob(ids[:-1], ids[-count:], **fields)


def differentiate_along(engine: Any, ids: np.ndarray, along: Direction) -> np.ndarray:
    """The directional derivative of every token but the first."""
    output = run(engine, tail(ids, len(ids) - 1, along=along))[0]
    return output.directional


def autograd_reference(
    model: Any, ids: np.ndarray, count: int, layers: tuple[int, ...], offset: Any = None
) -> list[Tensor]:
    """d log p(last `count` tokens) / d output of each block, by autograd on transformers."""
    kept: dict[int, Tensor] = {}

    def hook(layer: int) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> Any:
            x = output[0] if isinstance(output, tuple) else output
            if offset is not None:
                x = x + offset.to(x)
            kept[layer] = x.detach().requires_grad_() if not kept else x
            kept[layer].retain_grad()
            return (kept[layer], *output[1:]) if isinstance(output, tuple) else kept[layer]

        return keep

    body = model.base_model
    blocks = body.h if hasattr(body, "h") else body.layers
    handles = [blocks[layer].register_forward_hook(hook(layer)) for layer in layers]
    ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.enable_grad():
        rows = model(ids_1T[:, :-1]).logits[0, -count:].log_softmax(-1)
        rows.gather(-1, ids_1T[0, -count:, None]).sum().backward()
    for handle in handles:
        handle.remove()
    return [kept[layer].grad[0] for layer in layers]


def relative(found: np.ndarray, wanted: Any) -> float:
    return float(np.abs(found - np.asarray(wanted)).max() / np.abs(np.asarray(wanted)).max())


def test_gradients_are_autograds_on_transformers_in_any_batch(engine: Any) -> None:
    reference = load_model(DEMO_MODEL)
    rng = np.random.default_rng(1)
    layers = (0, 2, 4)
    sites = tuple((layer, "resid_post") for layer in layers)
    cases = [(draw_ids(rng, n), k) for n, k in ((12, 4), (40, 1), (9, 8), (70, 20))]
    outputs = run(engine, *(tail(ids, k, sites=sites) for ids, k in cases))
    worst = 0.0
    for (ids, count), output in zip(cases, outputs, strict=True):
        wanted = autograd_reference(reference, ids, count, layers)
        for found, expected in zip(output.gradients, wanted, strict=True):
            assert found.shape == (len(ids) - 1, 128)
            worst = max(worst, relative(found, expected))
        scored = run(engine, ScoreJob(ids[:-1], ids[-count:]))[0].columns["logprob"]
        assert output.logprobs == pytest.approx(scored, abs=1e-4)
    assert worst < 1e-4


@pytest.mark.parametrize("kind", ["prompt", "completion", "predicting", "last_prompt", "slices"])
def test_positions_choose_tokens_as_they_do_for_steering(engine: Any, kind: str) -> None:
    ids = draw_ids(np.random.default_rng(2), 20)
    sites = ((LAYER, "resid_post"),)
    positions = Positions(kind, ((1, 3), (17, 30)) if kind == "slices" else ())
    every = run(engine, tail(ids, 6, sites=sites))[0].gradients[0]
    some = run(engine, tail(ids, 6, sites=sites, positions=positions))[0].gradients[0]
    mask = positions.mask(0, 19, 14)
    assert 0 < mask.sum() < 19
    assert (some == every[mask]).all()


def steered_sites(name: str | None, width: int) -> tuple[Site, ...]:
    u, w = draw_vector(width, norm=1.0), draw_vector(width, seed=3, norm=1.0)
    ops = (
        ResidualOp(u, base=2.0, keep=0.0),
        ResidualOp(u, per_norm=0.3, per_component=1.0),
        ResidualOp(w, degrees=20.0),
    )
    return {
        None: (),
        "add": (Site(0, "resid_post", 3 * u),),
        "ops": (Site(0, "resid_post", None, ops),),
    }[name]


HOOKS = ["resid_post", "resid_mid", "attn_out", "mlp.hook_pre", "attn.hook_z"]


@pytest.mark.parametrize("name", [None, "add", "ops"])
@pytest.mark.parametrize("hook", HOOKS)
def test_gradients_are_central_differences(fine: Any, hook: str, name: str | None) -> None:
    """Along directions in the space of the activation, the model steered below or not."""
    # The operations of steering are computed in float32.
    step, tolerance = (1e-2, 1e-3) if name == "ops" else (1e-3, 1e-6)
    ids = draw_ids(np.random.default_rng(3), 24)
    below = steered_sites(name, 64)
    plan = SteeringPlan(below) if below else None
    output = run(fine, tail(ids, 5, sites=((1, hook),), plan=plan))[0]
    (gradient,) = output.gradients
    assert (output.trace is None) == (plan is None)
    largest = np.linalg.norm(gradient.sum(0))
    for seed in range(3):
        u = draw_vector(gradient.shape[1], seed, norm=1.0)
        found = []
        for sign in (1, -1):
            sites = (*below, Site(1, hook, np.float32(sign * step) * u))
            job = ScoreJob(ids[:-1], ids[-5:], double=True, plan=SteeringPlan(sites))
            found.append(run(fine, job)[0].columns["logprob"].sum(dtype=np.float64))
        slope = (found[0] - found[1]) / (2 * float(np.float32(step)))
        expected = (gradient.astype(np.float64) @ u).sum()
        assert abs(slope - expected) / largest < tolerance, (slope, expected)


def test_an_activation_is_what_leaves_its_site(fine: Any, fine_path: Path) -> None:
    """Steering at the same place comes before it."""
    ids = draw_ids(np.random.default_rng(4), 15)
    offset = draw_vector(64, norm=3.0)
    reference = load_model(fine_path, torch.float64)
    (wanted,) = autograd_reference(reference, ids, 5, (1,), torch.from_numpy(offset))
    plan = SteeringPlan((Site(1, "resid_post", offset),))
    found = run(fine, tail(ids, 5, sites=((1, "resid_post"),), plan=plan))[0]
    assert relative(found.gradients[0], wanted) < 1e-9
    assert found.trace.sites["1"][0] == 14


def test_gradients_under_an_override(
    fine: Any, fine_path: Path, fine_tensors: Any, fine_direction: Direction
) -> None:
    ids = draw_ids(np.random.default_rng(5), 15)
    model = moved_model(fine_path, fine_tensors, 0.05, torch.float64)
    (wanted,) = autograd_reference(model, ids, 5, (1,))
    job = tail(ids, 5, sites=((1, "resid_post"),), override=at(fine_direction, 0.05))
    assert relative(run(fine, job)[0].gradients[0], wanted) < 1e-9
    plain = run(fine, tail(ids, 5, sites=((1, "resid_post"),)))[0].gradients[0]
    assert relative(plain, wanted) > 1e-2


def differences(
    model: Any, tensors: Any, ids: np.ndarray, count: int, step: float = 1e-5
) -> np.ndarray:
    """d log p / d eta at 0 of each of the last tokens, by central differences in float64."""
    ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
    found = []
    for eta in (step, -2 * step):
        move(model, tensors, eta)
        with torch.no_grad():
            rows = model(ids_1T[:, :-1]).logits[0, -count:].log_softmax(-1)
        found.append(rows.gather(-1, ids_1T[0, -count:, None])[:, 0].numpy())
    move(model, tensors, step)
    return (found[0] - found[1]) / (2 * step)


CASES = [(12, 4), (40, 1), (9, 8), (70, 20)]


def test_directional_derivatives_are_central_differences_in_any_batch(
    fine: Any, fine_path: Path, fine_tensors: Any, fine_direction: Direction
) -> None:
    rng = np.random.default_rng(6)
    cases = [(draw_ids(rng, n), k) for n, k in CASES]
    model = load_model(fine_path, torch.float64)
    outputs = run(fine, *(tail(ids, k, along=fine_direction) for ids, k in cases))
    worst = 0.0
    for (ids, count), output in zip(cases, outputs, strict=True):
        assert output.gradients == ()
        wanted = differences(model, fine_tensors, ids, count)
        worst = max(worst, relative(output.directional, wanted))
    assert worst < 1e-7


def sum_products(model: Any, ids: np.ndarray, tensors: Any) -> list[Tensor]:
    """v . d log p / d theta by parameter, by autograd on transformers."""
    model.requires_grad_(True)
    ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
    rows = model(ids_1T[:, :-1]).logits[0].log_softmax(-1)
    rows.gather(-1, ids_1T[0, 1:, None]).sum().backward()
    parameters = dict(model.named_parameters())
    return [(parameters[name].grad.double() * v).sum() for name, v in tensors.items()]


def test_directional_derivatives_where_the_model_is_steered_and_moved(
    fine: Any, fine_path: Path, fine_tensors: Any, fine_direction: Direction, tmp_path: Path
) -> None:
    other = draw_direction(load_model(fine_path), seed=5)
    base = at(write_direction(tmp_path, other), 0.03)
    offset = draw_vector(64, norm=3.0)
    plan = SteeringPlan((Site(1, "resid_post", offset),), Positions("prompt"))
    ids = draw_ids(np.random.default_rng(8), 20)
    model = moved_model(fine_path, other, 0.03, torch.float64)
    mask_T1 = torch.from_numpy(Positions("prompt").mask(0, 19, 14))[:, None]

    def add(module: Any, inputs: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        changed = x + mask_T1 * torch.from_numpy(offset)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    model.transformer.h[1].register_forward_hook(add)
    wanted = differences(model, fine_tensors, ids, 6)
    job = tail(ids, 6, along=fine_direction, plan=plan, override=base)
    output = run(fine, job)[0]
    assert relative(output.directional, wanted) < 1e-7
    assert output.trace.sites["1"][0] == 14


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_autograd_on_transformers(name: str, tmp_path: Path) -> None:
    path = save_model(OTHERS[name], tmp_path / "model")
    engine, model = build(path), load_model(path)
    tensors = draw_direction(model)
    ids = draw_ids(np.random.default_rng(9), 30)
    found = differentiate_along(engine, ids, write_direction(tmp_path, tensors)).sum()
    wanted = sum(map(float, sum_products(model, ids, tensors)))
    assert found == pytest.approx(wanted, rel=1e-4)
    if name != "opt":  # whose blocks transformers keeps elsewhere
        (expected,) = autograd_reference(load_model(path), ids, 29, (1,))
        (gradient,) = run(engine, tail(ids, 29, sites=((1, "resid_post"),)))[0].gradients
        assert relative(gradient, expected) < 1e-4


def test_rows_are_differentiated_in_chunks_of_bounded_size(
    fine: Any, fine_path: Path, fine_direction: Direction
) -> None:
    small = build(fine_path, dtype="float64", chunk_bytes=2**20)  # 15 rows of this vocabulary
    ids = draw_ids(np.random.default_rng(10), 80)
    jobs = [
        tail(ids, 70, sites=((1, "resid_post"),)),
        tail(ids, 70, along=fine_direction),
    ]
    for job, whole in zip(jobs, run(fine, *jobs), strict=True):
        parts = run(small, job)[0]
        if job.along:
            assert relative(parts.directional, whole.directional) < 1e-9
        else:
            assert relative(parts.gradients[0], whole.gradients[0]) < 1e-9


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


@pytest.mark.parametrize("name", ["llama", "bridged", *OTHERS])
def test_gradients_at_points_of_the_line_are_transformers(name: str, tmp_path: Path) -> None:
    """Sequences of many lengths, points and baselines in one batch."""
    path = save_model(OTHERS[name], tmp_path / "model") if name in OTHERS else DEMO_MODEL
    # Steering inside of a block, by nothing, has the bridge run.
    inside = SteeringPlan((Site(1, "mlp_out", np.zeros(128, np.float32)),))
    plan = inside if name == "bridged" else None
    model, rng = load_model(path), np.random.default_rng(1)
    embed = model.get_input_embeddings()
    cases = [
        (draw_ids(rng, length), count, InputPoint(alpha, baseline))
        for length, count in ((12, 4), (40, 1), (9, 8))
        for alpha, baseline in ((1.0, None), (0.3, None), (0.7, BASELINE))
    ]
    engine = build(path)
    outputs = run(engine, *(GradientJob(ids[:-1], ids[-count:], input_point=point, plan=plan)
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
    assert worst < 0.01


def test_completeness_comes_with_the_steps(tlens_client: Client) -> None:
    gaps = [
        abs(ask(tlens_client, attribution="integrated", steps=steps)[0].convergence_delta or 0)
        for steps in (2, 300)
    ]
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
    with refused(code, reason):
        tlens_client.gradient([ITEM], **{"wrt": None, **fields})


def test_too_many_tokens_at_all_steps_are_refused(tlens_client: Client) -> None:
    items = [{"context_ids": [5] * 200, "target_ids": [[6]] * 30}]
    with pytest.raises(APIError, match="1002 points of 6000 tokens are 6012000 to read"):
        tlens_client.gradient(items, attribution="integrated", steps=1000)
