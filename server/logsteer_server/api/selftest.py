"""The self-test of a resident model: the client's self-test, run against this application.

Its requests take the same path as any caller's, without a network. They have the routing and token
limits of the caller who requested the self-test, and all scopes.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from logsteer._endpoints import ENDPOINTS
from logsteer.async_client import AsyncClient
from logsteer.schemas import SCOPES, SelftestRequest
from logsteer.selftest import run_selftest
from logsteer_server.api.routing import TESTER
from logsteer_server.keys.caller import Requester
from logsteer_server.tasks.run import Event

EVENTS = {kind: name for name, kind in ENDPOINTS["selftest"].events.items()}


def open_client(app: ASGIApp, caller: Requester) -> AsyncClient:
    """Return a client of an application in this process, authenticated for self-tests."""
    tester = replace(caller, scopes=frozenset(SCOPES))

    async def send_on(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {TESTER: tester}}, receive, send)

    transport = httpx.ASGITransport(send_on, raise_app_exceptions=False)
    return AsyncClient("http://localhost", max_retries=0, transport=transport)


async def stream_selftest(
    app: ASGIApp, caller: Requester, model_id: str, body: SelftestRequest
) -> AsyncGenerator[Event, None]:
    """Yield the events of a self-test. Errors: those of its requests."""
    options = body.model_dump(exclude={"stream"})
    async with (
        open_client(app, caller) as client,
        aclosing(run_selftest(client, model_id, **options)) as events,
    ):
        async for event in events:
            yield Event(EVENTS[type(event)], event.model_dump())
