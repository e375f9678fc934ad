"""Steering on the TransformerLens engine: the same as a plain hook, and in nobody else's answer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logsteer_server.contract.jobs import GenerateJob, JobFailure
from logsteer_server.contract.plan import Positions, ResidualOp, Site, SteeringPlan
from tests.conftest import DEMO_MODEL
from tests.contract.directions import load_model, read_logprobs
from tests.contract.tlens_cases import (
    BATCH,
    LAYER,
    PER_TOKEN,
    U,
    add_plan,
    build,
    draw_ids,
    draw_vector,
    run,
    score,
    whole,
)

pytestmark = pytest.mark.engine


def test_the_example_of_padded_prompts() -> None:
    """Of the module `steering`: where the steered tokens are, in the first pass and the next."""
    from logsteer_server.engines.tlens.probes import TokenRange
    from logsteer_server.engines.tlens.steering import BatchSteering, SteeredRow

    plan = add_plan("last_prompt")
    steering = BatchSteering([SteeredRow(plan, ((),), None, length) for length in (2, 4)])
    tokens = steering._find_tokens([TokenRange(2, 0, 2), TokenRange(0, 0, 4)], 4)
    assert (tokens.place_N.tolist(), tokens.part_N.tolist()) == ([3, 7], [0, 1])
    tokens = steering._find_tokens([TokenRange(0, 2, 3), TokenRange(0, 4, 5)], 1)
    assert not len(tokens.place_N)


UNIT = torch.from_numpy(U)


def turn(x: Tensor, degrees: float) -> Tensor:
    """x turned toward U in their plane, its norm kept."""
    norm = x.norm(dim=-1, keepdim=True)
    across = x - (x @ UNIT)[..., None] * UNIT
    side = across / across.norm(dim=-1, keepdim=True)
    angle = torch.arccos((x @ UNIT)[..., None] / norm) - np.deg2rad(degrees)
    angle = angle.clamp(min=0.0)
    return norm * (angle.cos() * UNIT + angle.sin() * side)


def along(x: Tensor) -> Tensor:
    return (x @ UNIT)[..., None]


OPS: dict[str, tuple[np.ndarray | None, tuple[ResidualOp, ...], Callable[[Tensor], Tensor]]] = {
    "add": (4 * U, (), lambda x: x + 4 * UNIT),
    "ablate": (None, (ResidualOp(U),), lambda x: x - along(x) * UNIT),
    "project": (None, (ResidualOp(U, base=3.0),), lambda x: x + (3 - along(x)) * UNIT),
    "clamp": (
        None,
        (ResidualOp(U, per_component=1.0, low=-0.5, high=0.25),),
        lambda x: x + (along(x).clamp(-0.5, 0.25) - along(x)) * UNIT,
    ),
    "replace": (
        None, (ResidualOp(U, base=6.0, keep=0.0),), lambda x: (6 * UNIT).expand_as(x),
    ),
    "rotate": (None, (ResidualOp(U, degrees=25.0),), lambda x: turn(x, 25.0)),
    "residual norm": (
        None,
        (ResidualOp(U, per_norm=0.4, per_component=1.0),),
        lambda x: x + 0.4 * x.norm(dim=-1, keepdim=True) * UNIT,
    ),
    "add, then ablate": (
        draw_vector(seed=9), (ResidualOp(U),),
        lambda x: (y := x + torch.from_numpy(draw_vector(seed=9))) - along(y) * UNIT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_every_operation_is_a_plain_hook_in_transformers(
    engine: Any, reference: Any, name: str
) -> None:
    offset, ops, change = OPS[name]
    ids = draw_ids(np.random.default_rng(6), 50)
    changes: list[Tensor] = []

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        changed = change(x)
        # The engine does not read the last token, which nothing follows.
        changes.append(((changed - x).norm(dim=-1) / x.norm(dim=-1))[0, :-1])
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    handle = reference.model.layers[LAYER].register_forward_hook(hook)
    expected = read_logprobs(reference, ids)
    handle.remove()
    job = whole(ids, plan=SteeringPlan((Site(LAYER, "resid_post", offset, ops),)))
    output = run(engine, job)[0]
    assert output.columns["logprob"] == pytest.approx(expected, abs=PER_TOKEN)
    assert np.abs(expected - read_logprobs(reference, ids)).max() > 0.01
    assert output.trace.tokens == (49,)
    moved = changes[0][changes[0] > 0]
    assert output.trace.sites["2"] == (len(moved), pytest.approx(float(moved.mean()), rel=1e-4))
    assert (len(moved) == 49) == (name != "clamp")


def test_bfloat16_offsets_are_added_as_a_plain_hook_adds_them() -> None:
    engine = build(dtype="bfloat16")
    assert (engine.info.dtype, engine.info.logits_dtype) == ("bfloat16", "bfloat16")
    model = load_model(DEMO_MODEL, torch.bfloat16)
    ids = draw_ids(np.random.default_rng(9), 20)
    vector = torch.from_numpy(draw_vector()).bfloat16()
    model.model.layers[LAYER].register_forward_hook(lambda block, args, x: x + vector)
    ids_1T = torch.from_numpy(ids[:-1].astype(np.int64))[None]
    with torch.inference_mode():
        log_p_TV = model(ids_1T).logits[0].float().log_softmax(-1)
    expected = log_p_TV.gather(-1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    values = score(engine, whole(ids, plan=add_plan()))[0]
    assert values == pytest.approx(expected.numpy(), abs=BATCH)


def test_steering_that_overflows_fails_alone(engine: Any, prompt: np.ndarray) -> None:
    huge = np.full(128, 3e38, np.float32)
    sites = tuple(Site(layer, "resid_post", huge) for layer in (1, 2))
    broken = GenerateJob(prompt, 20, seed=1, plan=SteeringPlan(sites, Positions("completion")))
    fine = GenerateJob(prompt, 20, seed=2)
    failure, output = run(engine, broken, fine)
    assert isinstance(failure, JobFailure)
    assert failure.code == "non_finite"
    assert "smaller scale" in failure.detail
    assert output.token_ids.tolist() == run(engine, fine)[0].token_ids.tolist()
