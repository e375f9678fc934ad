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


def test_a_retryable_refusal_is_tried_again(call: Caller, pauses: list[float]) -> None:
    server = Script(problem("model_loading", 503, retryable=True), OK)
    assert call(server, ask_health).status == "ok"
    assert len(server.requests) == 2
    assert len(pauses) == 1 and 0.25 <= pauses[0] <= 0.5


def test_attempts_share_one_request_id(call: Caller, pauses: list[float]) -> None:
    server = Script(problem("overloaded", 429, retryable=True), OK)
    call(server, ask_health)
    call(server, ask_health)
    ids = [request.headers["X-Request-Id"] for request in server.requests]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 32


@pytest.mark.parametrize(
    ("code", "status", "retryable"), [("internal", 500, False), ("overloaded", 429, False)]
)
def test_the_document_forbids_a_retry(
    call: Caller, pauses: list[float], code: str, status: int, retryable: bool
) -> None:
    server = Script(problem(code, status, retryable=retryable))
    with pytest.raises(APIError) as caught:
        call(server, ask_health)
    assert (len(server.requests), pauses) == (1, [])
    assert (caught.value.code, caught.value.request_id) == (code, "from-server")


def test_a_bare_500_is_a_proxy_s_and_tried_again(call: Caller, pauses: list[float]) -> None:
    server = Script(httpx.Response(500, text="Internal Server Error"), OK)
    assert call(server, ask_health).status == "ok"
    assert (len(server.requests), len(pauses)) == (2, 1)


def test_retries_end(call: Caller, pauses: list[float]) -> None:
    server = Script(problem("engine_restarting", 503, retryable=True))
    with pytest.raises(UnavailableError, match="detail of engine_restarting"):
        call(server, ask_health, max_retries=3)
    assert len(server.requests) == 4
    assert len(pauses) == 3


def test_retry_after_is_obeyed(call: Caller, pauses: list[float]) -> None:
    refusal = problem("overloaded", 429, retryable=True, headers={"Retry-After": "7"})
    assert call(Script(refusal, OK), ask_health).status == "ok"
    assert pauses == [7.0]


def test_a_long_retry_after_is_told_and_not_waited_for(call: Caller, pauses: list[float]) -> None:
    refusal = problem("overloaded", 429, retryable=True, headers={"Retry-After": "3600"})
    with pytest.raises(OverloadedError) as caught:
        call(Script(refusal, OK), ask_health)
    assert (caught.value.retry_after, pauses) == (3600.0, [])


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


@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.ReadError("reset"),
        httpx.RemoteProtocolError("disconnected"),
    ],
)
def test_a_broken_connection_is_tried_again(
    call: Caller, pauses: list[float], failure: Exception
) -> None:
    server = Script(failure, OK)
    assert call(server, ask_health).status == "ok"
    assert len(pauses) == 1


def test_no_connection_says_what_to_do(call: Caller, pauses: list[float]) -> None:
    server = Script(httpx.ConnectError("Connection refused"))
    with pytest.raises(TransportError) as caught:
        call(server, ask_health, base_url="http://host:9")
    assert len(server.requests) == 3
    for part in ("http://host:9", "Connection refused", "logsteer serve", "LOGSTEER_BASE_URL"):
        assert part in str(caught.value)
    assert caught.value.request_id is None, "nothing was sent"
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


def test_a_timeout_is_not_tried_again(call: Caller, pauses: list[float]) -> None:
    server = Script(httpx.ReadTimeout("late"))
    with pytest.raises(RequestTimeoutError, match="Raise timeout") as caught:
        call(server, ask_health)
    assert (len(server.requests), pauses) == (1, [])
    assert caught.value.request_id == server.requests[0].headers["X-Request-Id"]


def test_a_refusal_from_elsewhere_keeps_status_and_our_request_id(call: Caller) -> None:
    server = Script(httpx.Response(404, text="<h1>nginx</h1>"))
    with pytest.raises(NotFoundError, match="nginx") as caught:
        call(server, ask_health)
    assert caught.value.code == "http_404"
    assert caught.value.request_id == server.requests[0].headers["X-Request-Id"]


def test_a_redirect_names_the_address_to_use(call: Caller) -> None:
    reply = httpx.Response(307, headers={"Location": "https://elsewhere/healthz"})
    with pytest.raises(APIError, match="redirects to https://elsewhere/healthz: set base_url"):
        call(Script(reply), ask_health)


def test_a_validation_list_is_shown(call: Caller) -> None:
    reply = httpx.Response(422, json={"detail": [{"msg": "Field required"}]})
    with pytest.raises(InvalidRequestError, match="Field required"):
        call(Script(reply), ask_health)


@pytest.mark.parametrize("body", [b"<html>", b'{"status": "ok"}', b"\xff"])
def test_an_answer_of_another_kind_is_no_answer(call: Caller, body: bytes) -> None:
    server = Script(httpx.Response(200, content=body))
    with pytest.raises(AnswerError, match="not a Health") as caught:
        call(server, ask_health)
    assert caught.value.request_id == server.requests[0].headers["X-Request-Id"]


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


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://host:port", "ftp://host"])
def test_a_bad_address_is_told_at_once(call: Caller, url: str) -> None:
    with pytest.raises(LogsteerError, match="base_url"):
        call(Script(OK), ask_health, base_url=url)


def test_settings_are_checked(call: Caller) -> None:
    with pytest.raises(ValueError, match="max_retries"):
        call(Script(OK), ask_health, max_retries=-1)
    with pytest.raises(ValueError, match="encoding"):
        call(Script(OK), ask_health, encoding="xml")


def test_an_internal_error_of_a_probe_is_raised(call: Caller) -> None:
    server = Script(problem("internal", 500))
    with pytest.raises(InternalError):
        call(server, lambda client: client.ready())
