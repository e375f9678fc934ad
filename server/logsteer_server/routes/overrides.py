"""`/overrides`: directions of the parameters that are kept."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from logsteer.schemas import DeletedOverride, OverrideCard, OverrideList
from logsteer.schemas.steering import VectorName
from logsteer_server.contract.jobs import CheckOverrideJob, CheckOverrideOutput
from logsteer_server.http.dependencies import (
    FileReadersDep,
    LimitedRoute,
    ModelsDep,
    OverridesDep,
    SettingsDep,
    read_upload,
)
from logsteer_server.http.respond import answer, run_within
from logsteer_server.interventions.features import check_feature
from logsteer_server.models.model import ResidentModel
from logsteer_server.routes.kept import answer_card, answer_cards, answer_deleted
from logsteer_server.stores.files import FileStore, IncomingFile, stamp
from logsteer_server.stores.overrides import invalid_direction, read_direction

router = APIRouter(route_class=LimitedRoute, tags=["overrides"])

WRITTEN_AT_ONCE = 2**22
"""Bytes that are collected before a thread writes them."""


@router.get("/overrides", responses={200: {"model": OverrideList}})
async def list_overrides(request: Request, store: OverridesDep) -> Response:
    """The card of every kept override, by name."""
    return await answer_cards(request, store)


@router.get("/overrides/{name}", responses={200: {"model": OverrideCard}})
async def show_override(name: VectorName, request: Request, store: OverridesDep) -> Response:
    """The card of one kept override."""
    return await answer_card(request, store, name)


@router.put(
    "/overrides/{name}",
    responses={200: {"model": OverrideCard}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "A safetensors file: for each parameter that moves, a tensor of its "
            "shape under its name in transformers' state_dict.",
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
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
    """Keep the direction in the file under this name, whatever the name stood for before."""
    resident = models.find(model)
    _, info = resident.require()
    check_feature("override", info, "model")
    incoming = await asyncio.to_thread(store.receive)
    try:
        await _receive(request, incoming, settings.max_override_bytes)
        work = _keep(name, incoming, resident, store, readers)
        card = await run_within(request, settings.request_timeout_s, work)
    finally:
        await asyncio.to_thread(incoming.discard)
    return answer(request, card.model_dump())


async def _receive(request: Request, incoming: IncomingFile, limit: int) -> None:
    """Write the body down. Errors: those of `read_upload`, and for an empty body."""
    waiting = bytearray()
    async for chunk in read_upload(request, limit, "max_override_bytes"):
        waiting += chunk
        if len(waiting) >= WRITTEN_AT_ONCE or not chunk:
            await asyncio.to_thread(incoming.write, bytes(waiting))
            waiting.clear()
    if not incoming.size:
        raise invalid_direction("the body is empty; send the file's bytes")


async def _keep(
    name: str,
    incoming: IncomingFile,
    resident: ResidentModel,
    store: FileStore[OverrideCard],
    readers: asyncio.Semaphore,
) -> OverrideCard:
    async with readers:
        sha256 = await asyncio.to_thread(incoming.finish)
        content = await asyncio.to_thread(read_direction, incoming.path)
    fit = await resident.check(CheckOverrideJob(shapes=content.shapes))
    assert isinstance(fit, CheckOverrideOutput)
    card = OverrideCard(
        name=name,
        sha256=sha256,
        model=resident.id,
        weights_digest=resident.provenance().weights_digest,
        tensors=len(content.shapes),
        moved=fit.moved,
        total=fit.total,
        norm=content.norm,
        bytes=incoming.size,
        created=stamp(),
    )
    await asyncio.to_thread(store.keep, incoming, card)
    return card


@router.delete("/overrides/{name}", responses={200: {"model": DeletedOverride}})
async def delete_override(name: VectorName, request: Request, store: OverridesDep) -> Response:
    """The name is gone, and the content too where it had no other."""
    return await answer_deleted(request, store, name)
