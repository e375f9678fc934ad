"""Steering objects as plans: vectors, positions, probes and conditions, and what is refused."""

import base64
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from logsteer.errors import APIError
from logsteer.schemas import ProbeRequest, Recommendation, Steering, SteeringCondition
from logsteer.schemas.steering import Steer, parse_layers
from logsteer_server.contract.jobs import GenerateJob, ScoreJob
from logsteer_server.contract.plan import (
    MAX_CONDITIONS,
    Condition,
    Positions,
    Readings,
    SteeringPlan,
)
from logsteer_server.interventions.interventions import Interventions, Stores
from logsteer_server.interventions.probes import (
    resolve_condition,
    resolve_probes,
    show_readings,
)
from logsteer_server.interventions.steering import ResolvedSteering, resolve_steering
from logsteer_server.stores.layer_vectors import LayerVectors, Readout
from logsteer_server.stores.vectors import StoredVectors
from logsteer_server.tasks.sweep import plan_settings
from tests.refusals import refused
from tests.server.plan_steps import finish
from tests.server.steering_cases import INFO, NoVectors

ONES = [1.0] * INFO.hidden_size
IDS = np.arange(10, dtype=np.int32)


def resolve(*vectors: dict[str, Any], positions: Any = "all") -> ResolvedSteering:
    given = [{"data": {"1": ONES}} | vector for vector in vectors]
    steering = Steering.model_validate({"vectors": given, "positions": positions})
    return resolve_steering(steering, NoVectors(), INFO)


def test_vectors_of_one_layer_are_one_offset() -> None:
    plan = resolve({"scale": 2.0}, {"scale": 0.5}, {"data": {"3": ONES}}).plan
    assert [(site.layer, site.ops) for site in plan.sites] == [(1, ()), (3, ())]
    np.testing.assert_array_equal(plan.sites[0].offset, np.full(24, 2.5, np.float32))


class OneTrained:
    """A store whose only vector has two layers, and what its training recommends, if anything."""

    def __init__(self, advice: Recommendation | None) -> None:
        vectors = LayerVectors({1: np.ones(24, np.float32), 3: np.ones(24, np.float32)})
        self._stored = StoredVectors("mood", vectors.sha256, vectors, advice)

    def find(self, name: str) -> StoredVectors:
        return self._stored

    find_content = find

    def find_feature(self, name: str, feature: int | str, *, reads: bool) -> StoredVectors:
        return self._stored


ADVICE = Recommendation(layer=3, scales=[0.5, 1.5], relative_norms=[0.2, 0.5], reason="")


@pytest.mark.parametrize(
    ("given", "advice", "scale", "layers"),
    [
        ("mood", ADVICE, 1.5, [3]),
        ("mood:4", ADVICE, 4.0, [3]),
        ("mood@1", ADVICE, 1.5, [1]),
        ("mood:-2.5@1,3", ADVICE, -2.5, [1, 3]),
        ("mood", None, 1.0, [1, 3]),
        (["mood"], ADVICE, 1.5, [3]),
        (Steer("mood"), ADVICE, 1.5, [3]),
        (Steer("mood", op="ablate"), ADVICE, 1.0, [3]),
        (Steer("mood", unit="residual_norm"), ADVICE, 1.0, [3]),
        ({"vectors": ["mood"], "positions": "prompt"}, ADVICE, 1.5, [3]),
        ({"vectors": [{"name": "mood"}]}, ADVICE, 1.0, [1, 3]),
    ],
)
def test_what_is_left_out_is_what_training_recommends(
    given: Any, advice: Recommendation | None, scale: float, layers: list[int]
) -> None:
    found = resolve_steering(Steering.model_validate(given), OneTrained(advice), INFO)
    assert [used.scale for used in found.vectors] == [scale]
    assert [site.layer for site in found.plan.sites] == layers


def test_a_sweep_counts_a_scale_left_out_as_1() -> None:
    stores = Stores(OneTrained(ADVICE), None, None, None)  # type: ignore[arg-type]
    steering = Steering.model_validate("mood")
    _, swept = plan_settings(steering, [-3.0], None, Interventions(), stores, INFO)
    assert [used.scale for used in swept.interventions.steering.vectors] == [-3.0]


def test_base64_is_the_same_as_numbers() -> None:
    packed = base64.b64encode(np.array(ONES, "<f4").tobytes()).decode()
    text, numbers = resolve({"data": {"1": packed}}), resolve({})
    assert text.plan.digest(5) == numbers.plan.digest(5)
    assert text.vectors == numbers.vectors


def test_a_vector_of_one_layer_may_go_to_any() -> None:
    plan = resolve({"layers": [0, 2]}).plan
    assert [site.layer for site in plan.sites] == [0, 2]


def test_resid_pre_is_the_stream_that_leaves_the_block_before() -> None:
    (site,) = resolve({"hook": "resid_pre"}).plan.sites
    assert (site.layer, site.hook) == (0, "resid_post")


@pytest.mark.parametrize(
    ("vector", "code", "says"),
    [
        ({"data": {"4": ONES}}, "invalid_vector", "used at layer 4, the model's are 0 to 3"),
        ({"data": {"1": ONES[:5]}}, "invalid_vector", "5 numbers a layer"),
        ({"data": {"1": "!"}}, "invalid_vector", "base64"),
        ({"data": {"1": ONES, "2": ONES}, "layers": [3]}, "invalid_vector", r"not \[3\]"),
        ({"data": {"1": [0.0] * 24, "2": ONES}, "op": "ablate"}, "invalid_vector", "no direction"),
        ({"scale": 1e38}, "invalid_vector", "beyond what a model in float32"),
        ({"hook": "attn_out"}, "unsupported_by_engine", "steers resid_post, not attn_out"),
        ({"data": None, "name": "happy"}, "unknown_vector", "happy"),
    ],
)
def test_what_cannot_be_done_is_said(vector: dict[str, Any], code: str, says: str) -> None:
    with refused(code, says):
        resolve(vector)


@pytest.mark.parametrize(
    "vector",
    [
        {"name": "happy"},
        {"op": "clamp"},
        {"op": "clamp", "params": {"min": 2.0, "max": 1.0}},
        {"op": "add", "params": {"min": 2.0}},
        {"op": "rotate", "scale": 181.0},
        {"op": "ablate", "unit": "unit"},
        {"scale": float("nan")},
        {"layers": [1, 1]},
    ],
)
def test_objects_that_contradict_themselves_are_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        resolve(vector)


def test_which_tokens_each_kind_of_positions_means() -> None:
    found = {
        kind: np.nonzero(Positions(kind).mask(0, 8, 5))[0].tolist()
        for kind in ("all", "prompt", "completion", "predicting", "last_prompt")
    }
    assert found == {
        "all": list(range(8)),
        "prompt": [0, 1, 2, 3, 4],
        "completion": [5, 6, 7],
        "predicting": [4, 5, 6, 7],
        "last_prompt": [4],
    }
    slices = Positions("slices", ((1, 2), (4, 6)))
    assert np.nonzero(slices.mask(0, 8, 5))[0].tolist() == [1, 4, 5]
    assert np.nonzero(slices.mask(4, 8, 5))[0].tolist() == [0, 1]


def digest(plan: SteeringPlan, kind: str, prompt_len: int) -> bytes:
    return SteeringPlan(plan.sites, Positions(kind)).digest(prompt_len)


def test_the_digest_knows_all_that_makes_a_difference() -> None:
    plans = [
        resolve({}).plan,
        resolve({"scale": 2.0}).plan,
        resolve({"layers": [2]}).plan,
        resolve({"op": "ablate"}).plan,
        resolve({"op": "rotate", "scale": 3.0}).plan,
        resolve({}, positions={"slices": [(0, 3)]}).plan,
        resolve({}, positions="prompt").plan,
    ]
    assert len({plan.digest(5) for plan in plans}) == len(plans)
    assert digest(plans[0], "prompt", 5) != digest(plans[0], "prompt", 6)
    assert digest(plans[0], "all", 5) == digest(plans[0], "all", 6)


def test_a_plan_that_reaches_no_token_is_an_error() -> None:
    steering = resolve({}, positions="completion")
    changes = Interventions(steering)
    one_token = ScoreJob(IDS, IDS[-1:])
    with pytest.raises(APIError, match="reaches no token"):
        finish(changes.apply([one_token]))
    with pytest.raises(APIError, match="reaches no token"):
        finish(changes.apply([GenerateJob(IDS, 1)]))
    with pytest.raises(APIError, match="the model reads none"):
        finish(changes.apply([]))  # an echo without log-probabilities
    longer = ScoreJob(IDS, IDS[-2:])
    assert [job.plan for job in finish(changes.apply([one_token, longer]))] == [steering.plan] * 2


def test_positions_after_a_text_are_looked_for_a_job_a_step() -> None:
    """A search decodes the prompt many times: so nobody waits for those of a whole request."""
    steering = Steering(vectors=[{"data": {"1": ONES}}], positions={"after": "a"})  # type: ignore[list-item, arg-type]
    resolved = resolve_steering(steering, NoVectors(), INFO, lambda ids: "ab"[: len(ids)])
    jobs = [ScoreJob(IDS, IDS[-1:])] * 5
    assert len(list(Interventions(resolved).apply(jobs))) >= 5


@pytest.mark.parametrize("text", ["0-999999", "0-9999,0-9999", "1,2,2-1"])
def test_a_text_names_no_more_layers_than_models_have(text: str) -> None:
    """Ten kilobytes of `0-999999,` made a list of a billion layers."""
    with pytest.raises(ValueError, match="not a list of layers"):
        parse_layers(text)


@dataclass(frozen=True)
class OneStored:
    """A source with one vector, whatever it is called: threes at layer 1."""

    readout: Readout | None = None

    def find(self, name: str) -> StoredVectors:
        numbers = np.full(INFO.hidden_size, 3, dtype=np.float32)
        readouts = {} if self.readout is None else {1: self.readout}
        vectors = LayerVectors({1: numbers}, readouts=readouts)
        return StoredVectors(name, vectors.sha256, vectors)

    find_content = find


def resolve_when(
    readout: Readout | None = None, read: str = "projection", **bounds: Any
) -> Condition:
    given = {"probe": {"name": "v", "read": read}} | bounds
    condition = SteeringCondition.model_validate(given)
    return resolve_condition(condition, 0, OneStored(readout), INFO)[1]


@pytest.mark.parametrize(
    ("fields", "above", "below"),
    [
        ({"read": "probability", "above": 0.5}, -2.0, np.inf),
        ({"read": "probability", "above": 0.5, "below": 1.0}, -2.0, np.inf),
        ({"read": "probability", "above": 0.0, "below": 0.5}, -np.inf, -2.0),
    ],
)
def test_thresholds_of_a_probability(fields: dict[str, Any], above: float, below: float) -> None:
    found = resolve_when(Readout("logistic", 0.5, 1.0), **fields)
    assert (found.above, found.below) == (above, below)
    turned = resolve_when(Readout("logistic", -0.5, -1.0), **fields)
    assert (turned.above, turned.below) == ((-np.inf, -2.0) if above == -2.0 else (-2.0, np.inf))


@pytest.mark.parametrize(
    ("bounds", "above", "below"),
    [
        ({"above": 0.0}, 0.5, np.inf),
        ({"above": 3.0}, 1.25, np.inf),
        ({"below": 3.0}, -np.inf, 1.25),
        ({"below": 0.5}, -np.inf, 0.5),
        ({"above": 2.0, "below": 3.0}, 0.75, 1.25),
    ],
)
def test_thresholds_of_an_activation(bounds: dict[str, float], above: float, below: float) -> None:
    """z = 2 c + 0.5 where that is above 1.5, else 0: above 1.5 is c above 0.5."""
    readout = Readout("relu", 2.0, 0.5, 1.5)
    found = resolve_when(readout, read="activation", **bounds)
    assert (found.above, found.below) == (above, below)


def test_a_layer_is_read_along_one_array_however_often_it_is_named() -> None:
    asked = [ProbeRequest.model_validate({"name": "v", "layers": [0, 1, 2]})]
    found = resolve_probes(asked, OneStored(), INFO)
    assert len({id(one.probe.direction) for one in found}) == 1
    assert np.linalg.norm(found[0].probe.direction) == pytest.approx(1)


def test_more_probes_than_there_is_room_for_are_refused_before_they_are_made() -> None:
    asked = [ProbeRequest.model_validate({"name": "v", "layers": [0, 1, 2]})] * 2
    assert len(resolve_probes(asked, OneStored(), replace(INFO, max_probes=6))) == 6
    with refused("unsupported_by_engine", "may have 5 probes"):
        resolve_probes(asked, OneStored(), replace(INFO, max_probes=5))


def test_as_many_conditions_as_engines_keep_and_no_more() -> None:
    when = {"probe": {"data": {"1": ONES}}, "above": 0.0}
    vector = {"data": {"1": ONES}, "when": when}
    most = Steering.model_validate({"vectors": [vector] * MAX_CONDITIONS})
    plan = resolve_steering(most, NoVectors(), INFO).plan
    assert len(plan.conditions) == MAX_CONDITIONS
    more = Steering.model_validate({"vectors": [vector] * (MAX_CONDITIONS + 1)})
    with pytest.raises(APIError, match="at most 31 conditions"):
        resolve_steering(more, NoVectors(), INFO)


def test_readings_that_are_no_numbers_are_flagged() -> None:
    asked = [ProbeRequest.model_validate({"name": "v", "read": "cosine"})]
    probes = resolve_probes(asked, OneStored(), INFO)
    values = np.array([[[1.0, 2.0, 1.0, 2.0]], [[0.0, 0.0, 0.0, 0.0]]], dtype=np.float32)
    (fine,) = show_readings(probes, Readings(4, values[:1]), 4, False)["probes"]
    (lost,) = show_readings(probes, Readings(4, values), 4, False)["probes"]
    assert (fine["flags"], lost["flags"]) == ([], ["non_finite"])
