"""`/overrides`: directions of the parameters, stored by name."""

from typing import Annotated

from fastapi import Query, Request, Response

from logsteer.schemas import OverrideCard
from logsteer.schemas.steering import VectorName
from logsteer_server.api.dependencies import (
    ModelsDep,
    OverridesDep,
    SettingsDep,
    StoreThreadsDep,
)
from logsteer_server.api.respond import answer, run_within
from logsteer_server.api.routes.resources import (
    OVERRIDE_RESOURCE,
    OVERWRITE,
    UploadLimit,
    describe_file,
    make_router,
    open_upload,
    store_upload,
    write_body,
)
from logsteer_server.contract.jobs import CheckOverrideJob, CheckOverrideOutput
from logsteer_server.interventions.references import check_feature
from logsteer_server.stores.formats.tensor_file import (
    TensorContent,
    invalid_direction,
    read_direction,
)
from logsteer_server.stores.store import StoredContent, stamp

router = make_router(OVERRIDE_RESOURCE)


@router.put(
    "/overrides/{name:stored}",
    responses={200: {"model": OverrideCard}},
    openapi_extra=describe_file(
        "A safetensors file: for each parameter that moves, a tensor of its shape under its name "
        "in transformers' state_dict."
    ),
)
async def upload_override(
    name: VectorName,
    request: Request,
    models: ModelsDep,
    settings: SettingsDep,
    store: OverridesDep,
    threads: StoreThreadsDep,
    model: Annotated[str | None, Query(description="Whose parameters; null: the only one.")] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> Response:
    """Store the direction in the file under this name."""
    owner = models.find(model)
    _, info = owner.require()
    check_feature("override", info, "model")
    weights_digest = owner.provenance().weights_digest

    async def check(found: StoredContent, content: TensorContent) -> OverrideCard:
        fit = await owner.check(CheckOverrideJob(shapes=content.shapes))
        assert isinstance(fit, CheckOverrideOutput)
        return OverrideCard(
            name=name,
            sha256=found.sha256,
            model=owner.id,
            weights_digest=weights_digest,
            tensors=len(content.shapes),
            moved=fit.moved,
            total=fit.total,
            norm=content.norm,
            bytes=upload.size,
            created=stamp(),
        )

    limit = UploadLimit(settings.max_upload_bytes, "max_upload_bytes")
    async with open_upload(request, store, name, limit, threads) as upload:
        await write_body(request, upload, limit, threads)
        if not upload.size:
            raise invalid_direction("the body is empty; send the file's bytes")
        asked = {"model": owner.id, "weights_digest": weights_digest}
        work = store_upload(
            request, name, upload, store, read_direction, check, overwrite=overwrite, **asked
        )
        card = await run_within(request, settings.request_timeout_s, work)
    return answer(request, card.model_dump())
