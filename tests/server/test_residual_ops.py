"""The arithmetic of steering, against the definitions written out for one token in float64."""

import math

import numpy as np
import pytest
import torch

from logsteer.schemas import Steering
from logsteer_server.contract.plan import ResidualOp
from logsteer_server.interventions.steering import resolve_steering
from logsteer_server.numerics.residual_ops import OpForm, change_stream, find_forms, pack_ops
from tests.server.steering_cases import INFO, NoVectors

WIDTH = INFO.hidden_size
RNG = np.random.default_rng(3)
X = RNG.normal(size=WIDTH)
V = RNG.normal(size=WIDTH).astype(np.float32)
U = V.astype(np.float64) / np.linalg.norm(V.astype(np.float64))
C = X @ U
NORM = np.linalg.norm(X)
NONE = ResidualOp(np.zeros(WIDTH, np.float32), per_component=1.0)
"""An operation that changes nothing."""


def across() -> np.ndarray:
    """The unit vector across U in the plane of X and U."""
    rest: np.ndarray = X - C * U
    return rest / np.linalg.norm(rest)


def at_angle(degrees: float) -> np.ndarray:
    return NORM * (math.cos(math.radians(degrees)) * U + math.sin(math.radians(degrees)) * across())


ANGLE = math.degrees(math.acos(C / NORM))

CASES = {
    "add": ({"op": "add", "scale": 2.0}, X + 2 * V),
    "add unit": ({"op": "add", "scale": 2.0, "unit": "unit"}, X + 2 * U),
    "add residual_norm": (
        {"op": "add", "scale": 0.5, "unit": "residual_norm"}, X + 0.5 * NORM * U,
    ),
    "ablate": ({"op": "ablate"}, X - C * U),
    "ablate a part": ({"op": "ablate", "scale": 0.25}, X - 0.25 * C * U),
    "project": ({"op": "project", "scale": 3.0}, X + (3 - C) * U),
    "project residual_norm": (
        {"op": "project", "scale": -0.2, "unit": "residual_norm"}, X + (-0.2 * NORM - C) * U,
    ),
    "clamp below": ({"op": "clamp", "params": {"min": C + 1}}, X + U),
    "clamp above": ({"op": "clamp", "params": {"max": C - 1}}, X - U),
    "clamp inside": ({"op": "clamp", "params": {"min": C - 1, "max": C + 1}}, X),
    "replace": ({"op": "replace", "scale": 2.0}, 2 * V),
    "replace unit": ({"op": "replace", "scale": 2.0, "unit": "unit"}, 2 * U),
    "replace residual_norm": (
        {"op": "replace", "scale": 1.0, "unit": "residual_norm"}, NORM * U,
    ),
    "rotate toward": ({"op": "rotate", "scale": 10.0}, at_angle(ANGLE - 10)),
    "rotate away": ({"op": "rotate", "scale": -10.0}, at_angle(ANGLE + 10)),
    "rotate no further": ({"op": "rotate", "scale": 180.0}, NORM * U),
    "rotate no further back": ({"op": "rotate", "scale": -180.0}, -NORM * U),
}  # fmt: skip


def steer(*vectors: dict[str, object]) -> np.ndarray:
    """X under a steering object, by the plan that it resolves to."""
    data = {"data": {"0": V.tolist()}}
    steering = Steering.model_validate({"vectors": [vector | data for vector in vectors]})
    (site,) = resolve_steering(steering, NoVectors(), INFO).plan.sites
    x_TD = torch.tensor(X, dtype=torch.float32)[None]
    if site.offset is not None:
        x_TD = x_TD + torch.tensor(site.offset)
    directions_KD, numbers_KP = pack_ops((*site.ops, NONE), WIDTH)
    return (x_TD + change_stream(x_TD, directions_KD[None], numbers_KP[None]))[0].numpy()


@pytest.mark.parametrize("name", CASES)
def test_each_operation(name: str) -> None:
    vector, wanted = CASES[name]
    np.testing.assert_allclose(steer(vector), wanted, atol=3e-6)


def test_additions_after_an_operation_stay_after_it() -> None:
    np.testing.assert_allclose(
        steer({"op": "add", "scale": 5.0}, {"op": "ablate"}, {"op": "add", "scale": 2.0}),
        X - C * U + 2 * V,
        atol=5e-6,
    )


def test_twice_v_is_once_2v() -> None:
    np.testing.assert_allclose(
        steer({"scale": 1.5}, {"scale": 1.5}), steer({"scale": 3.0}), atol=1e-6
    )


def test_a_stream_along_the_vector_is_not_turned() -> None:
    u_D = torch.tensor(U, dtype=torch.float32)
    op = ResidualOp(U.astype(np.float32), per_component=1.0, degrees=-30.0)
    directions_KD, numbers_KP = pack_ops([op], WIDTH)
    change_TD = change_stream(3 * u_D[None], directions_KD[None], numbers_KP[None])
    assert change_TD.abs().max() < 1e-5


def test_terms_without_effect_are_skipped_with_the_same_result() -> None:
    """Tokens differ in their operations, so most forms are of several."""
    draw, other = np.random.default_rng(5), np.roll(U, 1).astype(np.float32)
    plain = ResidualOp(U.astype(np.float32), base=2.0, per_component=1.0)
    ops = [
        (plain, ResidualOp(other, base=1.0, per_norm=0.5), plain),
        (plain, plain, ResidualOp(other, per_component=1.0, low=0.1, high=0.2)),
        (
            ResidualOp(other, keep=0.5, base=3.0),
            plain,
            ResidualOp(other, per_component=1.0, degrees=30.0),
        ),
    ]
    packed = [pack_ops((*each, NONE), WIDTH) for each in ops]
    directions, numbers = (torch.stack(parts) for parts in zip(*packed, strict=True))
    x_TD = torch.from_numpy(draw.normal(size=(3, WIDTH)).astype(np.float32))
    for some in (slice(0, 3), slice(0, 1), slice(1, 2), slice(2, 3)):
        given = x_TD[some], directions[some], numbers[some]
        forms = find_forms(numbers[some])
        exact = change_stream(*given)
        assert torch.allclose(exact, change_stream(*given, forms=forms), rtol=0, atol=1e-5)
        for open_TK in (torch.zeros(len(exact), 4) > 0, torch.zeros(len(exact), 4) == 0):
            changed = change_stream(*given, open_TK, forms)
            assert torch.allclose(open_TK.any() * exact, changed, rtol=0, atol=1e-5)
    assert find_forms(numbers) == (
        OpForm(uses_norm=False, clips=False, keeps=True, turns=False),
        OpForm(uses_norm=True, clips=False, keeps=False, turns=False),
        OpForm(uses_norm=False, clips=True, keeps=False, turns=True),
        OpForm(uses_norm=False, clips=False, keeps=False, turns=False),
    )
