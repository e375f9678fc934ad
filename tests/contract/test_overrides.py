"""Parameter overrides, cast to float32 or not, against transformers changed by hand."""

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from logsteer_server.contract.gradients import GradientJob
from logsteer_server.contract.jobs import (
    CheckOverrideJob,
    GenerateJob,
    Policy,
    ScoreJob,
)
from logsteer_server.contract.plan import Adapter, Direction, Site, SteeringPlan
from tests.conftest import DEMO_MODEL
from tests.contract.directions import (
    at,
    draw_direction,
    follow_gradient,
    load_model,
    move,
    moved_model,
    read_logprobs,
    save_model,
    write_direction,
)
from tests.contract.lora import merge_adapter, write_adapter
from tests.contract.test_gradient import differentiate_along
from tests.contract.tlens_cases import (
    BATCH,
    OTHERS,
    add_plan,
    build,
    check_failure,
    draw_ids,
    draw_vector,
    run,
    score,
    whole,
)
from tests.families.checkpoints import FAMILIES

pytestmark = pytest.mark.engine

PER_TOKEN = 1e-4
ETA = 0.05
"""Moves each tensor by 5 percent of its length: log-probabilities change by nats."""


@pytest.fixture(scope="module")
def moved(tensors: Any) -> Any:
    return moved_model(DEMO_MODEL, tensors, ETA)


def digest_parameters(engine: Any) -> str:
    hasher = hashlib.sha256()
    for name, tensor in engine._model.parameters.by_name.items():
        hasher.update(name.encode() + tensor.numpy().tobytes())
    return hasher.hexdigest()


def test_scores_are_those_of_a_model_changed_by_hand_and_nobody_elses(
    engine: Any, moved: Any, direction: Direction
) -> None:
    rng = np.random.default_rng(1)
    texts = [draw_ids(rng, n) for n in (3, 40, 17, 90)]
    before, resident = score(engine, *map(whole, texts)), digest_parameters(engine)
    jobs = [whole(ids, override=at(direction, ETA)) for ids in texts]
    mixed = [job for pair in zip(jobs, map(whole, texts), strict=True) for job in pair]
    found = score(engine, *mixed)
    for ids, under, beside, plain in zip(texts, found[::2], found[1::2], before, strict=True):
        assert under == pytest.approx(read_logprobs(moved, ids), abs=PER_TOKEN)
        assert np.abs(under - plain).max() > 0.1
        assert (beside == plain).all()
    assert digest_parameters(engine) == resident
    halves = score(engine, *(whole(texts[1], override=at(direction, eta)) for eta in (ETA, -ETA)))
    assert halves[0] == pytest.approx(found[2], abs=BATCH)
    assert np.abs(halves[1] - found[2]).max() > 0.1


def test_generation_is_that_of_the_changed_model(
    engine: Any, moved: Any, direction: Direction
) -> None:
    rng = np.random.default_rng(3)
    prompts = [draw_ids(rng, n) for n in (1, 30, 7)]
    greedy = Policy(temperature=0.0)
    plain = [GenerateJob(ids, 20, greedy, ignore_eos=True) for ids in prompts]
    under = [
        GenerateJob(ids, 20, greedy, ignore_eos=True, override=at(direction, ETA))
        for ids in prompts
    ]
    plan = add_plan()
    steered = [
        GenerateJob(ids, 20, seed=i, ignore_eos=True, plan=plan, override=at(direction, -ETA / 2))
        for i, ids in enumerate(prompts)
    ]
    expected_plain = run(engine, *plain)
    found = run(engine, *under, *plain, *steered)
    for ids, output in zip(prompts, found[:3], strict=True):
        both = np.concatenate([ids, output.token_ids])
        with torch.inference_mode():
            logits_TV = moved(torch.from_numpy(both.astype(np.int64))[None]).logits[0]
        assert output.token_ids.tolist() == logits_TV[len(ids) - 1 : -1].argmax(-1).tolist()
        scored = read_logprobs(moved, both)[-20:]
        assert output.logprobs == pytest.approx(scored, abs=PER_TOKEN)
    for output, expected in zip(found[3:6], expected_plain, strict=True):
        assert output.token_ids.tolist() == expected.token_ids.tolist()
    for job, output in zip(steered, found[6:], strict=True):
        both = np.concatenate([job.tokens, output.token_ids])
        again = ScoreJob(both[:-1], output.token_ids, plan=plan, override=job.override)
        assert score(engine, again)[0] == pytest.approx(output.logprobs, abs=PER_TOKEN)


def test_a_tied_head_moves_with_the_embedding(engine: Any, tensors: Any, tmp_path: Path) -> None:
    v = {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    head = write_direction(tmp_path, {"lm_head.weight": v["model.embed_tokens.weight"]})
    ids = draw_ids(np.random.default_rng(6), 30)
    expected = read_logprobs(moved_model(DEMO_MODEL, v, ETA), ids)
    for one in (write_direction(tmp_path, v), head):
        found = score(engine, whole(ids, override=at(one, ETA)))[0]
        assert found == pytest.approx(expected, abs=PER_TOKEN)


def test_bfloat16_parameters_are_rounded_once(tensors: Any, direction: Direction) -> None:
    engine = build(dtype="bfloat16")
    ids = draw_ids(np.random.default_rng(7), 30)
    model = moved_model(DEMO_MODEL, tensors, ETA, torch.bfloat16)
    with torch.no_grad():
        hidden_1TD = model.model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state
        rows = hidden_1TD[0, :-1].float() @ model.lm_head.weight.float().T
    expected = rows.log_softmax(-1)[torch.arange(29), torch.from_numpy(ids[1:].astype(np.int64))]
    found = score(engine, whole(ids, override=at(direction, ETA)))[0]
    assert found == pytest.approx(expected.numpy(), abs=0.05)
    base = score(engine, whole(ids))[0]
    assert np.abs(found - base).max() > 0.5


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures(name: str, tmp_path: Path) -> None:
    path = save_model(OTHERS[name], tmp_path / "model")
    engine, model = build(path), load_model(path)
    tensors = draw_direction(model)
    one = at(write_direction(tmp_path, tensors), ETA)
    move(model, tensors, ETA)
    ids = draw_ids(np.random.default_rng(8), 40)
    expected = read_logprobs(model, ids)
    assert score(engine, whole(ids, override=one))[0] == pytest.approx(expected, abs=PER_TOKEN)
    nothing = np.zeros(64, np.float32)
    edge = SteeringPlan((Site(1, "resid_post", nothing),))
    inside = SteeringPlan((Site(1, "mlp_out", nothing),))
    found = score(engine, whole(ids, override=one, plan=edge))[0]
    assert found == pytest.approx(expected, abs=PER_TOKEN)
    failure = run(engine, whole(ids, override=one, plan=inside))[0]
    if name == "gpt2":  # the bridge has its own copies of GPT-2's joint attention weights
        check_failure(failure, "unsupported_by_engine", "resid_post")
    else:
        assert failure.columns["logprob"] == pytest.approx(expected, abs=PER_TOKEN)


def test_a_file_that_is_gone_or_damaged_fails_its_own_jobs(engine: Any, tmp_path: Path) -> None:
    file = write_direction(tmp_path, {"model.norm.weight": torch.ones(128)})
    ids = draw_ids(np.random.default_rng(10), 5)
    plain = score(engine, whole(ids))[0]
    Path(file.path).write_bytes(b"x" * 100)
    damaged, beside = run(engine, whole(ids, override=at(file, 1.0)), whole(ids))
    check_failure(damaged, "internal", "cannot be read")
    assert (beside.columns["logprob"] == plain).all()
    Path(file.path).unlink()
    for job in (whole(ids, override=at(file, 1.0)), GenerateJob(ids, 3, override=at(file, 1.0))):
        gone = run(engine, job)[0]
        check_failure(gone, "unknown_override", "deleted")


def test_directions_in_memory_are_bounded(tmp_path: Path) -> None:
    size = 128 * 4
    engine = build(engine_args={"override_cache_bytes": 2 * size})
    files = [
        write_direction(tmp_path, {"model.norm.weight": torch.full((128,), float(i))})
        for i in range(4)
    ]
    ids = draw_ids(np.random.default_rng(11), 5)
    for file in (files[0], files[1], files[0], files[2], files[3]):
        run(engine, whole(ids, override=at(file, 0.1)))
    assert list(engine._deltas._directions) == [files[2].sha256, files[3].sha256]
    large = write_direction(tmp_path, {"model.embed_tokens.weight": torch.ones(1436, 128)})
    engine.add([(i, whole(ids, override=at(large, 0.1 * i))) for i in range(2)])
    results = engine.step()
    assert engine.busy
    assert list(engine._deltas._directions) == [large.sha256]
    assert len(results + engine.step()) == 2
    assert not engine.busy
    assert not engine._deltas._directions
    assert not engine._deltas._applied


def test_deltas_that_alternate_are_added_up_once(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and continuations; with room for two, a third takes the place of the oldest."""
    added: list[float] = []
    add_up = type(engine._deltas)._add_up

    def count(self: Any, delta: Any) -> Any:
        added.append(delta.override.eta)
        return add_up(self, delta)

    monkeypatch.setattr(type(engine._deltas), "_add_up", count)
    file = write_direction(tmp_path, {"model.norm.weight": torch.ones(128)})
    ids = draw_ids(np.random.default_rng(11), 5)
    small = build(engine_args={"override_cache_bytes": 2 * 128 * 4})
    plain = score(small, whole(ids))[0]
    found = [score(small, whole(ids, override=at(file, eta)))[0] for eta in (0.1, 0.2) * 3]
    assert added == [0.1, 0.2]
    assert (found[0] == found[4]).all()
    assert (found[1] == found[5]).all()
    assert (found[0] != found[1]).any() and (found[0] != plain).any()
    run(small, *(GenerateJob(ids, 3, override=at(file, eta)) for eta in (0.1, 0.2) * 2))
    assert added == [0.1, 0.2]
    for eta in (0.3, 0.2, 0.1):
        score(small, whole(ids, override=at(file, eta)))
    assert added == [0.1, 0.2, 0.3, 0.1]


ETAS = [10.0**-n for n in range(3, 10)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_small_etas_are_linear_over_six_decades(engine: Any, tmp_path: Path, dtype: str) -> None:
    """A log-probability changes by eta times its derivative, up to terms of second order: a tenth
    of eta leaves a tenth of the relative error, down to what the dtype can tell.

    The model in float64 is GPT-2's: transformers computes parts of a Llama in float32 always.
    """
    path = DEMO_MODEL if dtype == "float32" else save_model(OTHERS["gpt2"], tmp_path / "model")
    one = engine if dtype == "float32" else build(path, dtype)
    ids = draw_ids(np.random.default_rng(12), 40)
    along = write_direction(tmp_path, follow_gradient(load_model(path), ids, 0.1))
    slope = float(differentiate_along(one, ids, along).sum())
    etas = [*ETAS, 2 * ETAS[1]]
    base, *found = score(
        one,
        whole(ids, double=True),
        *(whole(ids, double=True, override=at(along, eta)) for eta in etas),
    )
    *changes, double_change = (float((values - base).sum(dtype=np.float64)) for values in found)
    errors = [abs(change / (eta * slope) - 1) for change, eta in zip(changes, ETAS, strict=True)]
    double_error = abs(double_change / (etas[-1] * slope) - 1)
    # Log-probabilities are known to some units in their sum's last place; terms of second order.
    noise = 4 * abs(base.sum()) * {"float64": 2.2e-16, "float32": 1.2e-7}[dtype]
    second = errors[1] / ETAS[1]
    for eta, error in zip(ETAS, errors, strict=True):
        assert error < 2 * second * eta + noise / (eta * slope)
    if dtype == "float64":
        for larger, smaller in pairwise(errors[1:5]):
            assert smaller == pytest.approx(larger / 10, rel=0.2)
    else:  # a tenth of the second error would be as small as the noise
        assert errors[1] == pytest.approx(double_error / 2, rel=0.2)
    assert errors[2] < 1e-2


TINY = 1e-6
"""A relative change that bfloat16, whose last place is 2^-8, has no number for."""
IDS = draw_ids(np.random.default_rng(1), 30)


def load_widened(path: Path) -> Any:
    """What is in the file in bfloat16, computed in float32."""
    model = load_model(path, torch.bfloat16).float()
    model.set_attn_implementation("eager")  # the other kind leaves Gemma 2's caps out
    return model


def scale_with_gradient(model: Any, ids: np.ndarray) -> dict[str, Tensor]:
    """Each number's own size, signed as its gradient: eta is the relative change of all."""
    signs = {name: g.sign() for name, g in follow_gradient(model, ids).items()}
    return {name: p.abs() * signs[name] for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def coarse() -> Any:
    return build(dtype="bfloat16")


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Direction:
    tensors = scale_with_gradient(load_widened(DEMO_MODEL), IDS)
    return write_direction(tmp_path_factory.mktemp("scaled"), tensors)


@pytest.mark.parametrize("name", ["llama", *OTHERS])
def test_a_tiny_eta_moves_along_the_derivative(name: str, coarse: Any, tmp_path: Path) -> None:
    path = DEMO_MODEL if name == "llama" else save_model(OTHERS[name], tmp_path / "model")
    engine = coarse if name == "llama" else build(path, "bfloat16")
    model = load_widened(path)
    tensors = scale_with_gradient(model, IDS)
    along = write_direction(tmp_path, tensors)
    zero = at(along, 0.0, "float32")
    slope_R = run(engine, GradientJob(IDS[:-1], IDS[1:], along=along, override=zero))[0].directional
    base_R, moved_R, far_R = score(
        engine,
        *(whole(IDS, double=True, override=at(along, eta, "float32")) for eta in (0, TINY, 0.01)),
    )
    assert base_R == pytest.approx(read_logprobs(model, IDS), abs=PER_TOKEN)
    slope, change = slope_R.sum(), (moved_R - base_R).sum()
    assert change == pytest.approx(TINY * slope, rel=0.05)
    move(model, tensors, 0.01)
    assert far_R == pytest.approx(read_logprobs(model, IDS), abs=PER_TOKEN)
    failure = run(engine, whole(IDS, override=at(along, TINY)))[0]
    check_failure(
        failure, "invalid_request", 'rounding to bfloat16. Use a larger eta, or cast: "float32"'
    )


def test_every_kind_of_job_is_computed_in_float32_and_its_neighbours_are_not(
    coarse: Any, scaled: Direction
) -> None:
    override = at(scaled, TINY, "float32")
    vector = draw_vector(norm=4.0)
    plan = SteeringPlan((Site(2, "mlp_out", vector),))
    plain = score(coarse, whole(IDS))[0]
    jobs = [GenerateJob(IDS[:9], 12, seed=s, override=override, plan=plan) for s in range(3)]
    *sampled, beside = run(coarse, *jobs, whole(IDS))
    assert (beside.columns["logprob"] == plain).all()
    model = load_widened(DEMO_MODEL)
    move(model, scale_with_gradient(model, IDS), TINY)

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return output + torch.from_numpy(vector)

    model.model.layers[2].mlp.register_forward_hook(hook)
    for output in sampled:
        both = np.concatenate([IDS[:9], output.token_ids])
        again = score(coarse, whole(both, override=override, plan=plan))[0][8:]
        assert again == pytest.approx(output.logprobs, abs=PER_TOKEN)
        assert again == pytest.approx(read_logprobs(model, both)[8:], abs=PER_TOKEN)
    gradient = run(coarse, GradientJob(IDS[:-1], IDS[-4:], ((1, "resid_post"),), override=override))
    assert gradient[0].logprobs == pytest.approx(
        score(coarse, whole(IDS, override=override))[0][-4:], abs=PER_TOKEN
    )


def test_a_direction_of_one_parameter_has_the_whole_model_computed_in_float32(
    coarse: Any, tmp_path: Path
) -> None:
    one = write_direction(tmp_path, {"lm_head.weight": torch.ones(1436, 128)})
    found = score(coarse, whole(IDS, override=at(one, 0.0, "float32")))[0]
    assert found == pytest.approx(read_logprobs(load_widened(DEMO_MODEL), IDS), abs=PER_TOKEN)
    assert np.abs(found - score(coarse, whole(IDS, override=at(one, 0.0)))[0]).max() > 1e-3


@pytest.mark.parametrize("cast", ["float32", None])
def test_a_derivative_is_the_same_by_both_names_of_a_tied_parameter(
    coarse: Any, scaled: Direction, cast: Any, tmp_path: Path
) -> None:
    """Embedding and head are one tensor here; an override has it under the first name."""
    v = load_widened(DEMO_MODEL).model.embed_tokens.weight.detach()
    override = at(scaled, TINY if cast else 0.01, cast)
    first, second = (
        GradientJob(
            IDS[:-1], IDS[1:], along=write_direction(tmp_path, {name: v}), override=override
        )
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
    by_first, by_second = run(coarse, first, second)
    assert np.abs(by_first.directional).max() > 0.1
    assert by_second.directional == pytest.approx(by_first.directional, rel=1e-5, abs=1e-5)


def test_what_moves_nothing_is_refused_wherever_it_is_asked(
    engine: Any, coarse: Any, scaled: Direction, tmp_path: Path
) -> None:
    lost, wide = at(scaled, TINY), at(scaled, 1e-12, "float32")
    zero = write_direction(tmp_path, {"model.norm.weight": torch.zeros(128)})
    cases = [
        (coarse, whole(IDS, override=lost), "cast"),
        (coarse, GenerateJob(IDS, 4, override=lost), "cast"),
        (coarse, GradientJob(IDS, IDS[-1:], ((1, "resid_post"),), override=lost), "cast"),
        (coarse, whole(IDS, override=wide), "float32. Use a larger eta."),
        (engine, whole(IDS, override=at(scaled, 1e-12)), "float32. Use a larger eta."),
        (coarse, whole(IDS, override=at(zero, 1.0)), "every number of its direction is 0"),
    ]
    for where, job, reason in cases:
        failure, beside = run(where, job, whole(IDS))
        check_failure(failure, "invalid_request", reason)
        assert np.isfinite(beside.columns["logprob"]).all()
    plain, same = score(coarse, whole(IDS), whole(IDS, override=at(zero, 0.0)))
    assert (plain == same).all()


def test_a_model_that_cannot_be_computed_in_float32_is_refused(
    coarse: Any, scaled: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = whole(IDS, override=at(scaled, 0.1, "float32"))
    body = coarse._model._body
    handle = body.norm.register_forward_hook(lambda module, inputs, output: output.bfloat16())
    failure = run(coarse, job)[0]
    handle.remove()
    check_failure(failure, "unsupported_by_engine", "computes in torch.bfloat16 even where")
    monkeypatch.setattr(coarse._model, "quantization", "bitsandbytes")
    failure, plain = run(coarse, job, whole(IDS, override=at(scaled, 0.1)))
    check_failure(failure, "unsupported_by_engine", "quantised (bitsandbytes)")
    assert np.isfinite(plain.columns["logprob"]).all()


def store_adapter(directory: Path, factor: float, only: str = "") -> Adapter:
    """The adapter of a directory with its second factors scaled, as the server stores it."""
    tensors = load_file(directory / "adapter_model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if only in name}
    scaled = {n: t * (factor if ".lora_B." in n else 1) for n, t in tensors.items()}
    save_file(scaled, directory / "adapter_model.safetensors")
    config = (directory / "adapter_config.json").read_text()
    path = directory / "stored.safetensors"
    save_file(scaled, path, {"adapter_config": config})
    return Adapter(str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def test_an_adapter_acts_under_a_cast_and_is_not_lost(
    coarse: Any, scaled: Direction, tmp_path: Path
) -> None:
    small = store_adapter(write_adapter(tmp_path / "small"), 1e-3)
    model = load_widened(DEMO_MODEL)
    plain = read_logprobs(model, IDS)
    expected = read_logprobs(merge_adapter(model, tmp_path / "small"), IDS)
    zero = at(scaled, 0.0, "float32")
    found = score(coarse, whole(IDS, adapter=small, override=zero))[0]
    assert found == pytest.approx(expected, abs=2e-5)
    assert np.abs(expected - plain).max() > 1e-4
    vanishing = store_adapter(write_adapter(tmp_path / "vanishing"), 1e-13)
    failure = run(coarse, whole(IDS, adapter=vanishing))[0]
    check_failure(failure, "invalid_request", "adapter moves nothing")
    untrained = store_adapter(write_adapter(tmp_path / "untrained"), 0.0)
    same = score(coarse, whole(IDS, adapter=untrained))[0]
    assert (same == score(coarse, whole(IDS))[0]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_buffer_moves_too(dtype: str, tmp_path: Path) -> None:
    """The bias that chooses DeepSeek V3's experts is none of its parameters, but in its file."""
    FAMILIES["deepseek_v3"].make(tmp_path)
    engine, model = build(tmp_path, dtype), load_model(tmp_path, getattr(torch, dtype)).float()
    name = next(name for name, _ in model.named_buffers() if name.endswith("correction_bias"))
    shape = tuple(model.get_buffer(name).shape)
    ids = draw_ids(np.random.default_rng(2), 40, 600)
    torch.manual_seed(1)
    v = torch.randn(shape)
    assert run(engine, CheckOverrideJob(shapes={name: shape}))[0].moved == v.numel()
    plain = read_logprobs(model, ids)
    model.get_buffer(name).add_(v)
    expected = read_logprobs(model, ids)
    assert np.abs(expected - plain).max() > 1e-3
    override = at(write_direction(tmp_path, {name: v}), 1.0, "float32")
    found, beside = score(engine, whole(ids, override=override), whole(ids))
    assert found == pytest.approx(expected, abs=PER_TOKEN)
    assert np.abs(beside - found).max() > 1e-3
    unknown = next(name for name, _ in model.named_buffers() if name.endswith("inv_freq"))
    failure = run(engine, CheckOverrideJob(shapes={unknown: (4,)}))[0]
    check_failure(failure, "invalid_vector", f"has no parameter {unknown}")
