"""`/adapters`: LoRA adapters, stored by name."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from fastapi import Query, Request, Response
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from logsteer.errors import api_error
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
    make_router,
    open_upload,
    read_upload,
    store_upload,
    take_turn,
)
from logsteer_server.contract.check_jobs import CheckAdapterJob, CheckAdapterOutput
from logsteer_server.contract.parameters import Adapter
from logsteer_server.interventions.parameters import check_feature
from logsteer_server.stores.formats.adapter_file import AdapterContent, join_files, read_adapter
from logsteer_server.stores.store import StoredContent, stamp
from logsteer_server.stores.upload import Upload, report_faults

router = make_router(ADAPTER_RESOURCE)

MAX_CONFIG_BYTES = 2**20
PARTS = ("config", "weights")


@router.put(
    "/adapters/{name:stored}",
    responses={200: {"model": AdapterCard}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "What PEFT saves: adapter_config.json as `config`, and "
            "adapter_model.safetensors as `weights`.",
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": list(PARTS),
                        "properties": {
                            part: {"type": "string", "format": "binary"} for part in PARTS
                        },
                    }
                }
            },
        }
    },
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
        _open_form(request, limit, upload) as (config, weights),
    ):
        async with take_turn(request, READ_BYTES):
            await threads.run(join_files, await config.read(), weights.file, upload.write)
        asked = {"model": owner.id, "weights_digest": weights_digest}
        work = store_upload(
            request, name, upload, store, read_adapter, check, overwrite=overwrite, **asked
        )
        card = await run_within(request, settings.request_timeout_s, work)
    return answer(request, card.model_dump())


@asynccontextmanager
async def _open_form(
    request: Request, limit: UploadLimit, upload: Upload
) -> AsyncIterator[tuple[UploadFile, UploadFile]]:
    """Give the two files in the body, and close them afterwards. Errors: APIError."""
    form = await _read_form(request, limit, upload)
    try:
        config, weights = (form.get(part) for part in PARTS)
        if not isinstance(config, UploadFile) or not isinstance(weights, UploadFile):
            detail = "Send two files: PEFT's adapter_config.json as config, its weights as weights."
            raise api_error("invalid_request", detail)
        if config.size is None or config.size > MAX_CONFIG_BYTES:
            detail = f"config is larger than {MAX_CONFIG_BYTES} bytes; send adapter_config.json."
            raise api_error("payload_too_large", detail)
        yield config, weights
    finally:
        await form.close()


async def _read_form(request: Request, limit: UploadLimit, upload: Upload) -> FormData:
    """Return the form in the body. Errors: APIError, for one that is too large or no form."""
    try:
        with report_faults(Path(tempfile.gettempdir())):
            form = _LimitedForm(request, limit, upload)
            return await form.form(max_files=len(PARTS), max_fields=0)
    except HTTPException as error:
        detail = f"The body is no form of two files: {error.detail}."
        raise api_error("invalid_request", detail) from error


class _LimitedForm(Request):
    """A request whose form is read up to a limit of bytes, which the upload reserves as it grows.

    Starlette keeps the form's files in the system's directory for temporary files until then.
    """

    def __init__(self, request: Request, limit: UploadLimit, upload: Upload) -> None:
        super().__init__(request.scope)
        self._request = request
        self._limit = limit
        self._upload = upload

    async def stream(self) -> AsyncIterator[bytes]:  # type: ignore[override]
        """Give the body, piece by piece. Errors: APIError, where there is no room for it."""
        size, limit = 0, self._limit
        async for chunk in read_upload(self._request, limit):
            size += len(chunk)
            self._upload.reserve(size)
            yield chunk
