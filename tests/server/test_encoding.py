"""Answers as bytes, errors as documents, and the deadline around a run: no server, no engine."""

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
import safetensors.numpy
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import ClientDisconnect

from logsteer.errors import KINDS, api_error
from logsteer.schemas import LogprobRequest, Problem
from logsteer_server.api.encoding import (
    DONE,
    ENCODERS,
    JSON,
    MSGPACK,
    SAFETENSORS,
    choose_encoding,
    encode_json,
    encode_msgpack,
    encode_tensors,
)
from logsteer_server.api.gate import AllowedHosts, Drain, RequestGate
from logsteer_server.api.problems import add_handlers
from logsteer_server.api.respond import encode_event, run_within
from logsteer_server.api.routes import resources
from logsteer_server.api.routes.resources import open_upload, write_body
from logsteer_server.api.routing import (
    BODY_MEMORY,
    MAX_BRACKETS,
    MAX_FAULTS,
    LimitedRequest,
    parse_body,
)
from logsteer_server.models.admission import Admission
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.tasks.run import Event
from tests.own_time import run_in_own_time
from tests.refusals import refused

ODD = np.array([0.5, np.nan, np.inf, -np.inf], dtype=np.float32)


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data)


def read_array(packed: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(packed["data"], packed["dtype"]).reshape(packed["shape"])


class TestJson:
    @pytest.mark.parametrize(
        ("array", "wanted"),
        [
            (np.arange(3, dtype=np.int32), [0, 1, 2]),
            (np.arange(6, dtype=np.float32).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
            (np.arange(6, dtype=np.float64).reshape(2, 3).T, [[0, 3], [1, 4], [2, 5]]),
            (np.arange(6, dtype=np.int32)[::2], [0, 2, 4]),
            (np.arange(6, dtype=np.int64).reshape(2, 3)[:, 1], [1, 4]),
            (ODD, [0.5, None, None, None]),
            (np.zeros((0, 4), dtype=np.float32), []),
            (np.frombuffer(ODD.tobytes(), np.float32)[:1], [0.5]),
        ],
    )
    def test_arrays_are_lists(self, array: np.ndarray, wanted: list[Any]) -> None:
        assert json.loads(encode_json({"a": {"b": [array]}})) == {"a": {"b": [wanted]}}

    def test_numbers_that_are_not_finite_are_null(self) -> None:
        document = {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": np.float32("nan")}
        assert json.loads(encode_json(document)) == {"a": None, "b": [None, None, 1.5], "c": None}

    def test_a_float32_keeps_its_bits(self) -> None:
        values = np.array([0.1, 1 / 3, 1e-42, -87.33654], dtype=np.float32)
        back = np.array(json.loads(encode_json(values)), dtype=np.float32)
        assert back.tobytes() == values.tobytes()


class TestMessagePack:
    @pytest.mark.parametrize(
        ("dtype", "stored"),
        [("f4", "<f4"), ("f8", "<f4"), (">f4", "<f4"), ("i4", "<i4"), ("i8", "<i4"), ("u2", "<i4")],
    )
    def test_arrays_are_raw_buffers(self, dtype: str, stored: str) -> None:
        array = np.arange(6).astype(dtype).reshape(2, 3).T
        packed = unpack(encode_msgpack([array]))[0]
        assert (packed["dtype"], packed["shape"]) == (stored, [3, 2])
        assert len(packed["data"]) == 24
        assert read_array(packed).tolist() == array.tolist()

    def test_not_finite_is_nil_outside_of_arrays_and_kept_inside(self) -> None:
        found = unpack(encode_msgpack({"a": math.nan, "b": (math.inf, 2.0), "c": ODD}))
        assert (found["a"], found["b"]) == (None, [None, 2.0])
        assert read_array(found["c"]).tobytes() == ODD.tobytes()


Plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.floats(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(Plain)
@settings(max_examples=40)
def test_both_encodings_say_the_same(document: Any) -> None:
    assert unpack(ENCODERS[MSGPACK](document)) == json.loads(ENCODERS[JSON](document))


@pytest.mark.parametrize("encoder", [encode_json, encode_msgpack])
def test_what_is_no_document_is_an_error(encoder: Callable[[Any], bytes]) -> None:
    with pytest.raises(TypeError):
        encoder({"a": object()})


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("text/html, application/json;q=0.9", JSON),
        (MSGPACK, MSGPACK),
        (f"{MSGPACK}, */*;q=0.1", MSGPACK),
    ],
)
def test_the_caller_chooses(accept: str, chosen: str) -> None:
    assert choose_encoding(accept) == choose_encoding(accept, has_file=True) == chosen


def test_a_file_is_given_where_there_is_one() -> None:
    for accept in (SAFETENSORS, f"{SAFETENSORS}, {MSGPACK};q=0.5"):
        assert choose_encoding(accept, has_file=True) == SAFETENSORS
        assert choose_encoding(accept) == (MSGPACK if MSGPACK in accept else JSON)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 3), st.text())
def test_tensors_are_read_by_the_library(rows: list[int], width: int, text: str) -> None:
    draw = np.random.default_rng(0)
    parts = [draw.normal(size=(count, width)).astype(np.float32) for count in rows]
    ids = [np.arange(count) for count in rows]
    file = encode_tensors({"a": parts, "ids": ids}, {"about": {"text": text, "x": np.nan}})
    found = safetensors.numpy.load(file)
    assert np.array_equal(found["a"], np.concatenate(parts))
    assert found["ids"].tolist() == np.concatenate(ids).tolist()
    size = int.from_bytes(file[:8], "little")
    metadata = json.loads(file[8 : 8 + size])["__metadata__"]
    assert json.loads(metadata["about"]) == {"text": text, "x": None}
    assert size % 8 == 0


@given(st.text())
def test_no_text_breaks_an_event(text: str) -> None:
    lines = encode_event(Event("piece", {"text": text}), openai=False).decode().split("\n")
    assert (lines[0], lines[2:]) == ("event: piece", ["", ""])
    assert json.loads(lines[1].removeprefix("data: ")) == {"text": text}
    nameless = encode_event(Event("chunk", {"text": text}), openai=True).decode()
    assert nameless == f"{lines[1]}\n\n"
    assert DONE == b"data: [DONE]\n\n"


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    targets: list[int] = Field(min_length=1)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    items: list[Item] = Field(default_factory=list)
    both: bool = False

    @model_validator(mode="after")
    def _has_items(self) -> "Body":
        if self.both and not self.items:
            raise ValueError("both: needs items; give some")
        return self


def make_app() -> FastAPI:
    app = FastAPI()

    @app.post("/items")
    @app.post("/v1/items")
    async def take(body: Body) -> dict[str, int]:
        return {"items": len(body.items)}

    @app.get("/fail/{code}")
    @app.get("/v1/fail/{code}")
    async def fail(code: str, wait: float | None = None) -> None:
        raise api_error(code, "Told to fail.", param="wait", retry_after=wait)

    @app.get("/crash")
    async def crash() -> None:
        raise RuntimeError("a secret")

    @app.get("/gone")
    async def leave() -> None:
        raise ClientDisconnect

    settings = Settings(models=[ModelSettings(id="a", path="p")], allowed_hosts=["*"])
    hosts = AllowedHosts(settings, needs_key=False)
    app.add_middleware(RequestGate, hosts=hosts, drain=Drain(), admission=Admission(2**20))
    add_handlers(app)
    return app


def ask(method: str, path: str, **arguments: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(send())


def problem(response: httpx.Response) -> Problem:
    assert response.headers["content-type"] == "application/problem+json"
    found = Problem.model_validate(response.json())
    assert response.headers["x-request-id"] == found.request_id
    assert response.status_code == found.status
    return found


class TestProblems:
    @pytest.mark.parametrize(
        ("body", "param", "reason"),
        [
            ({"items": [{"targets": []}]}, "items[0].targets", "must not be empty"),
            (
                {"items": [{"targets": [1]}, {"targets": [1, "2"]}]},
                "items[1].targets[1]",
                "must be a whole number",
            ),
            ({"items": [{}]}, "items[0].targets", "is missing"),
            ({"itmes": []}, "itmes", "itmes: there is no such field; did you mean `items`?"),
            ({"zzz": []}, "zzz", "zzz: there is no such field; remove it."),
            ({"items": [{"targets": [1], "x": 1}]}, "items[0].x", "no such field; remove it."),
            ({"both": True}, None, "both: needs items; give some."),
            ({"items": 5, "both": 1}, "items", "items must be a list. both must be"),
        ],
    )
    def test_the_field_is_named(self, body: Any, param: str | None, reason: str) -> None:
        found = problem(ask("POST", "/items", json=body))
        assert (found.code, found.status, found.param) == ("invalid_request", 422, param)
        assert reason in found.detail
        assert "Value error" not in found.detail

    def test_five_reasons_are_enough(self) -> None:
        found = problem(ask("POST", "/items", json={"items": [{}] * 8}))
        assert found.detail.count("is missing") == 5
        assert found.detail.endswith("and 3 more")

    def test_another_method_names_the_right_one(self) -> None:
        response = ask("GET", "/items")
        found = problem(response)
        assert (found.code, found.status) == ("method_not_allowed", 405)
        assert found.detail == "/items does not take GET; send POST."
        assert response.headers["allow"] == "POST"

    @pytest.mark.parametrize("code", KINDS)
    def test_every_code_has_its_status(self, code: str) -> None:
        response = ask("GET", f"/fail/{code}?wait=1.2", headers={"x-request-id": "mine"})
        found = problem(response)
        kind = KINDS[code]  # type: ignore[index]
        assert (found.code, found.status, found.retryable) == (code, kind.status, kind.retryable)
        assert (found.title, found.param, found.request_id) == (kind.title, "wait", "mine")
        assert response.headers["retry-after"] == "2", "whole seconds, never too few"
        assert response.headers.get("www-authenticate") == (
            "Bearer" if code == "unauthorized" else None
        )
        assert "retry-after" not in ask("GET", f"/fail/{code}").headers

    def test_callers_refused_together_do_not_come_back_together(self) -> None:
        def ask_when(request_id: str) -> int:
            response = ask("GET", "/fail/overloaded?wait=100", headers={"x-request-id": request_id})
            return int(response.headers["retry-after"])

        waits = [ask_when(f"caller-{number}") for number in range(50)]
        assert all(100 <= wait <= 140 for wait in waits)
        assert len(set(waits)) > 20
        assert max(waits) - min(waits) > 30
        assert ask_when("caller-7") == waits[7], "the same request is told the same"

    def test_a_crash_tells_no_secrets(self, caplog: pytest.LogCaptureFixture) -> None:
        response = ask("GET", "/crash", headers={"x-request-id": "mine"})
        found = problem(response)
        assert (found.code, found.status) == ("internal", 500)
        assert "secret" not in response.text
        assert "mine" in found.detail
        assert "request mine failed" in caplog.text
        assert "a secret" in caplog.text

    def test_an_id_that_is_none_is_not_the_requests(self) -> None:
        for sent in (b"", b"\xe9", b"a\tb", b"a" * 129):
            response = ask("GET", "/nothing", headers={"x-request-id": sent})  # type: ignore[dict-item]
            assert re.fullmatch("[0-9a-f]{32}", problem(response).request_id or "")

    def test_nobody_reads_the_answer_to_who_hung_up(self) -> None:
        response = ask("GET", "/gone")
        assert (response.status_code, response.content) == (499, b"")


class TestOpenAIShape:
    @pytest.mark.parametrize(
        ("method", "path", "code", "status", "kind"),
        [
            ("POST", "/v1/items", "invalid_request", 400, "invalid_request_error"),
            ("GET", "/v1/items", "method_not_allowed", 405, "invalid_request_error"),
            ("GET", "/v1/nothing", "not_found", 404, "invalid_request_error"),
            ("GET", "/v1/fail/context_too_long", "context_too_long", 400, "invalid_request_error"),
            ("GET", "/v1/fail/overloaded", "overloaded", 429, "rate_limit_error"),
            ("GET", "/v1/fail/out_of_memory", "out_of_memory", 503, "server_error"),
        ],
    )
    def test_whatever_goes_wrong(
        self, method: str, path: str, code: str, status: int, kind: str
    ) -> None:
        arguments = {"json": {"items": [{}]}} if method == "POST" else {}
        response = ask(method, path, **arguments)
        error = response.json()["error"]
        assert (error["code"], response.status_code, error["type"]) == (code, status, kind)
        assert error["message"]
        assert response.headers["x-request-id"]


class Work:
    """Work that goes on until it is cancelled or told to end."""

    def __init__(self) -> None:
        self.was_cancelled = False

    async def last(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return "done"


def within(timeout_s: float, work: Awaitable[str], hang_up_after: float = 60) -> str:
    async def receive() -> dict[str, str]:
        await asyncio.sleep(hang_up_after)
        return {"type": "http.disconnect"}

    async def run() -> str:
        request: Any = SimpleNamespace(receive=receive, headers={})
        return await run_within(request, timeout_s, work)  # type: ignore[arg-type]

    return run_in_own_time(run())


class TestDeadline:
    def test_what_is_late_is_cancelled(self) -> None:
        work = Work()
        with pytest.raises(Exception, match=r"within 0\.02 s .* request_timeout_s") as caught:
            within(0.02, work.last(60))
        assert getattr(caught.value, "code", None) == "deadline_exceeded"
        assert work.was_cancelled

    def test_who_hangs_up_has_the_work_cancelled(self) -> None:
        work = Work()
        with pytest.raises(ClientDisconnect):
            within(60, work.last(60), hang_up_after=0.02)
        assert work.was_cancelled

    def test_who_hangs_up_as_the_work_ends_leaves_no_trace(self) -> None:
        """The deadline was moved after it had ended: one hang-up in ten logged a traceback."""
        faults: list[dict[str, Any]] = []

        async def run() -> str:
            asyncio.get_running_loop().set_exception_handler(lambda _, what: faults.append(what))
            both = asyncio.Event()

            async def receive() -> dict[str, str]:
                await both.wait()
                return {"type": "http.disconnect"}

            async def work() -> str:
                await both.wait()
                return "done"

            request: Any = SimpleNamespace(receive=receive, headers={})
            asyncio.get_running_loop().call_later(0.01, both.set)
            done = await run_within(request, 5, work())
            await asyncio.sleep(0.01)
            return done

        assert run_in_own_time(run()) == "done"
        assert faults == []


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
    calls, limit = Calls(), "max_body_bytes"

    async def upload() -> None:
        request = request_of([b"x" * size for size in sizes], announced=announced)
        async with open_upload(request, lambda *_: calls, "name", calls, limit) as file:  # type: ignore[arg-type]
            await write_body(request, file, calls, limit)  # type: ignore[arg-type]

    if is_taken:
        asyncio.run(upload())
        assert ("write", b"x" * 10) in calls.given
    else:
        with refused("payload_too_large", "larger than 10 bytes: raise max_body_bytes"):
            asyncio.run(upload())


def test_an_upload_is_written_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "WRITTEN_AT_ONCE", 4)
    upload, threads = Calls(), Calls()
    request = request_of([b"123", b"45", b"6", b"7"])
    asyncio.run(write_body(request, upload, threads, "max_body_bytes"))  # type: ignore[arg-type]
    assert list(upload.given) == [
        ("check", 3), ("check", 5), ("write", b"12345"), ("check", 6), ("check", 7),
        ("write", b"67"),
    ]  # fmt: skip
