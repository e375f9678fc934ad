"""What `/vectors`, `/overrides` and `/adapters` have alike: cards, deletion, uploads of files."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from logsteer.schemas import (
    AdapterCard,
    AdapterList,
    DeletedAdapter,
    DeletedOverride,
    DeletedVector,
    OverrideCard,
    OverrideList,
    VectorCard,
    VectorList,
)
from logsteer.schemas.steering import VectorName
from logsteer_server.http.dependencies import (
    LimitedRoute,
    get_adapters,
    get_overrides,
    get_vector_files,
)
from logsteer_server.http.respond import answer
from logsteer_server.stores.layout import C
from logsteer_server.stores.namespace import Namespace
from logsteer_server.stores.store import ADAPTERS, OVERRIDES, VECTORS, Kind
from logsteer_server.stores.upload import Upload

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Resource(Generic[C]):
    """A kind of stored content as endpoints: its answers, and where its store is."""

    kind: Kind[C]
    listed: type[BaseModel]
    deleted: type[BaseModel]
    get_store: Callable[[Request], Awaitable[Namespace[C]]]
    deletion: str = ""
    """What else its documentation says of a deletion."""


VECTOR_RESOURCE: Resource[VectorCard] = Resource(
    VECTORS, VectorList, DeletedVector, get_vector_files
)
OVERRIDE_RESOURCE: Resource[OverrideCard] = Resource(
    OVERRIDES, OverrideList, DeletedOverride, get_overrides
)
ADAPTER_RESOURCE: Resource[AdapterCard] = Resource(
    ADAPTERS,
    AdapterList,
    DeletedAdapter,
    get_adapters,
    "\n\nAn engine that has it loaded forgets it when it needs its place for another.",
)


def make_router(resource: Resource[C]) -> APIRouter:
    """Return a router that lists a resource's cards, shows one and deletes one."""
    kind = resource.kind
    every, one = f"/{kind.plural}", f"/{kind.plural}/{{name:stored}}"
    router = APIRouter(route_class=LimitedRoute, tags=[kind.plural])

    @router.get(
        every,
        name=f"list_{kind.plural}",
        description=f"The card of every stored {kind.noun}, by name.",
        responses={200: {"model": resource.listed}},
    )
    async def list_all(request: Request) -> Response:
        store = await resource.get_store(request)
        listing = await asyncio.to_thread(store.list_all)
        listed = {kind.plural: [card.model_dump() for card in listing.cards]}
        size = {"bytes": listing.num_bytes, "max_bytes": store.max_bytes}
        return answer(request, {**listed, **size})

    @router.get(
        one,
        name=f"show_{kind.noun}",
        description=f"The card of one stored {kind.noun}.",
        responses={200: {"model": kind.card}},
    )
    async def show(name: VectorName, request: Request) -> Response:
        store = await resource.get_store(request)
        card = await asyncio.to_thread(store.describe, name)
        return answer(request, card.model_dump())

    @router.delete(
        one,
        name=f"delete_{kind.noun}",
        description="The name is gone, and the content too where it had no other."
        + resource.deletion,
        responses={200: {"model": resource.deleted}},
    )
    async def delete(name: VectorName, request: Request) -> Response:
        store = await resource.get_store(request)
        sha256 = await asyncio.to_thread(store.delete, name)
        return answer(request, {"name": name, "sha256": sha256})

    return router


def describe_file(description: str) -> dict[str, Any]:
    """Return the OpenAPI description of a request whose body is a file."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


@asynccontextmanager
async def open_upload(store: Namespace[C], name: str) -> AsyncIterator[Upload]:
    """Give a file for an upload; it is closed afterwards, and removed where it was not stored."""
    upload = await asyncio.to_thread(store.receive, name)
    try:
        yield upload
    finally:
        await asyncio.to_thread(upload.discard)


async def store_upload(
    upload: Upload,
    store: Namespace[C],
    readers: asyncio.Semaphore,
    read: Callable[[Path], T],
    check: Callable[[str, T], Awaitable[C]],
) -> C:
    """Store an upload that is written, and return its card.

    `read` says what the file holds; `check` gets its SHA-256 and that, has the model's engine look
    at the file, and makes the card.
    """
    async with readers:
        sha256 = await asyncio.to_thread(upload.finish)
        content = await asyncio.to_thread(read, upload.path)
    card = await check(sha256, content)
    await asyncio.to_thread(store.put, upload, card)
    return card
