"""The self-test of a resident model: the client's self-test, run against this application.

Its requests take the same path as any caller's, without a network. They have the routing and token
limits of the caller who requested the self-test, and all scopes.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from logsteer._endpoints import ENDPOINTS
from logsteer.async_client import AsyncClient
from logsteer.errors import APIError
from logsteer.schemas import SCOPES, SelftestAnswer, SelftestRequest
from logsteer.selftest import run_selftest
from logsteer_server.api.routing import TESTER
from logsteer_server.keys.caller import Requester
from logsteer_server.models.model import ResidentModel
from logsteer_server.tasks.run import Event

log = logging.getLogger(__name__)

EVENTS = {kind: name for name, kind in ENDPOINTS["selftest"].events.items()}


def open_client(app: ASGIApp, caller: Requester) -> AsyncClient:
    """Return a client of an application in this process, authenticated for self-tests."""
    tester = replace(caller, scopes=frozenset(SCOPES), passes_gate=True)

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


async def prove(app: ASGIApp, model: ResidentModel) -> None:
    """Test a model whose engine is ready, and open its gate if it passes.

    If its engine restarts meanwhile, test it again.
    """
    while True:
        try:
            events = stream_selftest(app, Requester(), model.id, SelftestRequest())
            document = [event async for event in events][-1].document
        except APIError as error:
            if not error.retryable:
                _block(model, f"its self-test could not be run: {error.detail}")
                return
            log.warning("the self-test of model %s begins again: %s", model.id, error.detail)
            await asyncio.sleep(error.retry_after or 1)
            await model.handle.ready.wait()
            continue
        except Exception as error:  # a fault of the server; no caller awaits this task
            log.exception("the self-test of model %s broke", model.id)
            _block(model, f"its self-test broke: {type(error).__name__}: {error}")
            return
        checks = SelftestAnswer.model_validate(document).checks
        failed = [f"{one.name} ({one.reason})" for one in checks if one.verdict == "failed"]
        if failed:
            _block(model, f"it failed its self-test: {'; '.join(failed)}")
        else:
            model.gate = None
            log.info("model %s passed its self-test", model.id)
        return


def _block(model: ResidentModel, reason: str) -> None:
    log.error("model %s: %s", model.id, reason)
    model.gate = ("failed", reason)
