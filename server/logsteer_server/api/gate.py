"""The entry of every request: it gets an id and a memory reservation, or is refused.

A page of another site can make a browser send requests to a server on the same machine, and read
the answers if the page's host name is made to resolve to that machine (DNS rebinding). So requests
with a foreign Host are refused, as are requests that compute or change something with a foreign
Origin.
"""

import asyncio
import ipaddress
import socket
import uuid

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logsteer.errors import APIError, api_error
from logsteer_server.api.problems import answer_problem
from logsteer_server.models.admission import Admission, Reservation
from logsteer_server.observation.logs import CURRENT_REQUEST
from logsteer_server.runtime.handle import refuse_closing
from logsteer_server.settings import Settings

MAX_REQUEST_ID = 128
SENT_AT_ONCE = 2**18
"""Bytes of an answer sent at once; the next ones follow when the caller has read most of them."""
ANSWERED_TO_THE_END = frozenset({"/healthz", "/readyz", "/startupz", "/metrics"})

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods without effects; a page of another origin cannot read their answers."""
ANY = "*"


class AllowedHosts:
    """The names and origins of a server.

    IP addresses are always allowed: DNS cannot redirect them. If a key is needed, or on a Unix
    domain socket, pages have no access, and all names are allowed unless `allowed_hosts` lists
    some.
    """

    def __init__(self, settings: Settings, *, needs_key: bool) -> None:
        given = settings.allowed_hosts
        is_out_of_reach = needs_key or settings.uds is not None
        self._allows_any = is_out_of_reach if given is None else ANY in given
        own = {"localhost", settings.host, socket.gethostname(), *(given or ())}
        self._names = {name.lower().rstrip(".") for name in own}
        self._origins = {origin.lower().rstrip("/") for origin in settings.allowed_origins}

    def check(self, method: str, headers: Headers) -> APIError | None:
        """Return the error for a refused request, or None."""
        host = headers.get("host", "").strip().lower()
        # `[::1]:8000` is ::1, `name:8000` is name.
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        known = name.rstrip(".")
        is_own = known in self._names or known.endswith(".localhost") or _is_address(known)
        if not (self._allows_any or not host or is_own):
            detail = f"This server is not called {name!r}: add the name to allowed_hosts."
            return api_error("forbidden", detail)
        origin = headers.get("origin", "").strip().lower().rstrip("/")
        if origin and method not in SAFE_METHODS and not self._is_own_origin(origin, host):
            detail = (
                f"A page of {origin} sent this to {host or 'this server'}: add the origin to "
                "allowed_origins."
            )
            return api_error("forbidden", detail)
        return None

    def _is_own_origin(self, origin: str, host: str) -> bool:
        return origin in self._origins or origin in (f"http://{host}", f"https://{host}")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Drain:
    """The progress of the server's shutdown, and the number of running requests.

    begun   `/readyz` fails; new requests get a 503, and their connections are closed
    ended   the engines' handles answer all waiting callers; uvicorn cancels all others
    """

    def __init__(self) -> None:
        self.num_running = 0
        self.has_begun = False
        self.has_ended = False


class RequestGate:
    """ASGI middleware for a request's id, its host and origin, the server's shutdown, and its
    memory.

    The id is the caller's own if it sent one. During shutdown, new requests are refused. A
    request's `memory` reservation is released when the caller has read the answer, so answers are
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
        """Pass the request to the application, or answer with a problem."""
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
                await self._app(scope, receive, send_answer)
        except asyncio.CancelledError:
            if is_probe or has_started or not drain.has_ended:
                raise
            await refuse_and_close()
        finally:
            drain.num_running -= not is_probe
