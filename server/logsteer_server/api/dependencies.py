"""Dependencies of routes: models and their variants, the caller's stores."""

from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel

from logsteer.errors import APIError
from logsteer.schemas import VariantCard, VariantFields
from logsteer_server.api.gate import Drain
from logsteer_server.interventions.interventions import NamespaceRegistry, Stores
from logsteer_server.interventions.variants import expand, find_variant
from logsteer_server.models.changes import ModelChanges
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.stores.contents import ContentFiles
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import StoreListing
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.tasks.captures import CaptureJobs
from logsteer_server.tasks.planning import Capacity

B = TypeVar("B", bound=BaseModel)


def of_state(name: str) -> Any:
    """Return a dependency that gets an attribute of the application's state."""

    async def find(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(find)


async def get_stores(request: Request) -> Stores:
    """Return the stores that the request's caller sees."""
    namespaces: NamespaceRegistry = request.app.state.namespaces
    return await namespaces.find(request.state.caller)


SettingsDep = Annotated[Settings, of_state("settings")]
CapacityDep = Annotated[Capacity, of_state("capacity")]
ModelsDep = Annotated[ModelRegistry, of_state("models")]
ChangesDep = Annotated[ModelChanges, of_state("changes")]
DrainDep = Annotated[Drain, of_state("drain")]
ObjectsDep = Annotated[Objects, of_state("objects")]
StoreThreadsDep = Annotated[StoreThreads, of_state("store_threads")]
ContentFilesDep = Annotated[ContentFiles, of_state("content_files")]
CapturesDep = Annotated[CaptureJobs, of_state("captures")]
StoresDep = Annotated[Stores, Depends(get_stores)]


async def find_asked(request: Request, name: str | None) -> VariantFields | None:
    """Return the variant with a name; None for a resident model's name or an unknown one."""
    state = request.app.state
    if name is None or name in state.models.by_id:
        return None
    store = (await get_stores(request)).variants
    found: VariantFields | None = await state.store_threads.run(find_variant, name, store)
    return found


async def find_base(request: Request, name: str | None) -> str | None:
    """Return the name of a model, or of the model of a variant."""
    variant = await find_asked(request, name)
    return name if variant is None else variant.model


async def list_variants(request: Request) -> list[VariantCard]:
    """Return the variants that a caller sees; [] while their store does not answer."""
    store = (await get_stores(request)).variants
    with suppress(APIError):
        listing: StoreListing[VariantCard] = await request.app.state.store_threads.run(
            store.list_all
        )
        return listing.cards
    return []


VariantsDep = Annotated[list[VariantCard], Depends(list_variants)]


async def expand_model(request: Request, body: B, *, ignores: bool = False) -> tuple[B, str | None]:
    """Return a body with its variant, if any, expanded, and the variant's name.

    Errors: those of `find_variant` and `expand`.
    """
    name: str | None = getattr(body, "model", None)
    variant = await find_asked(request, name)
    if variant is None or name is None:
        return body, None
    return expand(body, name, variant, ignores=ignores), name
