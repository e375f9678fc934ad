"""A caller's request at the ingress, as it is passed on, and what is answered to it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any
from urllib.parse import parse_qs

import httpcore
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from logsteer.errors import APIError
from logsteer_server.api.encoding import JSON, encode_json
from logsteer_server.api.problems import OPENAI_PATHS, answer_problem
from logsteer_server.api.respond import encode_error

CONNECT_S = 5.0
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
    | {b"proxy-connection", b"x-request-id"}
)
"""Headers of one connection, and those that the ingress sets itself."""
OWN_OF_ANSWERS = HOP_BY_HOP | {b"date", b"server"}
EVENTS = b"text/event-stream"


class HangUpError(Exception):
    """The caller is gone in the middle of its request."""


class Exchange:
    """A caller's request, and what has been answered to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.id: str = scope["state"]["id"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.has_begun = False
        self._receive = receive
        self._send = send
        self._is_read = asyncio.Event()
        self._streams_events = False
        self._has_body = bool({b"content-length", b"transfer-encoding"} & self.headers.keys())
        if not self._has_body:
            self._is_read.set()

    def get_query(self, name: str) -> str | None:
        """Return a parameter of the query; None where it is not there."""
        return next(
            iter(parse_qs(self.scope["query_string"].decode("latin-1")).get(name, ())), None
        )

    async def read(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Errors: HangUpError."""
        more = self._has_body
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise HangUpError
            yield message.get("body", b"")
            more = message.get("more_body", False)
        self._is_read.set()

    async def until_hang_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, and end it where the caller goes first."""
        tasks = [asyncio.ensure_future(one) for one in (work, self._wait_for_hang_up())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_hang_up(self) -> None:
        await self._is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def copy(self, address: str, body: bytes | None, path: str = "") -> httpcore.Request:
        """Return the request as a replica gets it; without `body` the caller's is read on the way.

        With `path` it is another one, a GET.
        """
        headers = [pair for pair in self.scope["headers"] if pair[0] not in HOP_BY_HOP]
        headers.append((b"x-request-id", self.id.encode()))
        content: bytes | AsyncIterator[bytes] = b"" if path else self.read()
        if body is not None or path or not self._has_body:
            content = body or b""
            headers = [pair for pair in headers if pair[0] != b"content-length"]
            headers.append((b"content-length", b"%d" % len(content)))
        elif b"content-length" not in self.headers:
            headers.append((b"transfer-encoding", b"chunked"))
        target = self.scope.get("raw_path", self.path.encode())
        if query := self.scope["query_string"]:
            target += b"?" + query
        host, _, port = address.rpartition(":")
        url = httpcore.URL(
            scheme=b"http", host=host, port=int(port), target=path.encode() or target
        )
        method = "GET" if path else self.method
        extensions = {"timeout": {"connect": CONNECT_S}}
        return httpcore.Request(
            method, url, headers=headers, content=content, extensions=extensions
        )

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Begin the answer with that of a replica."""
        kept = [(name.lower(), value) for name, value in headers]
        kept = [pair for pair in kept if pair[0] not in OWN_OF_ANSWERS]
        self._streams_events = dict(kept).get(b"content-type", b"").startswith(EVENTS)
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def send_body(self, body: bytes, *, more: bool = True) -> None:
        """Send a piece of the answer."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def reply(self, document: Any, status: int = 200) -> None:
        """Answer with a document of the ingress' own."""
        response = Response(encode_json(document), status, media_type=JSON)
        await response(self.scope, self._receive, self._send)

    async def fail(self, error: APIError) -> None:
        """Answer with a problem: as the last event of a stream; other answers are cut where they
        have begun.
        """
        if not self.has_begun:
            await answer_problem(Request(self.scope), error)(self.scope, self._receive, self._send)
        elif self._streams_events:
            event = encode_error(error, self.id, openai=self.path.startswith(OPENAI_PATHS))
            # What was cut may be the middle of an event, which an empty line ends.
            await self.send_body(b"\n\n" + event, more=False)
