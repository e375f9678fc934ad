"""JSON bodies: read within their bound, and checked against their schema from the bytes."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from logsteer.errors import api_error

BODY_MEMORY = 8
"""Bytes that a parsed body takes for each of its own; measured: 4 for ids, 7 for short strings."""
LARGE_BODY = 2**20
"""Bytes of a body from which on it has to wait for its turn."""
LARGE_BODY_PAUSE = 3
"""Times as long as a large body took to parse before the next one is."""
MAX_BRACKETS = 2**18
"""Opening brackets of a body, its texts' own included: an empty list is 2 bytes, and 56 parsed. All
items and targets that a request may have come to fewer."""
MAX_FAULTS = 1024
"""What is wrong with a body, as far as it is described: of a list the first fault is the only one,
but an object may have unknown fields by the hundred thousand."""


class LimitedRequest(Request):
    """A request whose body is read up to the limit, and parsed as its route's schema."""

    async def body(self) -> bytes:
        """Return the body. Errors: APIError `payload_too_large`, `overloaded`."""
        if not hasattr(self, "_body"):
            limit = self.app.state.settings.max_body_bytes
            chunks, size = [], 0
            async for chunk in self.stream():
                size += len(chunk)
                self.state.memory.cover(min(size, limit) * BODY_MEMORY)
                if size > limit:
                    raise api_error(
                        "payload_too_large",
                        f"The body is larger than {limit} bytes: split the request, send long text "
                        "to /perplexity/stream, or raise max_body_bytes.",
                    )
                chunks.append(chunk)
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        """Return the body as an instance of its route's schema, which FastAPI takes as it is.

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
    """Turns at parsing large bodies, which keeps the event loop busy.

    One body at a time, and a multiple of the time that it took is left to all else.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._began = 0.0

    async def __aenter__(self) -> None:
        """Wait for a turn."""
        await self._turn.acquire()
        self._began = time.monotonic()

    async def __aexit__(self, *_: object) -> None:
        """Have the next turn begin after a pause."""
        pause = LARGE_BODY_PAUSE * (time.monotonic() - self._began)
        asyncio.get_running_loop().call_later(pause, self._turn.release)


def parse_body(body: bytes, kind: type[BaseModel]) -> BaseModel:
    """Parse a body as a schema.

    Errors: RequestValidationError, for what is no JSON, too; APIError `payload_too_large` for more
    brackets, or more faults, than are looked at.
    """
    count = body.count(b"{") + body.count(b"[")
    if count > MAX_BRACKETS:
        detail = (
            f"The body opens {count} brackets, its texts' own included, and at most {MAX_BRACKETS} "
            "are taken: split the request."
        )
        raise api_error("payload_too_large", detail)
    if not body:
        raise _refuse({"type": "missing", "msg": "Field required"})
    if b"NaN" in body or b"Infinity" in body:  # which pydantic takes for numbers
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
