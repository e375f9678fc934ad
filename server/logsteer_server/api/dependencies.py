"""What routes depend on: the JSON body within its limit, models, the caller's stores."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any

import orjson
from fastapi import Depends, Request, Response

from logsteer.errors import APIError, api_error
from logsteer.schemas import AdapterCard, OverrideCard, VectorCard
from logsteer_server.api.access import KeyedRoute
from logsteer_server.api.drain import Drain
from logsteer_server.interventions.interventions import Stores
from logsteer_server.interventions.namespaces import NamespaceRegistry
from logsteer_server.models.changes import ModelChanges
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.stores.contents import ContentFiles
from logsteer_server.stores.namespace import Namespace
from logsteer_server.stores.threads import FairTurns, StoreThreads
from logsteer_server.stores.upkeep import StoreUpkeep
from logsteer_server.stores.vectors import VectorStore
from logsteer_server.tasks.planning import Capacity

BODY_MEMORY = 8
"""Bytes that a parsed body takes for each of its own; measured: 4 for ids, 7 for short strings."""
LARGE_BODY = 2**20
"""Bytes of a body from which on it has to wait for its turn."""
LARGE_BODY_PAUSE = 3
"""Times as long as a large body took to parse before the next one is."""
NESTED = (dict, list)
"""What a parsed body has other values in."""
MAX_FIELDS = 1024
"""Fields of one JSON object."""


class LimitedRequest(Request):
    """A request whose body is read up to the limit, and parsed by orjson."""

    async def body(self) -> bytes:
        """Return the body. Errors: APIError `payload_too_large`, `overloaded`."""
        if not hasattr(self, "_body"):
            limit = self.app.state.settings.max_body_bytes
            chunks, size = [], 0
            async for chunk in self.stream():
                size += len(chunk)
                self.state.memory.cover(min(size, limit) * BODY_MEMORY)
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
        """Parse the body.

        Errors: json.JSONDecodeError, for broken UTF-8 and surrogates too; APIError
        `payload_too_large` for a document that would take long to look at.
        """
        if not hasattr(self, "_json"):
            body = await self.body()
            if len(body) < LARGE_BODY:
                self._json = self._parse(body)
            else:
                async with self.app.state.large_bodies:
                    self._json = self._parse(body)
        return self._json

    def _parse(self, body: bytes) -> Any:
        settings: Settings = self.app.state.settings
        _check_brackets(body, settings.max_body_brackets)
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, error.doc, error.pos) from error
        # A field has a colon, and an object a bracket: few of them need no closer look.
        if body.count(b":") > MAX_FIELDS or body.count(b"{") > settings.max_body_objects:
            _check_objects(document, settings.max_body_objects)
        return document


class BodyTurns:
    """Turns at parsing large bodies, which keeps the event loop busy.

    One body at a time, and a multiple of the time that it took is left to all else: in that it is
    also held against its schema.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._began = 0.0

    async def __aenter__(self) -> None:
        """Wait for a turn."""
        await self._turn.acquire()
        self._began = time.monotonic()

    async def __aexit__(self, *_: object) -> None:
        """Have the next turn begin after a pause."""
        pause = LARGE_BODY_PAUSE * (time.monotonic() - self._began)
        asyncio.get_running_loop().call_later(pause, self._turn.release)


def _check_brackets(body: bytes, limit: int) -> None:
    """Refuse what would take much memory once parsed. Errors: APIError `payload_too_large`."""
    count = body.count(b"{") + body.count(b"[")
    if count > limit:
        detail = (
            f"The body opens {count} brackets, its texts' own included, and at most {limit} are "
            "taken: split the request, or raise max_body_brackets."
        )
        raise api_error("payload_too_large", detail)


def _check_objects(document: Any, limit: int) -> None:
    """Refuse more objects than are checked at once, and more fields than any of them has.

    Errors: APIError `payload_too_large`.
    """
    level, count = [document], 0
    while level:
        objects = [entry for entry in level if type(entry) is dict]
        lists = [entry for entry in level if type(entry) is list and entry]
        count += len(objects)
        if count > limit:
            detail = (
                f"The body has more than {limit} objects: split the request, or raise "
                "max_body_objects."
            )
            raise api_error("payload_too_large", detail)
        most = max(map(len, objects), default=0)
        if most > MAX_FIELDS:
            detail = f"An object of the body has {most} fields, at most {MAX_FIELDS} are."
            raise api_error("payload_too_large", detail)
        level = [
            value for entry in objects for value in entry.values() if type(value) in NESTED
        ] + [
            value
            for entry in lists
            if type(entry[0]) in NESTED
            for value in entry
            if type(value) in NESTED
        ]


class LimitedRoute(KeyedRoute):
    """A route that reads its request through `LimitedRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, given a `LimitedRequest`."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(LimitedRequest(request.scope, request.receive))

        return handle


async def get_settings(request: Request) -> Settings:
    """Return the server's settings."""
    settings: Settings = request.app.state.settings
    return settings


async def get_capacity(request: Request) -> Capacity:
    """Return what the server has for requests."""
    capacity: Capacity = request.app.state.capacity
    return capacity


async def get_models(request: Request) -> ModelRegistry:
    """Return the resident models."""
    models: ModelRegistry = request.app.state.models
    return models


async def get_changes(request: Request) -> ModelChanges:
    """Return what loads, unloads and replaces models."""
    changes: ModelChanges = request.app.state.changes
    return changes


async def get_drain(request: Request) -> Drain:
    """Return how far the server's end has come."""
    drain: Drain = request.app.state.drain
    return drain


async def get_upkeep(request: Request) -> StoreUpkeep:
    """Return what looks after the stores."""
    upkeep: StoreUpkeep = request.app.state.store_upkeep
    return upkeep


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


async def get_store_threads(request: Request) -> StoreThreads:
    """Return the threads in which the stores are read and written."""
    threads: StoreThreads = request.app.state.store_threads
    return threads


async def get_store_turns(request: Request) -> FairTurns:
    """Return the turns at reading, converting and combining stored files."""
    turns: FairTurns = request.app.state.store_turns
    return turns


async def get_content_files(request: Request) -> ContentFiles:
    """Return the files of stored contents."""
    files: ContentFiles = request.app.state.content_files
    return files


SettingsDep = Annotated[Settings, Depends(get_settings)]
CapacityDep = Annotated[Capacity, Depends(get_capacity)]
ModelsDep = Annotated[ModelRegistry, Depends(get_models)]
ChangesDep = Annotated[ModelChanges, Depends(get_changes)]
DrainDep = Annotated[Drain, Depends(get_drain)]
UpkeepDep = Annotated[StoreUpkeep, Depends(get_upkeep)]
VectorsDep = Annotated[VectorStore, Depends(get_vectors)]
OverridesDep = Annotated[Namespace[OverrideCard], Depends(get_overrides)]
AdaptersDep = Annotated[Namespace[AdapterCard], Depends(get_adapters)]
StoresDep = Annotated[Stores, Depends(get_stores)]
StoreThreadsDep = Annotated[StoreThreads, Depends(get_store_threads)]
StoreTurnsDep = Annotated[FairTurns, Depends(get_store_turns)]
ContentFilesDep = Annotated[ContentFiles, Depends(get_content_files)]


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
