"""`/saes`: sparse autoencoders, stored by name."""

from typing import Annotated

from fastapi import Query, Request, Response

from logsteer.schemas import SaeCard
from logsteer.schemas.steering import VectorName
from logsteer.schemas.vectors import SaeQuery
from logsteer_server.api.dependencies import SaesDep, SettingsDep, StoreThreadsDep
from logsteer_server.api.respond import answer, run_within
from logsteer_server.api.routes.resources import (
    READ_BYTES,
    SAE_RESOURCE,
    UploadLimit,
    describe_form,
    make_router,
    open_form,
    open_upload,
    store_upload,
    take_turn,
)
from logsteer_server.stores.formats.sae_file import SaeFile, SaeUpload, check_sae, join_sae
from logsteer_server.stores.store import StoredContent, stamp

router = make_router(SAE_RESOURCE)

FILES = {"config": "cfg.json", "weights": "sae_weights.safetensors"}
LABELS = "labels"


@router.put(
    "/saes/{name:stored}",
    responses={200: {"model": SaeCard}},
    openapi_extra=describe_form(
        "What SAELens saves: cfg.json as `config`, and sae_weights.safetensors as `weights`; and "
        "`labels`, JSON of feature -> text, where there are any.",
        FILES,
        LABELS,
    ),
)
async def upload_sae(
    name: VectorName,
    query: Annotated[SaeQuery, Query()],
    request: Request,
    settings: SettingsDep,
    store: SaesDep,
    threads: StoreThreadsDep,
) -> Response:
    """Store the sparse autoencoder under this name."""

    async def check(found: StoredContent, content: SaeFile) -> SaeCard:
        hint = content.config.get("model_name")
        return SaeCard(
            name=name,
            sha256=found.sha256,
            architecture=content.config.architecture,
            hook=content.hook,
            layer=content.layer,
            width=content.width,
            features=content.size,
            k=content.encoder.k,
            model_hint=None if hint is None else str(hint)[:200],
            labels=len(content.labels),
            bytes=upload.size,
            created=stamp(),
        )

    limit = UploadLimit(settings.max_upload_bytes, "max_upload_bytes")
    async with (
        open_upload(request, store, name, limit, threads) as upload,
        open_form(request, limit, upload, FILES, LABELS) as files,
    ):
        about = SaeUpload(
            await files["config"].read(),
            await files[LABELS].read() if LABELS in files else None,
            query.layer,
            query.activation_scale,
        )
        async with take_turn(request, READ_BYTES):
            await threads.run(join_sae, about, files["weights"].file, upload.write)
        work = store_upload(
            request, name, upload, store, check_sae, check, overwrite=query.overwrite
        )
        card = await run_within(request, settings.request_timeout_s, work)
    return answer(request, card.model_dump())
