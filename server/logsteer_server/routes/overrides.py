"""`/overrides`: directions of the parameters, stored by name."""

import asyncio
from typing import Annotated

from fastapi import Query, Request, Response

from logsteer.schemas import OverrideCard
from logsteer.schemas.steering import VectorName
from logsteer_server.contract.jobs import CheckOverrideJob, CheckOverrideOutput
from logsteer_server.http.dependencies import (
    FileReadersDep,
    ModelsDep,
    OverridesDep,
    SettingsDep,
    read_upload,
)
from logsteer_server.http.respond import answer, run_within
from logsteer_server.interventions.parameters import check_feature
from logsteer_server.routes.resources import (
    OVERRIDE_RESOURCE,
    describe_file,
    make_router,
    open_upload,
    store_upload,
)
from logsteer_server.stores.formats.tensor_file import (
    TensorContent,
    invalid_direction,
    read_direction,
)
from logsteer_server.stores.store import stamp
from logsteer_server.stores.upload import Upload

router = make_router(OVERRIDE_RESOURCE)

WRITTEN_AT_ONCE = 2**22
"""Bytes that are collected before a thread writes them."""


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
    readers: FileReadersDep,
    model: Annotated[str | None, Query(description="Whose parameters; null: the only one.")] = None,
) -> Response:
    """Store the direction in the file under this name, whatever the name stood for before."""
    owner = models.find(model)
    _, info = owner.require()
    check_feature("override", info, "model")

    async def check(sha256: str, content: TensorContent) -> OverrideCard:
        fit = await owner.check(CheckOverrideJob(shapes=content.shapes))
        assert isinstance(fit, CheckOverrideOutput)
        return OverrideCard(
            name=name,
            sha256=sha256,
            model=owner.id,
            weights_digest=owner.provenance().weights_digest,
            tensors=len(content.shapes),
            moved=fit.moved,
            total=fit.total,
            norm=content.norm,
            bytes=upload.size,
            created=stamp(),
        )

    async with open_upload(store, name) as upload:
        await _write_body(request, upload, settings.max_override_bytes)
        work = store_upload(upload, store, readers, read_direction, check)
        card = await run_within(request, settings.request_timeout_s, work)
    return answer(request, card.model_dump())


async def _write_body(request: Request, upload: Upload, limit: int) -> None:
    """Write the body to the file. Errors: those of `read_upload`, and for an empty body."""
    waiting = bytearray()
    async for chunk in read_upload(request, limit, "max_override_bytes"):
        waiting += chunk
        if len(waiting) >= WRITTEN_AT_ONCE or not chunk:
            await asyncio.to_thread(upload.write, bytes(waiting))
            waiting.clear()
    if not upload.size:
        raise invalid_direction("the body is empty; send the file's bytes")
