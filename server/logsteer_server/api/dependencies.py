"""What routes depend on: models, the caller's stores, the bodies of uploads."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request

from logsteer.errors import APIError, api_error
from logsteer.schemas import AdapterCard, OverrideCard, VectorCard
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
