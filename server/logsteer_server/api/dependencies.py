"""What routes depend on: models, the caller's stores, the bodies of uploads."""

from typing import Annotated, Any

from fastapi import Depends, Request

from logsteer.schemas import AdapterCard, OverrideCard, SaeCard, VectorCard
from logsteer_server.api.gate import Drain
from logsteer_server.interventions.interventions import NamespaceRegistry, Stores
from logsteer_server.models.changes import ModelChanges
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.stores.contents import ContentFiles
from logsteer_server.stores.namespace import Namespace
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.stores.upkeep import StoreUpkeep
from logsteer_server.stores.vectors import VectorStore
from logsteer_server.tasks.planning import Capacity


def of_state(name: str) -> Any:
    """Return what gives a route what the application's state has under this name."""

    async def find(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(find)


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


async def get_saes(request: Request) -> Namespace[SaeCard]:
    """Return the caller's sparse autoencoders, as files."""
    return (await get_stores(request)).saes.names


SettingsDep = Annotated[Settings, of_state("settings")]
CapacityDep = Annotated[Capacity, of_state("capacity")]
ModelsDep = Annotated[ModelRegistry, of_state("models")]
ChangesDep = Annotated[ModelChanges, of_state("changes")]
DrainDep = Annotated[Drain, of_state("drain")]
UpkeepDep = Annotated[StoreUpkeep, of_state("store_upkeep")]
StoreThreadsDep = Annotated[StoreThreads, of_state("store_threads")]
ContentFilesDep = Annotated[ContentFiles, of_state("content_files")]
VectorsDep = Annotated[VectorStore, Depends(get_vectors)]
OverridesDep = Annotated[Namespace[OverrideCard], Depends(get_overrides)]
AdaptersDep = Annotated[Namespace[AdapterCard], Depends(get_adapters)]
SaesDep = Annotated[Namespace[SaeCard], Depends(get_saes)]
StoresDep = Annotated[Stores, Depends(get_stores)]
