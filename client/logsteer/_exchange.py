"""The course of every request: build, retry, parse, raise; and the settings of a client.

Nothing here does input or output: `_async_caller` does, and what is written from it, which blocks.
"""

import json
import os
import random
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Generic, Literal, TypeVar
from urllib.request import getproxies

import httpx
from pydantic import BaseModel, ValidationError

from logsteer import _arrays
from logsteer._calls import ApiCall
from logsteer._events import ServerSentEvent
from logsteer._version import __version__
from logsteer.errors import (
    AnswerError,
    APIError,
    LogsteerError,
    RequestTimeoutError,
    TransportError,
    problem_error,
)
from logsteer.schemas.faults import describe_faults

Encoding = Literal["json", "msgpack"]
A = TypeVar("A", bound=BaseModel)

_MSGPACK = "application/msgpack"
_EVENT_STREAM = "text/event-stream"
_ACCEPT: dict[Encoding, str] = {
    "json": "application/json, application/problem+json",
    "msgpack": f"{_MSGPACK}, application/json;q=0.5, application/problem+json",
}
# A request that timed out while the server worked on it would only add the same work again.
_PASSING_FAILURES = (
    httpx.NetworkError,
    httpx.RemoteProtocolError,
    httpx.ConnectTimeout,
)


@dataclass(frozen=True)
class RetryPolicy:
    """How often and after which pauses (seconds) a request is tried again.

    The pause before retry k is `first_pause` * 2**k, at most `longest_pause`, shortened at random
    by up to a half; or what the server asks for. A server that asks for more than `longest_wait`
    is not waited for.
    """

    max_retries: int = 2
    first_pause: float = 0.5
    longest_pause: float = 8.0
    longest_wait: float = 60.0
    jitter: Callable[[], float] = random.random

    def pause(self, attempt: int, retry_after: float | None) -> float | None:
        """Return the seconds to wait after failed attempt `attempt` (from 0); None: give up."""
        if attempt >= self.max_retries:
            return None
        if retry_after is not None:
            return retry_after if retry_after <= self.longest_wait else None
        longest = min(self.first_pause * 2.0**attempt, self.longest_pause)
        return longest * (1 - 0.5 * self.jitter())


class Exchange(Generic[A]):
    """The course of one call: what is sent, what is tried again, and what the answer says.

    It does no input or output. A call that streams is not tried again once its first event is
    there. Methods raise the errors of `logsteer.errors`, each with the request id, which is one for
    all attempts.
    """

    def __init__(self, call: ApiCall[A], settings: "ClientSettings") -> None:
        self._call, self._settings = call, settings
        self._request_id = uuid.uuid4().hex
        self._attempt = 0
        self._has_begun = False

    def write_headers(self) -> dict[str, str]:
        """Return the headers of the next attempt's request."""
        call = self._call
        accept = _ACCEPT[self._settings.encoding]
        if call.events:
            accept = f"{_EVENT_STREAM}, {_ACCEPT['json']}"
        elif call.file_type is not None:
            accept = f"{call.file_type}, application/problem+json"
        headers = {"X-Request-Id": self._request_id, "Accept": accept, **_describe_trace()}
        if call.body is not None or call.upload is not None:
            headers["Content-Type"] = call.media_type
        return headers

    def choose_pause(self, failure: httpx.HTTPError | APIError) -> float:
        """Return the seconds until the next attempt; raise the error where none follows."""
        error: LogsteerError
        if isinstance(failure, APIError):
            error, passing, retry_after = failure, failure.retryable, failure.retry_after
        else:
            error = _transport_error(failure, self._settings.base_url, self._request_id)
            passing, retry_after = isinstance(failure, _PASSING_FAILURES), None
        upload = self._call.upload
        passing = passing and self._call.retry_safe and not self._has_begun
        passing = passing and (upload is None or upload.can_restart)
        seconds = self._settings.policy.pause(self._attempt, retry_after) if passing else None
        if seconds is None:
            raise error from (None if error is failure else failure)
        self._attempt += 1
        return seconds

    def check(self, response: httpx.Response) -> None:
        """Raise for a response that is not an answer; it has been read unless it streams."""
        answers = response.is_success or response.status_code in self._call.answer_statuses
        if not answers or _media_type(response) == "application/problem+json":
            raise _refusal(response, self._request_id)
        expected = _EVENT_STREAM if self._call.events else self._call.file_type
        if expected is not None and (found := _media_type(response)) != expected:
            raise AnswerError(
                f"expected {expected} from {response.url.path}, got {found or 'no content type'}; "
                "is base_url a logsteer server?",
                request_id=self._request_id,
            )

    def read_answer(self, response: httpx.Response) -> A:
        """Return the answer of a call without events."""
        kind = self._call.answer
        assert kind is not None, "a call without events has an answer type"
        if self._call.file_type is not None:
            return kind.model_validate({"data": response.content})
        if _media_type(response) != _MSGPACK:
            return self._parse(kind, response.content)
        try:
            document = _arrays.unpack(response.content)
        except ValueError as invalid:
            detail = f"unreadable MessagePack: {invalid}"
            raise AnswerError(detail, request_id=self._request_id) from invalid
        return self._parse(kind, document)

    def read_event(self, event: ServerSentEvent) -> A | None:
        """Return what an event says; None for a name that is a newer server's."""
        self._has_begun = True
        if event.name == "error":
            document = _problem_document(event.data.encode())
            raise problem_error(document, request_id=self._request_id)
        kind = self._call.events.get(event.name)
        return None if kind is None else self._parse(kind, event.data)

    def _parse(self, kind: type[A], document: Any) -> A:
        try:
            if isinstance(document, str | bytes):
                return kind.model_validate_json(document)
            return kind.model_validate(document)
        except ValidationError as invalid:
            first = next(describe_faults(invalid.errors(include_url=False)))
            raise AnswerError(
                f"the answer is not a {kind.__name__}: {first.text} Is base_url a logsteer server "
                "of this version?",
                request_id=self._request_id,
            ) from invalid


def _describe_trace() -> dict[str, str]:
    """Return the headers by which the server's spans come below the caller's own.

    None where the caller's program has not imported OpenTelemetry, or is in no span.
    """
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import propagate

        propagate.inject(headers)
    return headers


def _refusal(response: httpx.Response, request_id: str) -> APIError:
    document = _problem_document(response.content)
    status = response.status_code
    if not isinstance(document.get("detail"), str):
        # Not this contract's: a proxy, or a server of another kind.
        target = response.headers.get("Location")
        text = " ".join(response.text.split())[:200] or "no body"
        hint = f"it redirects to {target}: set base_url to that server" if target else text
        document["detail"] = f"status {status} from {response.url}: {hint}"
        if status == httpx.codes.INTERNAL_SERVER_ERROR:
            # What Ray Serve's proxy says where the process died that had the request.
            document["retryable"] = True
    return problem_error(
        # The status that was sent decides, whatever a proxy or the document makes of it.
        {**document, "status": status},
        retry_after=_retry_after(response.headers.get("Retry-After"), time.time()),
        request_id=request_id,
    )


def _problem_document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _retry_after(value: str | None, now: float) -> float | None:
    if value is None:
        return None
    try:
        # isdecimal and not float(): that would take "nan" and "inf", which is not a time.
        is_number = value.replace(".", "", 1).isdecimal()
        seconds = float(value) if is_number else parsedate_to_datetime(value).timestamp() - now
    except ValueError:
        return None
    return max(0.0, seconds)


def is_event_stream(response: httpx.Response) -> bool:
    """Return whether the response is read event by event."""
    return response.is_success and _media_type(response) == _EVENT_STREAM


def _media_type(response: httpx.Response) -> str:
    kind: str = response.headers.get("Content-Type", "")
    return kind.partition(";")[0].strip().lower()


def _transport_error(failure: httpx.HTTPError, base_url: str, request_id: str) -> LogsteerError:
    cause = str(failure) or type(failure).__name__
    if isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout):
        return TransportError(
            f"no server answers at {base_url} ({cause}): start one with `logsteer serve MODEL`, or "
            "give base_url or LOGSTEER_BASE_URL the address of one that runs"
        )
    if isinstance(failure, httpx.TimeoutException):
        what = "take the request" if isinstance(failure, httpx.WriteTimeout) else "answer"
        return RequestTimeoutError(
            f"{base_url} did not {what} within the client's timeout ({type(failure).__name__}). "
            "Raise timeout, or send less in one request.",
            request_id=request_id,
        )
    if isinstance(failure, httpx.DecodingError):
        return AnswerError(f"undecodable answer from {base_url}: {cause}", request_id=request_id)
    return TransportError(f"the exchange with {base_url} failed: {cause}", request_id=request_id)


DEFAULT_BASE_URL = "http://127.0.0.1:8000"
UNIX = "unix://"
DEFAULT_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
"""Seconds. Long, as a corpus takes long; short for connecting, so that a wrong address shows."""


_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""After 15 s of silence the peer's machine is asked every 5 s whether it is there, three times."""


class ClientSettings:
    """The settings that both clients share; `model` is the default model of every request.

    LOGSTEER_BASE_URL, _API_KEY and _MODEL are what is not given. `http` are the arguments of
    `httpx.Client` and `httpx.AsyncClient`; `transport` those of httpx's transport, None where
    httpx is to make its own.

    Raises LogsteerError for an invalid base URL, ValueError for a negative `max_retries` or an
    unknown `encoding`.
    """

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        timeout: float | httpx.Timeout | None,
        max_retries: int,
        model: str | None,
        encoding: Encoding,
    ) -> None:
        if max_retries < 0:
            raise ValueError(f"max_retries is {max_retries}; give 0 for no retries")
        if encoding not in ("json", "msgpack"):
            raise ValueError(f"encoding is {encoding!r}; give 'json' or 'msgpack'")
        given = base_url or os.environ.get("LOGSTEER_BASE_URL") or DEFAULT_BASE_URL
        url, uds = _read_address(given)
        headers = {"User-Agent": f"logsteer/{__version__}"}
        if key := api_key or os.environ.get("LOGSTEER_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        if timeout is None:
            timeout = DEFAULT_TIMEOUT
        self.http: dict[str, Any] = {"base_url": url, "headers": headers, "timeout": timeout}
        self.transport = _choose_transport(uds)
        self.model = model or os.environ.get("LOGSTEER_MODEL") or None
        self.base_url = url
        self.encoding = encoding
        self.policy = RetryPolicy(max_retries)


def _read_address(url: str) -> tuple[str, str | None]:
    """Return the base URL, and the Unix domain socket of a `unix://` address."""
    if url.startswith(UNIX):
        if not (uds := url.removeprefix(UNIX)).startswith("/"):
            raise LogsteerError(f"base_url {url} needs a path from the root: {UNIX}/run/…")
        return "http://localhost", uds
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as invalid:
        raise LogsteerError(f"base_url {url!r} is not a URL: {invalid}") from invalid
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise LogsteerError(f"base_url {url!r} needs the form http://host:port or unix:///path")
    return url, None


def _choose_transport(uds: str | None) -> dict[str, Any] | None:
    """Return the arguments of a transport that asks a silent peer whether it is there.

    A server's machine that is gone without a word would be waited for as long as for an answer.
    httpx heeds proxies of the environment only in a transport of its own.
    """
    if uds is not None:
        return {"uds": uds, "socket_options": []}
    if getproxies():
        return None
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # not on every system
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return {"uds": None, "socket_options": options}
