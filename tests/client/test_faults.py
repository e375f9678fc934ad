"""What is wrong with a message is said in words: of fields, and of what to send in their place."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from logsteer import schemas
from logsteer._endpoints import ENDPOINTS
from logsteer.schemas.common import Request
from logsteer.schemas.faults import PATTERNS, describe_faults

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
