"""`/adapters`: LoRA adapters, stored by name."""

from typing import Annotated

from fastapi import Query, Request, Response

from logsteer.schemas import AdapterCard
from logsteer.schemas.steering import VectorName
from logsteer_server.api.dependencies import (
    AdaptersDep,
    ModelsDep,
    SettingsDep,
    StoreThreadsDep,
)
from logsteer_server.api.respond import answer, run_within
from logsteer_server.api.routes.resources import (
    ADAPTER_RESOURCE,
    OVERWRITE,
    READ_BYTES,
    UploadLimit,
    describe_form,
    make_router,
    open_form,
    open_upload,
    store_upload,
    take_turn,
)
from logsteer_server.contract.jobs import CheckAdapterJob, CheckAdapterOutput
from logsteer_server.contract.plan import Adapter
from logsteer_server.interventions.references import check_feature
from logsteer_server.stores.formats.adapter_file import AdapterContent, join_files, read_adapter
from logsteer_server.stores.store import StoredContent, stamp

router = make_router(ADAPTER_RESOURCE)

FILES = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}


@router.put(
    "/adapters/{name:stored}",
    responses={200: {"model": AdapterCard}},
    openapi_extra=describe_form(
        "What PEFT saves: adapter_config.json as `config`, and adapter_model.safetensors as "
        "`weights`.",
        FILES,
    ),
)
async def upload_adapter(
    name: VectorName,
    request: Request,
    models: ModelsDep,
    settings: SettingsDep,
    store: AdaptersDep,
    threads: StoreThreadsDep,
    model: Annotated[str | None, Query(description="Whose adapter; null: the only one.")] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> Response:
    """Load the adapter and store it under this name."""
    owner = models.find(model)
    _, info = owner.require()
    check_feature("adapter", info, "model")
    weights_digest = owner.provenance().weights_digest

    async def check(found: StoredContent, content: AdapterContent) -> AdapterCard:
        fits = await owner.check(CheckAdapterJob(adapter=Adapter(found.source, found.sha256)))
        assert isinstance(fits, CheckAdapterOutput)
        return AdapterCard(
            name=name,
            sha256=found.sha256,
            model=owner.id,
            weights_digest=weights_digest,
            rank=content.rank,
            alpha=content.alpha,
            modules=content.modules,
            tensors=content.tensors,
            updated=fits.updated,
            norm=content.norm,
            bytes=upload.size,
            created=stamp(),
        )

    limit = UploadLimit(settings.max_upload_bytes, "max_upload_bytes")
    async with (
        open_upload(request, store, name, limit, threads) as upload,
        open_form(request, limit, upload, FILES) as files,
    ):
        async with take_turn(request, READ_BYTES):
            config, weights = await files["config"].read(), files["weights"].file
            await threads.run(join_files, config, weights, upload.write)
        asked = {"model": owner.id, "weights_digest": weights_digest}
        work = store_upload(
            request, name, upload, store, read_adapter, check, overwrite=overwrite, **asked
        )
        card = await run_within(request, settings.request_timeout_s, work)
    return answer(request, card.model_dump())
