"""Routes: check that the caller may use an endpoint before its request is read; then read the JSON
body, up to its limit, and validate the bytes against the schema.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast, get_args

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from logsteer._endpoints import ENDPOINTS
from logsteer.errors import api_error
from logsteer.schemas import KeyScope
from logsteer_server.contract.jobs import Priority
from logsteer_server.keys.keyring import KeyRing
from logsteer_server.observation.requests import find_record

BODY_MEMORY = 8
"""Memory of a parsed body as a multiple of its bytes; measured: 4 for ids, 7 for short strings."""
LARGE_BODY = 2**20
"""Bytes from which a body waits for its turn to be parsed."""
LARGE_BODY_PAUSE = 3
"""Pause after parsing a large body, as a multiple of the time that it took."""
MAX_BRACKETS = 2**18
"""Most opening brackets of a body, including those in texts: an empty list has 2 bytes, and takes
56 parsed. A request with the most items and targets has fewer."""
MAX_FAULTS = 1024
"""Most faults described of a body: a list reports only its first fault, but an object may have
hundreds of thousands of unknown fields."""

SCOPE_OF: Mapping[tuple[str, str], KeyScope | None] = {
    (endpoint.method, endpoint.path): endpoint.scope for endpoint in ENDPOINTS.values()
}
"""Method and path of every endpoint -> the scope that a key needs; None: no key is needed."""


TESTER = "selftest_caller"
"""Attribute of a request's state with the caller of a self-test, already authenticated."""


class LimitedRequest(Request):
    """A request whose body is read up to a limit, and parsed with its route's schema."""

    memory_per_byte = BODY_MEMORY

    async def body(self, setting: str = "max_body_bytes") -> bytes:
        """Return the body, which a setting bounds.

        Errors: APIError `payload_too_large`, `overloaded`.
        """
        if not hasattr(self, "_body"):
            limit = getattr(self.app.state.settings, setting)
            chunks, size = [], 0
            async for chunk in self.stream():
                size += len(chunk)
                self.state.memory.cover(min(size, limit) * self.memory_per_byte)
                if size > limit:
                    raise api_error(
                        "payload_too_large",
                        f"The body is larger than {limit} bytes: split the request, send long text "
                        f"to /perplexity/stream, or raise {setting}.",
                    )
                chunks.append(chunk)
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        """Return the body as an instance of its route's schema, which FastAPI accepts unchanged.

        Errors: as `parse_body`.
        """
        if not hasattr(self, "_json"):
            body, kind = await self.body(), self.scope["route"].body_type
            if len(body) < LARGE_BODY:
                self._json = parse_body(body, kind)
            else:
                async with self.app.state.large_bodies:
                    self._json = parse_body(body, kind)
        return self._json


class BodyTurns:
    """Turns for parsing large bodies, which blocks the event loop.

    One body is parsed at a time; a pause of LARGE_BODY_PAUSE times its duration follows.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._began = 0.0

    async def __aenter__(self) -> None:
        """Wait for a turn."""
        await self._turn.acquire()
        self._began = time.monotonic()

    async def __aexit__(self, *_: object) -> None:
        """Start the next turn after a pause."""
        pause = LARGE_BODY_PAUSE * (time.monotonic() - self._began)
        asyncio.get_running_loop().call_later(pause, self._turn.release)


def parse_body(body: bytes, kind: type[BaseModel]) -> BaseModel:
    """Parse and validate a body by a schema.

    Errors: RequestValidationError, also for invalid JSON; APIError `payload_too_large` for more
    brackets or faults than allowed.
    """
    count = body.count(b"{") + body.count(b"[")
    if count > MAX_BRACKETS:
        detail = (
            f"The body opens {count} brackets, its texts' own included, and at most {MAX_BRACKETS} "
            "are allowed: split the request."
        )
        raise api_error("payload_too_large", detail)
    if not body:
        raise _refuse({"type": "missing", "msg": "Field required"})
    if b"NaN" in body or b"Infinity" in body:  # which pydantic accepts as numbers
        try:
            orjson.loads(body)
        except orjson.JSONDecodeError as error:
            fault = {"type": "json_invalid", "msg": "invalid JSON", "ctx": {"error": str(error)}}
            raise _refuse(fault) from None
    try:
        return kind.__pydantic_validator__.validate_json(body)  # type: ignore[no-any-return]
    except ValidationError as error:
        if error.error_count() > MAX_FAULTS:
            detail = f"The body has {error.error_count()} faults, such as fields that are unknown."
            raise api_error("payload_too_large", detail) from None
        faults = error.errors(include_url=False, include_input=False)
        raise _refuse(*faults) from None


def _refuse(*faults: Mapping[str, Any]) -> RequestValidationError:
    """Return the error that FastAPI raises for these faults of a body."""
    located = [{**fault, "loc": ("body", *fault.get("loc", ()))} for fault in faults]
    return RequestValidationError(located)


class StoredNameConvertor(Convertor[str]):
    """A name in a path: NAME or `shared/NAME`, without other slashes."""

    regex = "shared/[^/]+|(?!shared/)[^/]+"

    def convert(self, value: str) -> str:
        """Return the name as it is."""
        return value

    def to_string(self, value: str) -> str:
        """Return the name as it is."""
        return value


register_url_convertor("stored", StoredNameConvertor())


class KeyedRoute(APIRoute):
    """A route that authenticates the caller, and counts the request, before reading it.

    `request.state.caller` is the caller. The endpoint must be in `ENDPOINTS`, with its scope. A
    `LimitedRequest` reads its JSON body, if any.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (self._method,) = self.methods
        self._needed = SCOPE_OF[self._method, self.path_format]
        self.body_type = self.body_field and self.body_field.field_info.annotation

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, given a `LimitedRequest`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(LimitedRequest(request.scope, request.receive))

        return handle

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Errors: APIError `unauthorized`, `forbidden`, `rate_limited`."""
        if self._needed is None:
            await super().handle(scope, receive, send)
            return
        if TESTER in scope["state"]:
            caller = scope["state"]["caller"] = scope["state"][TESTER]
            find_record(scope).key = caller.namespace or ""
            await self.answer(scope, receive, send)
            return
        keys: KeyRing = scope["app"].state.keys
        record = find_record(scope)
        record.scope = self._needed
        headers = Headers(scope=scope)
        asked = headers.get("x-priority")
        caller = keys.identify(
            headers.get("authorization", ""),
            "interactive" if asked is None else _read_priority(asked),
            scope["state"].get("id", ""),
        )
        record.key = caller.namespace or ""
        caller.require(self._needed)
        scope["state"]["caller"] = caller
        await caller.allowance.begin()
        try:
            await self.answer(scope, receive, send)
        finally:
            caller.allowance.end()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an authorized request, as FastAPI does."""
        await super().handle(scope, receive, send)


def _read_priority(given: str) -> Priority:
    """Return the priority that a header names. Errors: APIError `invalid_request`."""
    if (priority := given.strip().lower()) not in get_args(Priority):
        detail = f"X-Priority is {given!r}; send {' or '.join(get_args(Priority))}."
        raise api_error("invalid_request", detail)
    return cast(Priority, priority)
