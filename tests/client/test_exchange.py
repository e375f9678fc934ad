"""Retries, headers and errors, the same for both clients."""

from typing import Any

import httpx
import pytest

from logsteer import (
    AnswerError,
    APIError,
    InternalError,
    InvalidRequestError,
    LogsteerError,
    NotFoundError,
    OverloadedError,
    RequestTimeoutError,
    TransportError,
    UnavailableError,
)
from logsteer._exchange import RetryPolicy, _retry_after

from .documents import HEALTH
from .scripted import Caller, Script, problem

OK = httpx.Response(200, json=HEALTH)


def ask_health(client: Any) -> Any:
    return client.health()


BUSY = problem("overloaded", 429, retryable=True)
BUSY_7 = problem("overloaded", 429, retryable=True, headers={"Retry-After": "7"})
BUSY_HOUR = problem("overloaded", 429, retryable=True, headers={"Retry-After": "3600"})
RESTARTING = problem("engine_restarting", 503, retryable=True)


@pytest.mark.parametrize(
    ("replies", "requests", "pause", "error"),
    [
        ([BUSY, OK], 2, (0.25, 0.5), None),
        ([BUSY_7, OK], 2, (7, 7), None),
        # What a proxy says of a process that died.
        ([httpx.Response(500, text="Internal Server Error"), OK], 2, (0.25, 0.5), None),
        ([httpx.ConnectError("refused"), OK], 2, (0.25, 0.5), None),
        ([httpx.ConnectTimeout("slow"), OK], 2, (0.25, 0.5), None),
        ([httpx.ReadError("reset"), OK], 2, (0.25, 0.5), None),
        ([httpx.RemoteProtocolError("disconnected"), OK], 2, (0.25, 0.5), None),
        ([RESTARTING], 4, (0.25, 2), UnavailableError),
        ([BUSY_HOUR], 1, (), OverloadedError),
        ([problem("internal", 500)], 1, (), InternalError),
        ([problem("overloaded", 429)], 1, (), OverloadedError),
        ([httpx.ReadTimeout("late")], 1, (), RequestTimeoutError),
    ],
)
def test_what_may_pass_is_tried_again(
    call: Caller, pauses: list[float], replies: Any, requests: int, pause: Any, error: Any
) -> None:
    server = Script(*replies)
    if error is None:
        assert call(server, ask_health, max_retries=3).status == "ok"
    else:
        with pytest.raises(error) as caught:
            call(server, ask_health, max_retries=3)
        assert getattr(caught.value, "retry_after", None) in (None, 3600.0)
    assert (len(server.requests), len(pauses)) == (requests, requests - 1)
    assert all(pause[0] <= seconds <= pause[1] for seconds in pauses)


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (httpx.Response(404, text="<h1>nginx</h1>"), NotFoundError, "^http_404: .*nginx"),
        (httpx.Response(307, headers={"Location": "https://elsewhere/healthz"}), APIError,
         "redirects to https://elsewhere/healthz: set base_url"),
        (httpx.Response(422, json={"detail": [{"msg": "Field required"}]}), InvalidRequestError,
         "Field required"),
        (httpx.Response(200, content=b"<html>"), AnswerError, "not a Health"),
        (httpx.Response(200, content=b'{"status": "ok"}'), AnswerError, "not a Health"),
        (httpx.Response(200, content=b"\xff"), AnswerError, "not a Health"),
        (httpx.ReadTimeout("late"), RequestTimeoutError, "Raise timeout"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_told_with_our_request_id(
    call: Caller, reply: Any, error: Any, words: str
) -> None:
    server = Script(reply)
    with pytest.raises(error, match=words) as caught:
        call(server, ask_health)
    assert caught.value.request_id == server.requests[0].headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"base_url": "localhost:8000"}, LogsteerError, "base_url"),
        ({"base_url": "http://"}, LogsteerError, "base_url"),
        ({"base_url": "http://host:port"}, LogsteerError, "base_url"),
        ({"base_url": "ftp://host"}, LogsteerError, "base_url"),
        ({"max_retries": -1}, ValueError, "max_retries"),
        ({"encoding": "xml"}, ValueError, "encoding"),
    ],
)
def test_settings_are_checked(call: Caller, settings: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(Script(OK), ask_health, **settings)


def test_attempts_share_one_request_id(call: Caller, pauses: list[float]) -> None:
    server = Script(problem("overloaded", 429, retryable=True), OK)
    call(server, ask_health)
    call(server, ask_health)
    ids = [request.headers["X-Request-Id"] for request in server.requests]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 32


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("-5", None),
        (None, None),
    ],
)
def test_retry_after_is_read(value: str | None, seconds: float | None) -> None:
    assert _retry_after(value, now=60.0) == seconds


def test_pauses_grow_to_a_bound() -> None:
    longest = RetryPolicy(max_retries=9, jitter=lambda: 0.0)
    assert [longest.pause(k, None) for k in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    shortest = RetryPolicy(max_retries=9, jitter=lambda: 1.0)
    assert [shortest.pause(k, None) for k in range(3)] == [0.25, 0.5, 1.0]
    assert RetryPolicy(max_retries=2).pause(2, None) is None
    assert RetryPolicy(max_retries=2).pause(2, 1.0) is None


def test_no_connection_says_what_to_do(call: Caller, pauses: list[float]) -> None:
    server = Script(httpx.ConnectError("Connection refused"))
    with pytest.raises(TransportError) as caught:
        call(server, ask_health, base_url="http://host:9")
    assert len(server.requests) == 3
    for part in ("http://host:9", "Connection refused", "logsteer serve", "LOGSTEER_BASE_URL"):
        assert part in str(caught.value)
    assert caught.value.request_id is None, "nothing was sent"
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


def test_key_agent_and_address(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGSTEER_API_KEY", "from-environment")
    monkeypatch.setenv("LOGSTEER_BASE_URL", "http://elsewhere:1/prefix/")
    server = Script(OK)
    call(server, ask_health)
    call(server, ask_health, api_key="given", base_url="http://here")
    first, second = server.requests
    assert str(first.url) == "http://elsewhere:1/prefix/healthz"
    assert first.headers["Authorization"] == "Bearer from-environment"
    assert first.headers["User-Agent"].startswith("logsteer/")
    assert str(second.url) == "http://here/healthz"
    assert second.headers["Authorization"] == "Bearer given"


def test_no_key_no_header(call: Caller) -> None:
    server = Script(OK)
    call(server, ask_health)
    assert str(server.requests[0].url) == "http://127.0.0.1:8000/healthz"
    assert "Authorization" not in server.requests[0].headers
