"""JSON bodies: what is a document of a schema, and what is refused with which fault."""

import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from logsteer.errors import APIError
from logsteer.schemas import LogprobRequest
from logsteer_server.api.routing import MAX_BRACKETS, MAX_FAULTS, parse_body

ITEM = {"context": "Infinity and NaN", "targets": [" a"]}


def test_a_body_is_what_its_text_says() -> None:
    for content in (
        json.dumps({"items": [ITEM]}),
        f'{{"items": [], "items": [{json.dumps(ITEM)}]}}',
    ):
        parsed = parse_body(content.encode(), LogprobRequest)
        assert parsed == LogprobRequest(items=[ITEM])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "missing"),
        (b'{"items": [', "json_invalid"),
        (b"\xff\xfe", "json_invalid"),
        (b'{"items": [{"context": "\xff", "targets": ["b"]}]}', "json_invalid"),
        (b'{"items": [{"context": "\\ud800", "targets": ["b"]}]}', "json_invalid"),
        (b'{"items": NaN}', "json_invalid"),
        (b'{"items": [], "top": -Infinity}', "json_invalid"),
        (b'{"items": [{"context": ' + b"[" * 100_000, "json_invalid"),
        (b'"items"', "model_type"),
        (b'{"items": [{"context_ids": [1.5], "target_ids": [[1]]}]}', "int_type"),
        (b'{"items": [{"context_ids": ["1"], "target_ids": [[1]]}]}', "int_type"),
        (b'{"items": [{"context_ids": [true], "target_ids": [[1]]}]}', "int_type"),
        (b'{"items": [], "boundry": "joint"}', "extra_forbidden"),
    ],
)  # fmt: skip
def test_faults_are_located_in_the_body(content: bytes, kind: str) -> None:
    with pytest.raises(RequestValidationError) as caught:
        parse_body(content, LogprobRequest)
    faults: list[dict[str, Any]] = list(caught.value.errors())
    assert kind in {fault["type"] for fault in faults}
    assert {fault["loc"][0] for fault in faults} == {"body"}


@pytest.mark.parametrize(
    "content",
    [
        b'{"items": [' + b"[]," * MAX_BRACKETS + b"[]]}",
        json.dumps({f"field{n}": n for n in range(MAX_FAULTS + 1)}).encode(),
    ],
)
def test_what_would_take_long_to_look_at_is_too_large(content: bytes) -> None:
    with pytest.raises(APIError) as caught:
        parse_body(content, LogprobRequest)
    assert caught.value.code == "payload_too_large"
