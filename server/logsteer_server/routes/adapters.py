"""`/adapters`: LoRA adapters that are kept."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from logsteer.errors import api_error
from logsteer.schemas import AdapterCard, AdapterList, DeletedAdapter
from logsteer.schemas.steering import VectorName
from logsteer_server.contract.jobs import CheckAdapterJob
from logsteer_server.contract.parameters import Adapter
from logsteer_server.http.dependencies import (
    AdaptersDep,
    FileReadersDep,
    LimitedRoute,
    ModelsDep,
    SettingsDep,
    read_upload,
)
from logsteer_server.http.respond import answer, run_within
from logsteer_server.interventions.features import check_feature
from logsteer_server.models.model import ResidentModel
from logsteer_server.routes.kept import answer_card, answer_cards, answer_deleted
from logsteer_server.stores.adapters import join_files, read_adapter
from logsteer_server.stores.files import FileStore, IncomingFile, stamp

router = APIRouter(route_class=LimitedRoute, tags=["adapters"])

MAX_CONFIG_BYTES = 2**20
PARTS = ("config", "weights")


@router.get("/adapters", responses={200: {"model": AdapterList}})
async def list_adapters(request: Request, store: AdaptersDep) -> Response:
    """The card of every kept adapter, by name."""
    return await answer_cards(request, store)


@router.get("/adapters/{name}", responses={200: {"model": AdapterCard}})
async def show_adapter(name: VectorName, request: Request, store: AdaptersDep) -> Response:
    """The card of one kept adapter."""
    return await answer_card(request, store, name)


@router.put(
    "/adapters/{name}",
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
    readers: FileReadersDep,
    model: Annotated[str | None, Query(description="Whose adapter; null: the only one.")] = None,
) -> Response:
    """Load the adapter and keep it under this name, whatever the name stood for before."""
    resident = models.find(model)
    _, info = resident.require()
    check_feature("adapter", info, "model")
    form = await _read_form(request, settings.max_adapter_bytes)
    incoming = await asyncio.to_thread(store.receive)
    try:
        config, weights = (form.get(part) for part in PARTS)
        if not isinstance(config, UploadFile) or not isinstance(weights, UploadFile):
            detail = "Send two files: PEFT's adapter_config.json as config, its weights as weights."
            raise api_error("invalid_request", detail)
        if config.size is None or config.size > MAX_CONFIG_BYTES:
            detail = f"config is larger than {MAX_CONFIG_BYTES} bytes; send adapter_config.json."
            raise api_error("payload_too_large", detail)
        async with readers:
            data = await config.read()
            await asyncio.to_thread(join_files, data, weights.file, incoming.write)
        work = _keep(name, incoming, resident, store, readers)
        card = await run_within(request, settings.request_timeout_s, work)
    finally:
        await asyncio.to_thread(incoming.discard)
        await form.close()
    return answer(request, card.model_dump())


async def _read_form(request: Request, limit: int) -> FormData:
    """The form in the body. Errors: APIError, for one that is too large or no form."""
    try:
        return await _LimitedForm(request, limit).form(max_files=len(PARTS), max_fields=0)
    except HTTPException as error:
        detail = f"The body is no form of two files: {error.detail}."
        raise api_error("invalid_request", detail) from error


class _LimitedForm(Request):
    """A request whose form is read up to a limit of bytes."""

    def __init__(self, request: Request, limit: int) -> None:
        super().__init__(request.scope)
        self._request = request
        self._limit = limit

    async def stream(self) -> AsyncIterator[bytes]:  # type: ignore[override]
        """The body. Errors: APIError `payload_too_large`."""
        async for chunk in read_upload(self._request, self._limit, "max_adapter_bytes"):
            yield chunk


async def _keep(
    name: str,
    incoming: IncomingFile,
    resident: ResidentModel,
    store: FileStore[AdapterCard],
    readers: asyncio.Semaphore,
) -> AdapterCard:
    async with readers:
        sha256 = await asyncio.to_thread(incoming.finish)
        content = await asyncio.to_thread(read_adapter, incoming.path)
    await resident.check(CheckAdapterJob(adapter=Adapter(str(incoming.path.resolve()), sha256)))
    card = AdapterCard(
        name=name,
        sha256=sha256,
        model=resident.id,
        weights_digest=resident.provenance().weights_digest,
        rank=content.rank,
        alpha=content.alpha,
        modules=content.modules,
        tensors=content.tensors,
        norm=content.norm,
        bytes=incoming.size,
        created=stamp(),
    )
    await asyncio.to_thread(store.keep, incoming, card)
    return card


@router.delete("/adapters/{name}", responses={200: {"model": DeletedAdapter}})
async def delete_adapter(name: VectorName, request: Request, store: AdaptersDep) -> Response:
    """The name is gone, and the content too where it had no other.

    An engine that has it loaded forgets it when it needs its place for another.
    """
    return await answer_deleted(request, store, name)
