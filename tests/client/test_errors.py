"""The exception tree and its table."""

import pickle
from typing import Any, get_args

import pytest

from logsteer import errors
from logsteer.errors import KINDS, APIError, api_error, problem_error
from logsteer.schemas.common import Problem, ProblemCode

# The contract's table, written again on purpose: a change must be made twice.
CONTRACT = {
    "invalid_request": (422, False, errors.InvalidRequestError),
    "context_too_long": (422, False, errors.InvalidRequestError),
    "boundary_empty": (422, False, errors.InvalidRequestError),
    "unsupported_by_engine": (422, False, errors.InvalidRequestError),
    "invalid_vector": (422, False, errors.InvalidRequestError),
    "invalid_adapter": (422, False, errors.InvalidRequestError),
    "invalid_sae": (422, False, errors.InvalidRequestError),
    "non_finite": (422, False, errors.InvalidRequestError),
    "unauthorized": (401, False, errors.AuthenticationError),
    "forbidden": (403, False, errors.PermissionDeniedError),
    "not_found": (404, False, errors.NotFoundError),
    "unknown_model": (404, False, errors.NotFoundError),
    "unknown_vector": (404, False, errors.NotFoundError),
    "unknown_override": (404, False, errors.NotFoundError),
    "unknown_adapter": (404, False, errors.NotFoundError),
    "unknown_sae": (404, False, errors.NotFoundError),
    "method_not_allowed": (405, False, errors.InvalidRequestError),
    "exists": (409, False, errors.ConflictError),
    "payload_too_large": (413, False, errors.PayloadTooLargeError),
    "overloaded": (429, True, errors.OverloadedError),
    "rate_limited": (429, True, errors.OverloadedError),
    "model_loading": (503, True, errors.UnavailableError),
    "engine_restarting": (503, True, errors.UnavailableError),
    "out_of_memory": (503, True, errors.UnavailableError),
    "deadline_exceeded": (504, False, errors.DeadlineError),
    "internal": (500, False, errors.InternalError),
}


def test_the_table_covers_every_code() -> None:
    assert set(KINDS) == set(get_args(ProblemCode)) == set(CONTRACT)


@pytest.mark.parametrize("code", CONTRACT)
def test_each_code_survives_the_way_to_the_wire_and_back(code: Any) -> None:
    status, retryable, error_class = CONTRACT[code]
    raised = error_class(code, "what was wrong", param="items", retry_after=3)
    document = raised.problem("abc")
    assert isinstance(document, Problem)
    assert (document.status, document.retryable) == (status, retryable)
    assert document.type == f"urn:logsteer:problem:{code}"
    assert document.title

    read = problem_error(document.model_dump(), retry_after=3)
    assert type(read) is error_class
    fields = ("code", "status", "detail", "param", "retryable", "retry_after")
    assert [getattr(read, f) for f in fields] == [getattr(raised, f) for f in fields]
    assert read.request_id == "abc"


def test_a_class_refuses_a_code_of_another_class() -> None:
    with pytest.raises(ValueError, match="OverloadedError does not stand for internal"):
        errors.OverloadedError("internal", "x")


@pytest.mark.parametrize(
    ("status", "error_class", "retryable"),
    [
        (403, errors.PermissionDeniedError, False),
        (418, APIError, False),
        (429, errors.OverloadedError, True),
        (500, errors.InternalError, False),
        (502, errors.UnavailableError, True),
        (504, errors.DeadlineError, False),
    ],
)
def test_an_unknown_code_gets_the_class_of_its_status(
    status: int, error_class: type[APIError], retryable: bool
) -> None:
    error = problem_error({"code": "of_the_future", "detail": "d"}, status=status)
    assert (type(error), error.code, error.status) == (error_class, "of_the_future", status)
    assert error.retryable is retryable


def test_the_document_decides_whether_to_try_again() -> None:
    assert problem_error({"code": "overloaded", "retryable": False}).retryable is False
    assert problem_error({"code": "internal", "retryable": True}).retryable is True


def test_fields_of_the_wrong_type_count_as_missing() -> None:
    error = problem_error(
        {"code": 5, "detail": ["x"], "retryable": "no", "status": "y"}, status=404
    )
    assert (error.code, error.status, error.retryable) == ("http_404", 404, False)
    assert error.detail == "The server answered with status 404."


def test_errors_survive_pickling() -> None:
    error = api_error("overloaded", "busy", retry_after=2.5, request_id="abc", param="p")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.OverloadedError
    assert (vars(copy), str(copy)) == (vars(error), str(error))


def test_the_text_has_code_detail_and_request() -> None:
    assert str(api_error("internal", "it broke", request_id="abc")) == (
        "internal: it broke (request abc)"
    )
    assert str(errors.LogsteerError("plain")) == "plain"


def test_a_timeout_is_caught_as_the_builtin_one() -> None:
    with pytest.raises(TimeoutError) as caught:
        raise errors.RequestTimeoutError("late", request_id="abc")
    assert isinstance(caught.value, errors.TransportError)
    assert caught.value.request_id == "abc"
