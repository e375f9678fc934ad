"""JSON bodies: what is a document of a schema, and what is refused with which fault."""

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError

from logsteer.schemas import LogprobRequest
from logsteer_server.api.routes import resources
from logsteer_server.api.routes.resources import UploadLimit, open_upload, write_body
from logsteer_server.api.routing import (
    BODY_MEMORY,
    MAX_BRACKETS,
    MAX_FAULTS,
    LimitedRequest,
    parse_body,
)
from tests.refusals import refused

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
    with refused("payload_too_large"):
        parse_body(content, LogprobRequest)


class Calls:
    """Takes whatever is called, and keeps what it was given, each once and in order."""

    def __init__(self) -> None:
        self.given: dict[tuple[str, Any], None] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda value=None: self.given.setdefault((name, value))

    async def run(self, call: Any, *arguments: Any) -> Any:
        return call(*arguments)


def request_of(
    pieces: Sequence[bytes], memory: Any = None, announced: int | None = None, limit: int = 10
) -> LimitedRequest:
    """A request whose body comes in these pieces, to a server that takes bodies up to a limit."""
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    headers = [] if announced is None else [(b"content-length", b"%d" % announced)]
    settings = SimpleNamespace(max_body_bytes=limit)
    app = SimpleNamespace(state=SimpleNamespace(settings=settings))
    scope = {"type": "http", "headers": headers, "app": app, "state": {"memory": memory}}
    return LimitedRequest(scope, receive)


def test_a_body_reserves_memory_as_it_comes_up_to_its_limit() -> None:
    memory = Calls()
    request = request_of([b"12345"] * 2, memory)
    assert asyncio.run(request.body()) == b"1234512345" == asyncio.run(request.body())
    covered = [("cover", 5 * BODY_MEMORY), ("cover", 10 * BODY_MEMORY)]
    assert list(memory.given) == covered
    with refused("payload_too_large", "larger than 10 bytes"):
        asyncio.run(request_of([b"12345", b"123456", b"never read"], memory).body())
    assert list(memory.given) == covered, "what is too large reserves no more than the limit"


@pytest.mark.parametrize(
    ("announced", "sizes", "is_taken"),
    [(None, [5, 5], True), (None, [5, 6], False), (10, [5, 5], True), (11, [], False)],
)
def test_an_upload_is_taken_up_to_its_limit(
    announced: int | None, sizes: list[int], is_taken: bool
) -> None:
    calls, limit = Calls(), UploadLimit(10, "setting")
    store = SimpleNamespace(receive=lambda *_: calls)

    async def upload() -> None:
        request = request_of([b"x" * size for size in sizes], announced=announced)
        async with open_upload(request, store, "name", limit, calls) as file:  # type: ignore[arg-type]
            await write_body(request, file, limit, calls)  # type: ignore[arg-type]

    if is_taken:
        asyncio.run(upload())
        assert ("write", b"x" * 10) in calls.given
    else:
        with refused("payload_too_large", "larger than 10 bytes: raise setting"):
            asyncio.run(upload())


def test_an_upload_is_written_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "WRITTEN_AT_ONCE", 4)
    upload, threads = Calls(), Calls()
    request = request_of([b"123", b"45", b"6", b"7"])
    asyncio.run(write_body(request, upload, UploadLimit(10, "setting"), threads))  # type: ignore[arg-type]
    assert list(upload.given) == [
        ("reserve", 3), ("reserve", 5), ("write", b"12345"), ("reserve", 6), ("reserve", 7),
        ("write", b"67"),
    ]  # fmt: skip
