"""Overrides of a model in bfloat16 that is computed in float32 for a job, on TransformerLens."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from logsteer_server.contract.jobs import CheckOverrideJob, GenerateJob, GradientJob, JobFailure
from logsteer_server.contract.plan import Adapter, Direction, Site, SteeringPlan
from tests.conftest import DEMO_MODEL
from tests.contract.directions import (
    at,
    follow_gradient,
    load_model,
    move,
    read_logprobs,
    save_model,
    write_direction,
)
from tests.contract.lora import merge_adapter, write_adapter
from tests.contract.tlens_cases import (
    OTHERS,
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
def direction(tmp_path_factory: pytest.TempPathFactory) -> Direction:
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
    print(f"\n{name}: derivative {slope:.4e}, change {change:.4e} at eta {TINY}")
    assert change == pytest.approx(TINY * slope, rel=0.05)
    move(model, tensors, 0.01)
    assert far_R == pytest.approx(read_logprobs(model, IDS), abs=PER_TOKEN)
    failure = run(engine, whole(IDS, override=at(along, TINY)))[0]
    check_failure(
        failure, "invalid_request", 'rounding to bfloat16. Use a larger eta, or cast: "float32"'
    )


def test_every_kind_of_job_is_computed_in_float32_and_its_neighbours_are_not(
    coarse: Any, direction: Direction
) -> None:
    override = at(direction, TINY, "float32")
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
def test_a_derivative_by_the_second_name_of_a_tied_parameter(
    coarse: Any, direction: Direction, cast: Any, tmp_path: Path
) -> None:
    """Embedding and head are one tensor here; an override has it under the first name."""
    model = load_widened(DEMO_MODEL)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tensors = scale_with_gradient(model, IDS)
    v = tensors["model.embed_tokens.weight"]
    along = write_direction(tmp_path, {"lm_head.weight": v})
    eta = TINY if cast else 0.01
    job = GradientJob(IDS[:-1], IDS[1:], along=along, override=at(direction, eta, cast))
    found = run(coarse, job)[0]
    assert not isinstance(found, JobFailure), found
    if cast is None:
        first = write_direction(tmp_path, {"model.embed_tokens.weight": v})
        same = run(coarse, GradientJob(IDS[:-1], IDS[1:], along=first, override=job.override))[0]
        assert (found.directional == same.directional).all()
        return
    move(model, tensors, eta)
    assert found.logprobs == pytest.approx(read_logprobs(model, IDS), abs=PER_TOKEN)
    model.double()
    step, plain = 3e-4, model.lm_head.weight.detach().clone()
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            model.lm_head.weight.copy_(plain + sign * step * v.double())
        sides.append(read_logprobs(model, IDS))
    slope_R = (sides[0] - sides[1]) / (2 * step)
    off = np.abs(found.directional - slope_R).max() / np.abs(slope_R).max()
    print(f"\nderivative off by {off:.1e}")
    assert off < 1e-3


def test_what_moves_nothing_is_refused_wherever_it_is_asked(
    engine: Any, coarse: Any, direction: Direction, tmp_path: Path
) -> None:
    lost, wide = at(direction, TINY), at(direction, 1e-12, "float32")
    zero = write_direction(tmp_path, {"model.norm.weight": torch.zeros(128)})
    cases = [
        (coarse, whole(IDS, override=lost), "cast"),
        (coarse, GenerateJob(IDS, 4, override=lost), "cast"),
        (coarse, GradientJob(IDS, IDS[-1:], ((1, "resid_post"),), override=lost), "cast"),
        (coarse, whole(IDS, override=wide), "float32. Use a larger eta."),
        (engine, whole(IDS, override=at(direction, 1e-12)), "float32. Use a larger eta."),
        (coarse, whole(IDS, override=at(zero, 1.0)), "every number of its direction is 0"),
    ]
    for where, job, reason in cases:
        failure, beside = run(where, job, whole(IDS))
        check_failure(failure, "invalid_request", reason)
        assert np.isfinite(beside.columns["logprob"]).all()
    plain, same = score(coarse, whole(IDS), whole(IDS, override=at(zero, 0.0)))
    assert (plain == same).all()


def test_a_model_that_cannot_be_computed_in_float32_is_refused(
    coarse: Any, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = whole(IDS, override=at(direction, 0.1, "float32"))
    body = coarse._model._plain_forward.body
    handle = body.norm.register_forward_hook(lambda module, inputs, output: output.bfloat16())
    failure = run(coarse, job)[0]
    handle.remove()
    check_failure(failure, "unsupported_by_engine", "computes in torch.bfloat16 even where")
    monkeypatch.setattr(coarse._model, "quantization", "bitsandbytes")
    failure, plain = run(coarse, job, whole(IDS, override=at(direction, 0.1)))
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
    coarse: Any, direction: Direction, tmp_path: Path
) -> None:
    small = store_adapter(write_adapter(tmp_path / "small"), 1e-3)
    model = load_widened(DEMO_MODEL)
    plain = read_logprobs(model, IDS)
    expected = read_logprobs(merge_adapter(model, tmp_path / "small"), IDS)
    zero = at(direction, 0.0, "float32")
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
