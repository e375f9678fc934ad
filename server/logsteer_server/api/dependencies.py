"""What routes depend on: models, the caller's stores, the bodies of uploads."""

from typing import Annotated, Any

from fastapi import Depends, Request

from logsteer_server.api.gate import Drain
from logsteer_server.interventions.interventions import NamespaceRegistry, Stores
from logsteer_server.models.changes import ModelChanges
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.stores.contents import ContentFiles
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.stores.upkeep import StoreUpkeep
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


SettingsDep = Annotated[Settings, of_state("settings")]
CapacityDep = Annotated[Capacity, of_state("capacity")]
ModelsDep = Annotated[ModelRegistry, of_state("models")]
ChangesDep = Annotated[ModelChanges, of_state("changes")]
DrainDep = Annotated[Drain, of_state("drain")]
UpkeepDep = Annotated[StoreUpkeep, of_state("store_upkeep")]
StoreThreadsDep = Annotated[StoreThreads, of_state("store_threads")]
ContentFilesDep = Annotated[ContentFiles, of_state("content_files")]
StoresDep = Annotated[Stores, Depends(get_stores)]
