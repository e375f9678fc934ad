"""The ASGI application: routes, and the life of models and stores."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logsteer.schemas import Problem
from logsteer_server import __version__
from logsteer_server.engines.scratch import sweep
from logsteer_server.http.dependencies import BodyTurns
from logsteer_server.http.drain import Drain, DrainGate
from logsteer_server.http.hosts import AllowedHosts, HostCheck
from logsteer_server.http.idempotency import AnswerMemory
from logsteer_server.http.memory import RequestMemory
from logsteer_server.http.problems import add_handlers
from logsteer_server.interventions.namespaces import NamespaceRegistry
from logsteer_server.keys.keyring import KeyRing
from logsteer_server.metrics import Metrics, RequestMetrics
from logsteer_server.models.cache import ResultCache
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.routes import (
    adapters,
    openai,
    operations,
    overrides,
    page,
    perplexity,
    tasks,
    tokens,
    vectors,
)
from logsteer_server.settings import Settings
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.tasks.planning import Capacity
from logsteer_server.tasks.selftest import prove

log = logging.getLogger(__name__)

MAX_REQUEST_ID = 128
MAX_FILE_READERS = 2


def create_app(settings: Settings) -> FastAPI:
    """Create the application for these settings; engines start and end with its lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for parent in {None, settings.scratch_directory}:
            for path in await asyncio.to_thread(sweep, parent):
                log.info("removed %s, which a server that was killed had left", path)
        results = ResultCache.open(settings)
        app.state.metrics.live.read_cache_bytes = lambda: results.num_bytes
        app.state.file_readers = asyncio.Semaphore(MAX_FILE_READERS)
        app.state.large_bodies = BodyTurns()
        threads = StoreThreads(settings.store_threads, settings.max_store_calls)
        app.state.store_threads = threads
        app.state.namespaces = await threads.run(NamespaceRegistry, settings, threads)
        models = ModelRegistry(settings, results, app.state.metrics)
        app.state.models = models
        # Each model is tested before it answers, where the settings ask for that.
        models.start(
            partial(prove, models=models, capacity=app.state.capacity)
            if settings.selftest
            else None
        )
        try:
            yield
        finally:
            await models.close()
            await asyncio.to_thread(results.close)
            app.state.capacity.close()
            threads.close()
            app.state.keys.close()

    app = FastAPI(
        title="logsteer",
        version=__version__,
        description="Exact log-probabilities and perplexities from resident language models.",
        lifespan=lifespan,
        responses={"default": {"model": Problem, "description": "A problem document (RFC 9457)."}},
    )
    app.state.settings = settings
    app.state.capacity = capacity = Capacity(settings)
    app.state.metrics = Metrics()
    app.state.metrics.live.read_pending_bytes = lambda: capacity.memory.pending
    app.state.drain = Drain()
    app.state.answers = AnswerMemory(settings.idempotency_bytes, settings.idempotency_s)
    app.state.keys = keys = KeyRing(settings)
    for module in (tasks, perplexity, vectors, overrides, adapters, tokens, openai):
        app.include_router(module.router)
    app.include_router(operations.router)
    app.include_router(page.router)
    app.add_middleware(RequestMemory, admission=capacity.memory)
    app.add_middleware(DrainGate, drain=app.state.drain)
    app.add_middleware(HostCheck, hosts=AllowedHosts(settings, needs_key=keys.needs_key))
    app.add_middleware(RequestIds)
    app.add_middleware(RequestMetrics, metrics=app.state.metrics)
    add_handlers(app)
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
