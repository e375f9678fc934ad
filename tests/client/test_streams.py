"""Scoring answered by events, and texts sent while they are read."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from logsteer import (
    AsyncClient,
    Client,
    OverloadedError,
    RequestTimeoutError,
    TransportError,
    UnavailableError,
)
from logsteer.schemas import (
    ParameterOverride,
    PerplexityAnswer,
    PerplexityStreamQuery,
    Steering,
    WindowEvent,
)
from logsteer.schemas.perplexity import StreamStart

from .documents import PERPLEXITY_EVENTS, START, events, window
from .scripted import Caller, Script, event_chunks, event_stream, problem


def ask_events(client: Any) -> Any:
    return client.perplexity_events(["a"], protocol="rolling")


def test_events_are_typed_and_in_order(call: Caller) -> None:
    server = Script(event_stream(PERPLEXITY_EVENTS))
    start, first, second, result = call(server, ask_events)
    assert isinstance(start, StreamStart)
    assert [type(e) for e in (first, second)] == [WindowEvent, WindowEvent]
    assert (first.windows_total, second.windows_total) == (None, 2)
    assert isinstance(result, PerplexityAnswer)
    assert json.loads(server.bodies[0]) == {"texts": ["a"], "protocol": "rolling", "stream": True}
    assert server.requests[0].headers["Accept"].startswith("text/event-stream")


def test_comments_and_events_of_a_newer_server_are_passed_over(call: Caller) -> None:
    text = ": keep-alive\n\n" + events(("hint", {"x": 1})) + PERPLEXITY_EVENTS
    assert len(call(Script(event_stream(text)), ask_events)) == 4


def test_an_error_event_is_raised_after_what_came_before(pauses: list[float]) -> None:
    error = json.loads(problem("out_of_memory", 503, retryable=True).content)
    text = events(("start", START), ("window", window(1)), ("error", error))
    server = Script(event_stream(text))
    with Client(transport=httpx.MockTransport(server)) as client:
        stream = ask_events(client)
        assert [type(next(stream)) for _ in range(2)] == [StreamStart, WindowEvent]
        with pytest.raises(UnavailableError, match="detail of out_of_memory") as caught:
            next(stream)
    assert caught.value.request_id == "from-server"
    assert (len(server.requests), pauses) == (1, [])


BUSY = json.loads(problem("overloaded", 429, retryable=True).content)
BEGUN = events(("start", START)).encode()


@pytest.mark.parametrize(
    "reply",
    [
        lambda: problem("overloaded", 429, retryable=True),
        lambda: event_chunks([httpx.ReadError("reset")]),
        lambda: event_chunks([b": keep-alive\n\n"]),
    ],
)
def test_what_comes_before_the_first_event_is_tried_again(
    call: Caller, pauses: list[float], reply: Any
) -> None:
    assert len(call(Script(reply(), event_stream(PERPLEXITY_EVENTS)), ask_events)) == 4
    assert len(pauses) == 1


@pytest.mark.parametrize(
    ("chunks", "error", "words"),
    [
        ([events(("error", BUSY)).encode()], OverloadedError, "from-server"),
        ([BEGUN, httpx.ReadError("reset")], TransportError, "reset"),
        ([BEGUN, httpx.ReadTimeout("late")], RequestTimeoutError, "late|Raise timeout"),
        ([BEGUN], TransportError, "ended before its result"),
    ],
)
def test_what_comes_after_it_is_raised(
    call: Caller, pauses: list[float], chunks: Any, error: Any, words: str
) -> None:
    server = Script(event_chunks(chunks))
    with pytest.raises(error, match=words) as caught:
        call(server, ask_events)
    assert (len(server.requests), pauses) == (1, [])
    own = server.requests[0].headers["X-Request-Id"]
    assert caught.value.request_id == ("from-server" if error is OverloadedError else own)


def test_nothing_is_read_past_the_result(call: Caller) -> None:
    chunks = [PERPLEXITY_EVENTS.encode(), AssertionError("read on")]
    assert len(call(Script(event_chunks(chunks)), ask_events)) == 4  # type: ignore[arg-type]


def test_stopping_early_closes_the_response() -> None:
    response = event_stream(PERPLEXITY_EVENTS)
    with (
        Client(transport=httpx.MockTransport(lambda request: response)) as client,
        closing(client.perplexity_events("a")) as stream,
    ):
        next(stream)
        assert not response.is_closed
    assert response.is_closed


def test_a_path_is_sent_with_its_options(call: Caller, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("é".encode() * 100_000)
    server = Script(event_stream(PERPLEXITY_EVENTS))
    result = call(
        server,
        lambda client: client.perplexity_stream(path, context_length=512, stride=None, bos="never"),
        model="demo",
    )
    assert isinstance(result[-1], PerplexityAnswer)
    request = server.requests[0]
    assert request.url.path == "/perplexity/stream"
    assert dict(request.url.params) == {"model": "demo", "context_length": "512", "bos": "never"}
    assert request.headers["Transfer-Encoding"] == "chunked"
    assert server.bodies[0] == path.read_bytes()


MOOD: dict[str, Any] = {"vectors": [{"name": "mood", "scale": 2, "layers": [1]}]}
STEP = {"name": "step", "eta": -0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"steering": MOOD, "override": STEP, "adapter": "lora"},
        {
            "steering": Steering.model_validate(MOOD),
            "override": ParameterOverride.model_validate(STEP),
            "adapter": "lora",
        },
    ],
    ids=["fields", "objects"],
)
def test_what_changes_the_model_is_json_in_the_query(
    call: Caller, pauses: list[float], changes: dict[str, Any]
) -> None:
    server = Script(problem("model_loading", 503, retryable=True), event_stream(PERPLEXITY_EVENTS))
    options = {**changes, "cache": False}
    call(server, lambda client: client.perplexity_stream(["a"], **options), model="demo")
    for request in server.requests:
        params = dict(request.url.params)
        # As for a body: what was given, and no more.
        assert json.loads(params["steering"]) == MOOD
        assert json.loads(params["override"]) == STEP
        query = PerplexityStreamQuery.model_validate(params)
        assert query.steering == Steering.model_validate(MOOD)
        assert query.override == ParameterOverride.model_validate(STEP)
        assert (query.adapter, query.model, query.cache) == ("lora", "demo", False)
    assert server.bodies == [b"a", b"a"]


def test_a_steering_object_may_be_of_some_thousand_letters(call: Caller) -> None:
    server, steering = (
        Script(event_stream(PERPLEXITY_EVENTS)),
        {"vectors": [{"data": {"1": [0.5] * 500}}]},
    )
    call(server, lambda client: client.perplexity_stream(["a"], steering=steering))
    assert json.loads(server.requests[0].url.params["steering"]) == steering


def generated() -> Iterator[str]:
    yield from ("a", "é", "b")


class Pipe(io.BytesIO):
    def seekable(self) -> bool:
        return False


def begin_later() -> io.BytesIO:
    """A file that is read from where it stands."""
    file = io.BytesIO("header\naéb".encode())
    file.readline()
    return file


@pytest.mark.parametrize(
    ("make", "again"),
    [
        (generated, False),
        (lambda: Pipe("aéb".encode()), False),
        (lambda: ["a", "é", "b"], True),
        (lambda: [b"a\xc3", b"\xa9b"], True),
        (lambda: io.BytesIO("aéb".encode()), True),
        (lambda: io.StringIO("aéb"), True),
        (begin_later, True),
    ],
)
def test_a_source_is_sent_again_only_from_its_beginning(
    call: Caller, pauses: list[float], make: Any, again: bool
) -> None:
    server = Script(problem("model_loading", 503, retryable=True), event_stream(PERPLEXITY_EVENTS))
    with nullcontext() if again else pytest.raises(UnavailableError):
        assert len(call(server, lambda client: client.perplexity_stream(make()))) == 4
    assert server.bodies == ["aéb".encode()] * (1 + again)


class Refusing(httpx.BaseTransport):
    """Fails the first connection without reading the body, as a closed port does."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.refused = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not self.refused:
            self.refused += 1
            raise httpx.ConnectError("refused")
        self.bodies.append(request.read())
        return event_stream(PERPLEXITY_EVENTS)


def test_an_untouched_iterator_may_be_tried_again(pauses: list[float]) -> None:
    transport = Refusing()
    with Client(transport=transport) as client:
        assert len(list(client.perplexity_stream(generated()))) == 4
    assert transport.bodies == ["aéb".encode()]


def test_an_asynchronous_source_goes_with_the_asynchronous_client() -> None:
    async def source() -> AsyncIterator[str]:
        yield "a"
        yield "é"

    server = Script(event_stream(PERPLEXITY_EVENTS))

    async def run() -> list[Any]:
        async with AsyncClient(transport=httpx.MockTransport(server)) as client:
            return [event async for event in client.perplexity_stream(source())]

    assert len(asyncio.run(run())) == 4
    assert server.bodies == ["aé".encode()]
    with Client(transport=httpx.MockTransport(server)) as client:
        stream: Any = client.perplexity_stream(source())  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="AsyncClient"):
            next(stream)


def test_a_wrong_source_is_told_before_anything_is_sent(call: Caller, tmp_path: Path) -> None:
    server = Script(event_stream(PERPLEXITY_EVENTS))
    with pytest.raises(FileNotFoundError):
        call(server, lambda client: client.perplexity_stream(tmp_path / "none"))
    for use in (
        lambda client: client.perplexity_stream(b"text"),
        lambda client: client.perplexity_stream(5),
    ):
        with pytest.raises(TypeError, match="source is"):
            call(server, use)
    assert server.requests == []
