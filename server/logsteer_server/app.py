"""The ASGI application: routes, errors, and the life of the engines."""

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logsteer.errors import APIError, api_error
from logsteer.schemas import Problem
from logsteer_server import __version__
from logsteer_server.http.dependencies import check_key
from logsteer_server.http.encoding import JSON, encode_json
from logsteer_server.metrics import Metrics, RequestMetrics
from logsteer_server.models.cache import ResultCache
from logsteer_server.models.resident import Residents
from logsteer_server.routes import (
    adapters,
    generation,
    gradient,
    logprob,
    openai,
    operations,
    overrides,
    perplexity,
    sweep,
    tokens,
    vectors,
)
from logsteer_server.settings import Settings
from logsteer_server.stores.store import ADAPTERS, OVERRIDES, VECTORS, Store
from logsteer_server.stores.vectors import VectorStore

log = logging.getLogger(__name__)

PROBLEM = "application/problem+json"
CLIENT_CLOSED_REQUEST = 499
MAX_SHOWN_ERRORS = 5
MAX_REQUEST_ID = 128
MAX_FILE_READERS = 2


def create_app(settings: Settings) -> FastAPI:
    """The application for these settings; engines start and end with its lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        results = ResultCache.open(settings)
        app.state.metrics.live.read_cache_bytes = lambda: results.num_bytes
        app.state.file_readers = asyncio.Semaphore(MAX_FILE_READERS)
        root = settings.store_path
        app.state.vectors = VectorStore(
            await asyncio.to_thread(Store, VECTORS, root, settings.vector_store_bytes)
        )
        app.state.overrides = await asyncio.to_thread(
            Store, OVERRIDES, root, settings.override_store_bytes
        )
        app.state.adapters = await asyncio.to_thread(
            Store, ADAPTERS, root, settings.adapter_store_bytes
        )
        residents = Residents(settings, results, app.state.metrics)
        app.state.residents = residents
        residents.start()
        try:
            yield
        finally:
            await residents.close()
            await asyncio.to_thread(results.close)

    app = FastAPI(
        title="logsteer",
        version=__version__,
        description="Exact log-probabilities and perplexities from resident language models.",
        lifespan=lifespan,
        responses={"default": {"model": Problem, "description": "A problem document (RFC 9457)."}},
    )
    app.state.settings = settings
    app.state.metrics = Metrics()
    for module in (
        logprob, perplexity, generation, sweep, gradient, vectors, overrides, adapters, tokens,
        openai,
    ):  # fmt: skip
        app.include_router(module.router, dependencies=[Depends(check_key)])
    app.include_router(operations.router)
    app.add_middleware(RequestIds)
    app.add_middleware(RequestMetrics, metrics=app.state.metrics)
    app.add_exception_handler(APIError, _answer_api_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_disconnect)
    app.add_exception_handler(Exception, _answer_crash)
    return app


class RequestIds:
    """ASGI middleware: every request has an id, the caller's own where it sent one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the id into the request's state and into the answer's X-Request-Id."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        is_usable = 0 < len(sent) <= MAX_REQUEST_ID and sent.isascii() and sent.isprintable()
        request_id = sent if is_usable else uuid.uuid4().hex
        scope.setdefault("state", {})["id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _answer_problem(request: Request, error: APIError) -> Response:
    request_id = request.state.id
    headers = {
        "X-Request-Id": request_id
    }  # set here too: a crash is answered outside of RequestIds
    if error.retry_after is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if request.url.path.startswith("/v1/"):
        body = encode_json(openai.describe_error(error))
        return Response(body, error.status, headers, JSON)
    body = encode_json(error.problem(request_id).model_dump())
    return Response(body, error.status, headers, PROBLEM)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return _answer_problem(request, error)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """Every reason why the request does not fit its schema, in one line."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    reasons = [_explain(entry) for entry in found[:MAX_SHOWN_ERRORS]]
    if len(found) > MAX_SHOWN_ERRORS:
        reasons.append(f"and {len(found) - MAX_SHOWN_ERRORS} more")
    content_type = request.headers.get("content-type", "")
    if request.method == "POST" and "json" not in content_type and "stream" not in request.url.path:
        reasons = [
            f"The body was sent as {content_type or 'no content type'}; "
            "send JSON with the header Content-Type: application/json."
        ]
    param = _name_field(found[0]["loc"]) if found else None
    return _answer_problem(request, api_error("invalid_request", " ".join(reasons), param=param))


def _name_field(location: tuple[int | str, ...]) -> str | None:
    """`items[0].targets` of ("body", "items", 0, "targets")."""
    name = ""
    for part in location[1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    return name.removeprefix(".") or None


def _explain(entry: dict[str, object]) -> str:
    location = entry["loc"]
    assert isinstance(location, tuple)
    reason = str(entry["msg"]).removeprefix("Value error, ")
    if entry["type"] == "json_invalid":
        context = entry.get("ctx")
        cause = context.get("error") if isinstance(context, dict) else None
        return f"The body is not valid JSON: {cause or reason}."
    if entry["type"] == "extra_forbidden":
        return f"{_name_field(location)}: there is no such field; remove it."
    field = _name_field(location)
    return f"{field}: {reason}." if field else f"{reason}."


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, APIError):  # FastAPI wraps what reading the body raises
        return _answer_problem(request, error.__cause__)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow") or (error.headers or {}).get(
            "allow", "another"
        )
        detail = f"{request.url.path} does not take {request.method}; send {allowed}."
        return _answer_problem(request, api_error("method_not_allowed", detail))
    if error.status_code == 404:
        detail = f"There is no {request.url.path} here; /docs lists every path."
        return _answer_problem(request, api_error("not_found", detail))
    return _answer_problem(
        request, api_error("invalid_request", str(error.detail), status=error.status_code)
    )


async def _answer_disconnect(_request: Request, _error: Exception) -> Response:
    """Nobody reads this; it ends the request without a stack trace in the log."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _answer_crash(request: Request, error: Exception) -> Response:
    request_id = request.state.id
    log.error("request %s failed", request_id, exc_info=error)
    detail = f"A fault of the server, not of the request; its log has it under {request_id}."
    return _answer_problem(request, api_error("internal", detail))
