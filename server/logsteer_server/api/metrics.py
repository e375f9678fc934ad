"""`/metrics` on the service's port, or as an application of its own on another."""

import hmac

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp

from logsteer.errors import APIError, api_error
from logsteer_server.api.gate import AllowedHosts
from logsteer_server.observation.metrics import METRICS_TYPE, Metrics
from logsteer_server.settings import Settings
from logsteer_server.stores.upkeep import StoreUpkeep

UNAUTHORIZED = "Metrics ask for a key: send the header Authorization: Bearer <metrics_key>."


async def render_metrics(request: Request) -> bytes:
    """Return all metrics as text. Errors: APIError `unauthorized` without the key of the settings.

    What lies on disk is as it was when the disk last answered.
    """
    state = request.app.state
    settings: Settings = state.settings
    check_key(settings.metrics_key, request.headers)
    upkeep: StoreUpkeep = state.store_upkeep
    metrics: Metrics = state.metrics
    await upkeep.refresh()
    return metrics.render()


def check_key(key: str | None, headers: Headers) -> None:
    """Refuse a request without the key. Errors: APIError `unauthorized`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else ""
    if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
        raise api_error("unauthorized", UNAUTHORIZED)


def make_metrics_app(service: FastAPI) -> ASGIApp:
    """Return an application that answers `/metrics` of a service, and nothing else."""
    settings: Settings = service.state.settings
    hosts = AllowedHosts(settings, needs_key=settings.metrics_key is not None)

    async def answer(request: Request) -> Response:
        try:
            if (refusal := hosts.check(request.method, request.headers)) is not None:
                raise refusal
            return Response(await render_metrics(request), media_type=METRICS_TYPE)
        except APIError as error:
            headers = {"WWW-Authenticate": "Bearer"}
            return PlainTextResponse(error.detail, error.status, headers)

    app = Starlette(routes=[Route("/metrics", answer)])
    app.state = service.state
    return app
