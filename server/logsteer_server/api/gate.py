"""What every request passes through: it gets an id and room in memory, or is refused at once."""

import asyncio
import uuid

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logsteer.errors import APIError
from logsteer_server.api.drain import Drain
from logsteer_server.api.hosts import AllowedHosts
from logsteer_server.api.problems import answer_problem
from logsteer_server.models.admission import Admission, Reservation
from logsteer_server.observation.logs import CURRENT_REQUEST
from logsteer_server.runtime.handle import refuse_closing

MAX_REQUEST_ID = 128
SENT_AT_ONCE = 2**18
"""Bytes of an answer that are handed on together: the next ones once the caller has read most."""
ANSWERED_TO_THE_END = frozenset({"/healthz", "/readyz", "/startupz", "/metrics"})


class RequestGate:
    """ASGI middleware for a request's id, its host and origin, the server's end, and its memory.

    The id is the caller's own where it sent one. Once the server's end has begun, new requests are
    refused. `memory` of a request's state is released once the answer has been read; so answers are
    sent in pieces.
    """

    def __init__(
        self, app: ASGIApp, hosts: AllowedHosts, drain: Drain, admission: Admission
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._drain = drain
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does, or with a problem."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent = headers.get("x-request-id", "")
        is_usable = 0 < len(sent) <= MAX_REQUEST_ID and sent.isascii() and sent.isprintable()
        request_id = sent if is_usable else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["id"] = request_id
        CURRENT_REQUEST.set(request_id)
        has_started = False

        async def send_answer(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            body = message.get("body", b"")
            if len(body) <= SENT_AT_ONCE:
                await send(message)
                return
            for start in range(0, len(body), SENT_AT_ONCE):
                more = message.get("more_body", False) or start + SENT_AT_ONCE < len(body)
                piece = body[start : start + SENT_AT_ONCE]
                await send({"type": message["type"], "body": piece, "more_body": more})

        async def refuse(error: APIError) -> None:
            await answer_problem(Request(scope), error)(scope, receive, send_answer)

        async def refuse_and_close() -> None:
            response = answer_problem(Request(scope), refuse_closing())
            response.headers["Connection"] = "close"
            await response(scope, receive, send_answer)

        if (refusal := self._hosts.check(scope["method"], headers)) is not None:
            await refuse(refusal)
            return
        drain = self._drain
        is_probe = scope["path"] in ANSWERED_TO_THE_END
        if drain.has_begun and not is_probe:
            await refuse_and_close()
            return
        drain.num_running += not is_probe
        try:
            with Reservation(self._admission) as memory:
                state["memory"] = memory
                heard = receive if is_probe else drain.limit(receive)
                await self._app(scope, heard, send_answer)
        except asyncio.CancelledError:
            if is_probe or has_started or not drain.has_ended:
                raise
            await refuse_and_close()  # what heard of no end by itself
        finally:
            drain.num_running -= not is_probe
