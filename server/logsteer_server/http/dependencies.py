"""What routes depend on: the JSON body within its limit, models, the caller's stores."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request, Response

from logsteer.errors import APIError, api_error
from logsteer.schemas import AdapterCard, OverrideCard, VectorCard
from logsteer_server.http.access import KeyedRoute
from logsteer_server.http.idempotency import AnswerMemory
from logsteer_server.interventions.interventions import Stores
from logsteer_server.interventions.namespaces import NamespaceRegistry
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.stores.namespace import Namespace
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.stores.vectors import VectorStore


class LimitedRequest(Request):
    """A request whose body is read up to the limit, and parsed by orjson."""

    async def body(self) -> bytes:
        """Return the body. Errors: APIError `payload_too_large`."""
        if not hasattr(self, "_body"):
            limit = self.app.state.settings.max_body_bytes
            chunks, size = [], 0
            async for chunk in self.stream():
                size += len(chunk)
                if size > limit:
                    raise api_error(
                        "payload_too_large",
                        f"The body is larger than {limit} bytes: split the request, send long text "
                        "to /perplexity/stream, or raise max_body_bytes.",
                    )
                chunks.append(chunk)
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        """Parse the body. Errors: json.JSONDecodeError, for broken UTF-8 and surrogates too."""
        if not hasattr(self, "_json"):
            try:
                self._json = orjson.loads(await self.body())
            except orjson.JSONDecodeError as error:
                raise json.JSONDecodeError(error.msg, error.doc, error.pos) from error
        return self._json


class LimitedRoute(KeyedRoute):
    """A route that reads its request through `LimitedRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, given a `LimitedRequest`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(LimitedRequest(request.scope, request.receive))

        return handle


def get_settings(request: Request) -> Settings:
    """Return the server's settings."""
    settings: Settings = request.app.state.settings
    return settings


def get_models(request: Request) -> ModelRegistry:
    """Return the resident models."""
    models: ModelRegistry = request.app.state.models
    return models


async def get_stores(request: Request) -> Stores:
    """Return the stores where the names in a request are looked up: those that its caller sees."""
    namespaces: NamespaceRegistry = request.app.state.namespaces
    return await namespaces.find(request.state.caller)


async def get_vectors(request: Request) -> VectorStore:
    """Return the caller's steering vectors."""
    return (await get_stores(request)).vectors


async def get_vector_files(request: Request) -> Namespace[VectorCard]:
    """Return the caller's steering vectors, as files."""
    return (await get_stores(request)).vectors.files


async def get_overrides(request: Request) -> Namespace[OverrideCard]:
    """Return the caller's overrides."""
    return (await get_stores(request)).overrides


async def get_adapters(request: Request) -> Namespace[AdapterCard]:
    """Return the caller's adapters."""
    return (await get_stores(request)).adapters


def get_store_threads(request: Request) -> StoreThreads:
    """Return the threads in which the stores are read and written."""
    threads: StoreThreads = request.app.state.store_threads
    return threads


def get_answers(request: Request) -> AnswerMemory:
    """Return the answers to writes that may be sent again."""
    answers: AnswerMemory = request.app.state.answers
    return answers


def get_file_readers(request: Request) -> asyncio.Semaphore:
    """Return the turns at reading uploaded files: some take a process of hundreds of megabytes."""
    readers: asyncio.Semaphore = request.app.state.file_readers
    return readers


SettingsDep = Annotated[Settings, Depends(get_settings)]
ModelsDep = Annotated[ModelRegistry, Depends(get_models)]
VectorsDep = Annotated[VectorStore, Depends(get_vectors)]
OverridesDep = Annotated[Namespace[OverrideCard], Depends(get_overrides)]
AdaptersDep = Annotated[Namespace[AdapterCard], Depends(get_adapters)]
StoresDep = Annotated[Stores, Depends(get_stores)]
StoreThreadsDep = Annotated[StoreThreads, Depends(get_store_threads)]
AnswersDep = Annotated[AnswerMemory, Depends(get_answers)]
FileReadersDep = Annotated[asyncio.Semaphore, Depends(get_file_readers)]


def read_announced(request: Request) -> int:
    """Return the bytes that a body says to have, 0 where it says nothing."""
    announced = request.headers.get("content-length", "")
    return int(announced) if announced.isdecimal() else 0


async def read_upload(request: Request, limit: int, setting: str) -> AsyncIterator[bytes]:
    """Yield the body of an upload, piece by piece.

    Errors: APIError `payload_too_large`, before it is read where it says its size; `setting` is
    what to raise then.
    """
    size = read_announced(request)
    if size <= limit:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                break
            yield chunk
    if size > limit:
        raise refuse_upload(limit, setting)


def refuse_upload(limit: int, setting: str) -> APIError:
    """Return the error for an upload that is too large; `setting` is what to raise."""
    detail = f"The file is larger than {limit} bytes: raise {setting} to take it."
    return api_error("payload_too_large", detail)
