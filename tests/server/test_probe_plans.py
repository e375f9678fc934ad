"""What a request's probes and conditions come to, and what is shown of readings."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from logsteer.errors import APIError
from logsteer.schemas import ProbeRequest, Steering, SteeringCondition
from logsteer_server.contract.plan import MAX_CONDITIONS, Condition, Readings
from logsteer_server.interventions.probes import (
    resolve_condition,
    resolve_probes,
    show_readings,
)
from logsteer_server.interventions.steering import resolve_steering
from logsteer_server.stores.layer_vectors import LayerVectors, Readout
from logsteer_server.stores.vectors import StoredVectors
from tests.server.steering_cases import INFO, NoVectors

ONES = [1.0] * INFO.hidden_size


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


def resolve(readout: Readout | None = None, read: str = "projection", **bounds: Any) -> Condition:
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
    found = resolve(Readout("logistic", 0.5, 1.0), **fields)
    assert (found.above, found.below) == (above, below)
    turned = resolve(Readout("logistic", -0.5, -1.0), **fields)
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
    found = resolve(readout, read="activation", **bounds)
    assert (found.above, found.below) == (above, below)


def test_a_layer_is_read_along_one_array_however_often_it_is_named() -> None:
    asked = [ProbeRequest.model_validate({"name": "v", "layers": [0, 1, 2]})]
    found = resolve_probes(asked, OneStored(), INFO)
    assert len({id(one.probe.direction) for one in found}) == 1
    assert np.linalg.norm(found[0].probe.direction) == pytest.approx(1)


def test_more_probes_than_there_is_room_for_are_refused_before_they_are_made() -> None:
    asked = [ProbeRequest.model_validate({"name": "v", "layers": [0, 1, 2]})] * 2
    assert len(resolve_probes(asked, OneStored(), replace(INFO, max_probes=6))) == 6
    with pytest.raises(APIError, match="may have 5 probes") as caught:
        resolve_probes(asked, OneStored(), replace(INFO, max_probes=5))
    assert caught.value.code == "unsupported_by_engine"


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
