"""No number of a request is beyond what arithmetic behind it can hold."""

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from logsteer.errors import APIError
from logsteer.schemas import Steering, common, openai, vectors
from logsteer.schemas.steering import FLOAT32_MAX, ClampBounds
from logsteer_server.contract.jobs import Output
from logsteer_server.contract.plan import SteeringTrace
from logsteer_server.interventions.interventions import Receipt
from logsteer_server.interventions.steering import resolve_steering
from tests.server.steering_cases import INFO, NoVectors

LARGEST = 2**63 - 1


def list_requests(owner: type[BaseModel] = common.Request) -> Iterator[type[BaseModel]]:
    for model in owner.__subclasses__():
        yield model
        yield from list_requests(model)


REQUESTS = [*dict.fromkeys(list_requests()), vectors.ModelQuery, vectors.UploadQuery,
            vectors.ContentQuery, openai.CompletionRequest]  # fmt: skip


def find_numbers(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of a number in a JSON schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield path, schema
        for key, part in schema.items():
            yield from find_numbers(part, f"{path}/{key}")
    elif isinstance(schema, list):
        for index, part in enumerate(schema):
            yield from find_numbers(part, f"{path}/{index}")


@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_every_number_of_a_request_is_bounded(model: type[BaseModel]) -> None:
    for path, schema in find_numbers(model.model_json_schema()):
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        assert low is not None and high is not None, f"{path} has no bounds: {schema}"
        limit = LARGEST + 1 if schema["type"] == "integer" else FLOAT32_MAX
        assert -limit <= low <= high <= limit, f"{path}: {schema}"


@pytest.mark.parametrize("bound", [1e308, -1e39, float("inf"), float("nan")])
def test_a_bound_beyond_float32_is_refused(bound: float) -> None:
    with pytest.raises(ValidationError):
        ClampBounds(min=bound)


def refuse(dtype: str = "float32", **vector: Any) -> str:
    """The detail with which a vector is refused."""
    steering = Steering.model_validate({"vectors": [vector]})
    with pytest.raises(APIError) as caught:
        resolve_steering(steering, NoVectors(), replace(INFO, dtype=dtype))
    assert caught.value.code == "invalid_vector"
    return caught.value.detail


@pytest.mark.parametrize(
    ("dtype", "number", "scale"),
    [
        ("float32", 1e30, 1e30),
        ("float32", 1e38, 100.0),
        ("float32", 1e19, 1.0),  # of 24 numbers, whose squares come to more than float32 holds
        ("bfloat16", 3e38, 1.0),
        ("float16", 65000.0, 2.0),
        ("float16", 1e6, 1.0),
    ],
)
def test_a_vector_beyond_the_models_dtype_is_refused(
    dtype: str, number: float, scale: float
) -> None:
    data = {"1": [number] * INFO.hidden_size}
    assert dtype in refuse(dtype, data=data, scale=scale)
    assert dtype in refuse(dtype, data=data, scale=-scale)


@pytest.mark.parametrize(
    "use",
    [
        {"op": "project", "scale": 1e20},
        {"op": "project", "scale": -1e20, "unit": "residual_norm"},
        {"op": "replace", "scale": 1e19},
        {"scale": 3e38, "unit": "residual_norm"},
        {"op": "ablate", "scale": 3e38},
        {"op": "clamp", "params": {"min": 1e38}},
        {"op": "clamp", "params": {"max": -1e38}},
    ],
    ids=str,
)
def test_what_float32_cannot_square_is_refused(use: dict[str, Any]) -> None:
    assert "float32" in refuse(data={"1": [1.0] * INFO.hidden_size}, **use)


def test_wide_bounds_are_none() -> None:
    use = {"op": "clamp", "params": {"min": -3e38, "max": 3e38}}
    steering = Steering.model_validate({"vectors": [{"data": {"1": [1.0] * 24}, **use}]})
    (site,) = resolve_steering(steering, NoVectors(), INFO).plan.sites
    assert (site.ops[0].low, site.ops[0].high) == (-3e38, 3e38)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_base64_of_what_is_not_finite_is_refused(bad: float) -> None:
    numbers = np.ones(INFO.hidden_size, "<f4")
    numbers[3] = bad
    refuse(data={"1": base64.b64encode(numbers.tobytes()).decode()})


@pytest.mark.parametrize(("dtype", "number"), [("float32", 1e-45), ("float16", 1e-9)])
def test_what_the_dtype_rounds_to_nothing_is_refused(dtype: str, number: float) -> None:
    assert "changes nothing" in refuse(dtype, data={"1": [number] * INFO.hidden_size})


@pytest.mark.parametrize(("kind", "fails"), [("completion", False), ("all", True)])
def test_a_continuation_that_ends_at_once_may_have_no_steered_token(kind: str, fails: bool) -> None:
    data = {"1": [1.0] * INFO.hidden_size}
    steering = Steering.model_validate({"vectors": [{"data": data}], "positions": kind})
    receipt = Receipt(resolve_steering(steering, NoVectors(), INFO))
    receipt.add(Output(trace=SteeringTrace((0,), {"1": (0, 0.0)})))
    if fails:
        with pytest.raises(APIError, match="did not apply"):
            receipt.write()
    else:
        assert receipt.write()["tokens_steered"] == 0
