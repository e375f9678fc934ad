"""Exceptions of every problem code, and what is wrong with a message, in sentences."""

import pickle
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from logsteer import errors, schemas
from logsteer._endpoints import ENDPOINTS
from logsteer.errors import KINDS, APIError, api_error, problem_error
from logsteer.schemas.common import Problem, ProblemCode, Request
from logsteer.schemas.faults import PATTERNS, describe_faults

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
    "in_use": (409, False, errors.ConflictError),
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


BAD: list[Any] = [
    None, True, "", "x", " ^ ", "a" * 200, -1, 0, 2**40, 1e300, 1.5, float("nan"), float("inf"),
    [], [None], [[]], [-1], ["x"], [0] * 100, {}, {"x": 1}, {"a b": {}}, [{}], [{"zzz": 1}],
    [{"name": "a"}] * 100, [0.5] * 2000,
]  # fmt: skip
LIBRARY = re.compile(
    r"Input should|should match|Extra inputs|Field required|Value error|valid (string|integer|list|"
    r"number|boolean|dictionary)|unable to parse|\[type=|should have|\[A-Z|\^|\(\?|function-|"
    r"constrained|does not fit|characters that are not allowed"
)
"""What nobody is to be shown: pydantic's words, expressions, and what is said for want of words."""


def find_messages(kind: type[BaseModel] = Request) -> Iterator[type[BaseModel]]:
    for own in kind.__subclasses__():
        yield own
        yield from find_messages(own)


def find_faults(kind: type[BaseModel], message: Any, *, as_json: bool = False) -> list[Any]:
    try:
        kind.model_validate_json(message) if as_json else kind.model_validate(message)
    except ValidationError as invalid:
        return invalid.errors(include_url=False)
    return []


def test_no_constraint_speaks_for_itself() -> None:
    kinds, patterns = set(), set()
    for message in set(find_messages()):
        for field in (*message.model_fields, "zzz"):
            for value in BAD:
                found = find_faults(message, {field: value})
                kinds |= {fault["type"] for fault in found}
                patterns |= {fault["ctx"]["pattern"] for fault in found
                             if fault["type"] == "string_pattern_mismatch"}  # fmt: skip
                for fault in describe_faults(found, message):
                    own = fault.text.replace("' ^ '", "")
                    assert not LIBRARY.search(own), (message.__name__, field, value, fault.text)
    assert kinds >= {
        "bool_type", "dict_type", "extra_forbidden", "finite_number", "float_type", "greater_than",
        "greater_than_equal", "int_type", "less_than_equal", "list_type", "literal_error",
        "missing", "model_type", "string_pattern_mismatch", "string_too_long", "string_too_short",
        "string_type", "too_long", "too_short", "value_error",
    }  # fmt: skip
    assert patterns <= PATTERNS.keys()


NAMED = [
    ("generate", {"prompts": ["a"], "do_sample": False}, "do_sample", "`temperature`, 0 for"),
    ("generate", {"prompts": ["a"], "num_return_sequences": 2}, "num_return_sequences", "`n`"),
    ("generate", {"prompts": ["a"], "max_new_tokens": 2}, "max_new_tokens", "`max_tokens`"),
    ("steer", {"prompts": ["a"], "alpha": 2}, "alpha", "`steering.vectors[].scale`"),
    ("steer", {"prompts": ["a"], "steering": {"vectors": [{"name": "m", "strength": 2}]}},
     "steering.vectors[0].strength", "send `scale`."),
    ("logprob", {"context": "a", "targets": ["b"], "items": []}, "items", "must not be empty"),
    ("logprob", {"itmes": []}, "items", "items is missing"),
    ("logprob", {"items": [{"targets": "b"}]}, "items[0].targets", "must be a list"),
    ("logprob", {"items": [{"context": "a", "targets": ["b"], "choices": []}]},
     "items[0].choices", "send `targets`."),
    ("logprob", {"items": [{"prompt": "a", "targets": ["b"]}]}, "items[0].prompt", "`context`"),
    ("logprob", {"context": "a", "targets": ["b"]}, "context", "send `items[].context`"),
    ("logprob", {"items": [{"context": "a", "targets": ["b"]}], "columns": ["entropi"]},
     "columns[0]", "must be 'logprob', 'rank', "),
    ("activations", {"items": ["a", 3], "layers": [0]}, "items[1]", "must be a text or an object"),
    ("activations", {"items": ["a"], "layers": [0], "hook": "blocks.0.hook_resid_post"}, "hook",
     "resid_post, at layers: [0]"),
    ("activations", {"items": [{"token_ids": ["x"]}], "layers": [0]}, "items[0].token_ids[0]",
     "must be a whole number"),
    ("steer", {"prompts": ["a"], "steering": {"vectors": [{"name": "no/name!"}]}},
     "steering.vectors[0].name", "must begin with a letter"),
    ("vectors.train", {"name": "m", "pairs": [["a", "b"], ["c", "c"]]}, "pairs[1]", "are the same"),
    ("steer", {"prompts": ["a"], "steering": {"vectors": [{"data": {"blocks.0.hook_out": [1.0]}}]}},
     "steering.vectors[0].data.blocks.0.hook_out", "number of a layer, such as 0; `hook` names"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "message", "param", "words"), NAMED)
def test_what_is_wrong_is_named(name: str, message: Any, param: str, words: str) -> None:
    kind = ENDPOINTS[name].request
    assert kind is not None
    faults = list(describe_faults(find_faults(kind, message), kind))
    assert [fault.text for fault in faults if fault.param == param and words in fault.text], faults


def test_bodies_and_queries_are_read_as_text() -> None:
    """Values of a query come as text, and a body may be no JSON at all."""
    query = schemas.PerplexityStreamQuery
    found = find_faults(query, {"stride": "x", "cache": "perhaps", "steering": "{"})
    assert [fault.text.rstrip(".") for fault in describe_faults(found, query)][:2] == [
        "cache must be true or false", "stride must be a whole number",
    ]  # fmt: skip
    (fault,) = describe_faults(find_faults(schemas.LogprobRequest, "{", as_json=True))
    assert fault.text.startswith("The body is not valid JSON") and fault.param is None
