"""`/variants`: steered models whose names are models."""

from fastapi import Request, Response

from logsteer.errors import api_error
from logsteer.schemas import VariantCard, VariantRequest
from logsteer.schemas.steering import VectorName
from logsteer_server.api.dependencies import ModelsDep, StoresDep, StoreThreadsDep
from logsteer_server.api.respond import answer
from logsteer_server.api.routes.resources import VARIANT_RESOURCE, make_router
from logsteer_server.interventions.interventions import Interventions

router = make_router(VARIANT_RESOURCE)


@router.put("/variants/{name:stored}", responses={200: {"model": VariantCard}})
async def put_variant(
    name: VectorName,
    body: VariantRequest,
    request: Request,
    models: ModelsDep,
    stores: StoresDep,
    threads: StoreThreadsDep,
) -> Response:
    """Store a steered model under this name, which is then a model in every endpoint."""
    model = models.find(body.model)
    codec, info = model.require()
    if name in models.by_id:
        raise api_error("exists", f"{name} is a resident model: choose another name.", param="name")
    asked = body.model_copy(update={"model": model.id})

    def store() -> VariantCard:
        Interventions.resolve(asked, stores, info, codec)
        return stores.variants.store(name, asked, overwrite=asked.overwrite)

    return answer(request, (await threads.run(store)).model_dump())
