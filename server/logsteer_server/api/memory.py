"""The memory that each request is expected to take, from its first byte to its answer's last."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logsteer_server.models.admission import Admission, Reservation

SENT_AT_ONCE = 2**18
"""Bytes of an answer that are handed on together: the next ones once the caller has read most."""


class RequestMemory:
    """ASGI middleware: give each request a reservation of memory, `memory` of its state.

    It is released once the answer has been read, and so answers are sent in pieces.
    """

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= SENT_AT_ONCE:
                await send(message)
                return
            for start in range(0, len(body), SENT_AT_ONCE):
                more = message.get("more_body", False) or start + SENT_AT_ONCE < len(body)
                piece = body[start : start + SENT_AT_ONCE]
                await send({"type": message["type"], "body": piece, "more_body": more})

        with Reservation(self._admission) as memory:
            scope.setdefault("state", {})["memory"] = memory
            await self._app(scope, receive, send_in_pieces)
