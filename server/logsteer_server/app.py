"""The ASGI application: routes, and the life of models and stores."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI

from logsteer.schemas import Problem
from logsteer_server import __version__
from logsteer_server.api.gate import AllowedHosts, Drain, RequestGate
from logsteer_server.api.problems import add_handlers
from logsteer_server.api.routes import (
    captures,
    operations,
    page,
    perplexity,
    tasks,
    tokens,
    uploads,
    vectors,
    vllm,
)
from logsteer_server.api.routing import BodyTurns
from logsteer_server.engines.lifetime import sweep
from logsteer_server.interventions.interventions import NamespaceRegistry
from logsteer_server.keys.keyring import KeyRing
from logsteer_server.models.cache import ResultCache
from logsteer_server.models.changes import ModelChanges
from logsteer_server.models.registry import ModelRegistry, make_handles
from logsteer_server.observation.metrics import Metrics
from logsteer_server.observation.requests import RequestObserver
from logsteer_server.observation.tracing import RequestTracer
from logsteer_server.settings import ConfigurationError, Settings
from logsteer_server.stores.contents import ContentFiles, JobContents
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.threads import FairTurns, StoreThreads
from logsteer_server.stores.upkeep import StoreUpkeep
from logsteer_server.tasks.capture_job import CaptureHost
from logsteer_server.tasks.captures import CaptureJobs
from logsteer_server.tasks.planning import Capacity

log = logging.getLogger(__name__)


def create_app(
    settings: Settings, reread: Callable[[], Settings] | None = None, *, has_engines: bool = True
) -> FastAPI:
    """Create the application for these settings; engines start and end with its lifespan.

    `reread` reads the configuration again for a reload; None: it is the same as now. Without
    engines, models are `loading`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            models = await _open_state(app, stack)
            changes = ModelChanges(models, settings, reread or (lambda: settings))
            app.state.changes = changes
            stack.callback(changes.close)
            if has_engines:
                models.start()
                app.state.captures.start()
            stack.push_async_callback(app.state.captures.close)
            yield

    app = FastAPI(
        title="logsteer",
        version=__version__,
        description="Exact log-probabilities and perplexities from resident language models.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads scripts from another host
        redoc_url=None,
        redirect_slashes=False,  # a redirect's body is empty, and many clients send no second POST
        responses={"default": {"model": Problem, "description": "A problem document (RFC 9457)."}},
    )
    app.state.settings = settings
    app.state.capacity = Capacity(settings)
    app.state.tracer = open_tracer() if settings.tracing else None
    app.state.metrics = Metrics()
    app.state.drain = Drain()
    app.state.keys = keys = KeyRing(settings)
    for router in (
        *(tasks.router, perplexity.router, vectors.router, tokens.router),
        *(uploads.overrides, uploads.adapters, uploads.saes, uploads.variants, captures.router),
        *(operations.openai_router, vllm.router, operations.router, page.router),
    ):
        app.include_router(router)
    _add_layers(app, needs_key=keys.needs_key)
    add_handlers(app)
    return app


async def _open_state(app: FastAPI, stack: AsyncExitStack) -> ModelRegistry:
    """Open what requests use, and have the stack close it; return the models, not yet started."""
    state, settings = app.state, app.state.settings
    if state.tracer is not None:
        stack.push_async_callback(asyncio.to_thread, state.tracer.close)
    stack.push_async_callback(state.keys.close)
    for path in await asyncio.to_thread(sweep):
        log.info("removed %s, which a server that was killed had left", path)
    state.store_turns = FairTurns()
    state.large_bodies = BodyTurns()
    state.store_threads = threads = StoreThreads()
    stack.callback(threads.close)
    state.objects = objects = Objects.open(settings)
    state.content_files = ContentFiles(objects, settings.store_cache_bytes)
    stack.callback(state.content_files.close)
    state.namespaces = NamespaceRegistry(settings, objects, state.content_files)
    state.store_upkeep = StoreUpkeep(settings, objects, threads)
    state.store_upkeep.start()
    stack.callback(state.store_upkeep.close)
    stack.callback(state.capacity.close)
    results = ResultCache(settings.cache_bytes)
    stack.push_async_callback(asyncio.to_thread, results.close)
    metrics, memory = state.metrics, state.capacity.memory
    metrics.read_disk = lambda: state.store_upkeep.reading
    metrics.pending_bytes.set_function(lambda: memory.pending)
    metrics.pending_bytes_limit.set(memory.limit)
    metrics.cache_bytes.set_function(lambda: results.num_bytes)
    metrics.cache_bytes_limit.set(settings.cache_bytes)
    contents = JobContents(state.content_files, StoreThreads())
    make_handle = make_handles(settings, contents)
    state.models = models = ModelRegistry(settings, results, state.metrics, make_handle)
    stack.push_async_callback(models.close)
    host = CaptureHost(
        settings, objects, threads, models, state.capacity, state.namespaces, state.keys
    )
    state.captures = CaptureJobs(host)
    return models


def _add_layers(app: FastAPI, *, needs_key: bool) -> None:
    """Put what every request passes through around the application, the innermost first."""
    settings: Settings = app.state.settings
    app.add_middleware(
        RequestGate,
        hosts=AllowedHosts(settings, needs_key=needs_key),
        drain=app.state.drain,
        admission=app.state.capacity.memory,
    )
    app.add_middleware(RequestObserver, metrics=app.state.metrics, tracer=app.state.tracer)
    if app.state.tracer is not None:
        app.add_middleware(app.state.tracer.instrument)


def open_tracer() -> RequestTracer:
    """Return the tracer of requests. Errors: ConfigurationError if its packages are missing."""
    try:
        return RequestTracer.open()
    except ImportError as error:
        detail = f"tracing needs what is missing ({error.name}): install logsteer-server[otel]"
        raise ConfigurationError(detail) from error
