"""Who may call an endpoint: the key is looked at before anything of the request is read."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast, get_args

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from logsteer._endpoints import ENDPOINTS
from logsteer.errors import api_error
from logsteer.schemas import KeyScope
from logsteer_server.api.bodies import LimitedRequest
from logsteer_server.contract.jobs import Priority
from logsteer_server.keys.keyring import KeyRing
from logsteer_server.observation.requests import find_record

SCOPE_OF: Mapping[tuple[str, str], KeyScope | None] = {
    (endpoint.method, endpoint.path): endpoint.scope for endpoint in ENDPOINTS.values()
}
"""Method and path of every endpoint -> what a key needs for it; None: nothing, not even a key."""


class StoredNameConvertor(Convertor[str]):
    """A name in a path, or `shared/NAME`: never what else stands behind a slash."""

    regex = "shared/[^/]+|(?!shared/)[^/]+"

    def convert(self, value: str) -> str:
        """Return the name as it is."""
        return value

    def to_string(self, value: str) -> str:
        """Return the name as it is."""
        return value


register_url_convertor("stored", StoredNameConvertor())


class KeyedRoute(APIRoute):
    """A route that lets a caller in, and counts its request, before it reads the request.

    `request.state.caller` is who calls. The endpoint has to stand in `ENDPOINTS`, with its scope.
    Its JSON body, if any, is read by a `LimitedRequest`.
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
        keys: KeyRing = scope["app"].state.keys
        record = find_record(scope)
        record.scope = self._needed
        headers = Headers(scope=scope)
        caller = keys.identify(
            headers.get("authorization", ""), _read_priority(headers), scope["state"].get("id", "")
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
        """Answer a request whose caller may send it, as FastAPI does."""
        await super().handle(scope, receive, send)


class TaskRoute(KeyedRoute):
    """A route whose endpoint takes its body and its request, and depends on nothing else.

    What FastAPI does for such a request beyond that takes longer than a short one's own work.
    """

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose caller may send it."""
        if scope["method"] != self._method:  # which FastAPI refuses
            await super().answer(scope, receive, send)
            return
        request = LimitedRequest(scope, receive)
        if "json" not in request.headers.get("content-type", ""):
            raise RequestValidationError([{"type": "model_type", "loc": ("body",), "msg": ""}])
        response: Response = await self.endpoint(await request.json(), request)
        await response(scope, receive, send)


def _read_priority(headers: Headers) -> Priority:
    """Return the priority that a request asks for. Errors: APIError `invalid_request`."""
    given = headers.get("x-priority")
    if given is None:
        return "interactive"
    if (priority := given.strip().lower()) not in get_args(Priority):
        detail = f"X-Priority is {given!r}; send {' or '.join(get_args(Priority))}."
        raise api_error("invalid_request", detail)
    return cast(Priority, priority)
