"""What the model of a request means: a resident model, or a variant of one."""

from contextlib import suppress
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel

from logsteer.errors import APIError
from logsteer.schemas import VariantCard, VariantFields
from logsteer_server.api.dependencies import get_stores
from logsteer_server.interventions.variants import expand, find_variant
from logsteer_server.stores.store import StoreListing

B = TypeVar("B", bound=BaseModel)


async def find_asked(request: Request, name: str | None) -> VariantFields | None:
    """Return the variant of a name; None for a resident model's, and one that nobody knows."""
    state = request.app.state
    if name is None or name in state.models.by_id:
        return None
    store = (await get_stores(request)).variants
    found: VariantFields | None = await state.store_threads.run(find_variant, name, store)
    return found


async def find_base(request: Request, name: str | None) -> str | None:
    """Return the name of the model that a name means, which is its own unless it is a variant's."""
    variant = await find_asked(request, name)
    return name if variant is None else variant.model


async def list_variants(request: Request) -> list[VariantCard]:
    """Return the variants that a caller sees; none while their store does not answer."""
    store = (await get_stores(request)).variants
    with suppress(APIError):
        listing: StoreListing[VariantCard] = await request.app.state.store_threads.run(
            store.list_all
        )
        return listing.cards
    return []


VariantsDep = Annotated[list[VariantCard], Depends(list_variants)]


async def expand_model(request: Request, body: B, *, ignores: bool = False) -> tuple[B, str | None]:
    """Return the request that a body stands for, and the variant's name where it names one.

    Errors: those of `find_variant` and `expand`.
    """
    name: str | None = getattr(body, "model", None)
    variant = await find_asked(request, name)
    if variant is None or name is None:
        return body, None
    return expand(body, name, variant, ignores=ignores), name
