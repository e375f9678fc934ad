"""`/captures`: data sets of activations, as jobs of the server."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from safetensors.numpy import save

from logsteer.errors import api_error
from logsteer.schemas import Deleted
from logsteer.schemas.captures import (
    CaptureCard,
    CaptureIndex,
    CaptureList,
    CaptureRequest,
    CaptureSource,
    name_shard,
)
from logsteer.schemas.steering import CaptureName
from logsteer_server.api.dependencies import (
    CapturesDep,
    StoreThreadsDep,
    expand_model,
)
from logsteer_server.api.encoding import SAFETENSORS
from logsteer_server.api.respond import answer
from logsteer_server.api.routes.resources import (
    OVERWRITE,
    describe_file,
    open_upload,
    write_body,
)
from logsteer_server.api.routing import KeyedRoute
from logsteer_server.observation.requests import find_record
from logsteer_server.stores.captures import CaptureStore
from logsteer_server.tasks.reduction import load_moments

router = APIRouter(route_class=KeyedRoute, tags=["captures"])

FILE: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {"content": {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}}
    },
}


@router.put(
    "/captures/{name}/source",
    name="upload_capture_source",
    responses={200: {"model": CaptureSource}},
    openapi_extra=describe_file(
        "JSON lines: each a text, or an object with `text`, `token_ids` or `messages`; other "
        "fields are ignored."
    ),
)
async def put_source(
    name: CaptureName,
    request: Request,
    captures: CapturesDep,
    threads: StoreThreadsDep,
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> Response:
    """Store a data set under this name, for `POST /captures` to read."""
    caller = request.state.caller
    async with open_upload(request, captures.find(caller).receive, name, threads) as upload:
        await write_body(request, upload, threads)
        source = await captures.put_source(name, upload, caller, overwrite=overwrite)
    return answer(request, source.model_dump())


@router.post("/captures", responses={200: {"model": CaptureCard}})
async def start_capture(body: CaptureRequest, request: Request, captures: CapturesDep) -> Response:
    """Start to capture the activations of a data set, or return the job of the same request.

    It runs at priority `batch`, and resumes where it was after a restart of its server.
    """
    find_record(request.scope).stored = body.name
    body, _ = await expand_model(request, body)
    return _show(request, await captures.begin(body, request.state.caller))


@router.get("/captures", name="list_captures", responses={200: {"model": CaptureList}})
async def list_all(request: Request, captures: CapturesDep, threads: StoreThreadsDep) -> Response:
    """Every data set of activations, and how far it has come."""
    found = await threads.run(captures.find(request.state.caller).list_all)
    return answer(request, {"captures": [_make_card(index) for index in found]})


@router.get("/captures/{name}", name="show_capture", responses={200: {"model": CaptureCard}})
async def show(
    name: CaptureName, request: Request, captures: CapturesDep, threads: StoreThreadsDep
) -> Response:
    """How far one data set of activations has come."""
    return _show(request, await threads.run(captures.find(request.state.caller).read, name))


@router.get("/captures/{name}/index", responses={200: {"model": CaptureIndex}})
async def show_capture_index(
    name: CaptureName, request: Request, captures: CapturesDep, threads: StoreThreadsDep
) -> Response:
    """The index of a data set of activations, its shards included."""
    index = await threads.run(captures.find(request.state.caller).read, name)
    return answer(request, index.model_dump())


@router.post("/captures/{name}/pause", responses={200: {"model": CaptureCard}})
async def pause_capture(name: CaptureName, request: Request, captures: CapturesDep) -> Response:
    """Stop a job after its last whole shard, until it is resumed."""
    return _show(request, await captures.change(name, request.state.caller, "paused"))


@router.post("/captures/{name}/resume", responses={200: {"model": CaptureCard}})
async def resume_capture(name: CaptureName, request: Request, captures: CapturesDep) -> Response:
    """Run a job on this server, from its last whole shard on."""
    return _show(request, await captures.change(name, request.state.caller, "running"))


@router.delete("/captures/{name}", name="delete_capture", responses={200: {"model": Deleted}})
async def delete(name: CaptureName, request: Request, captures: CapturesDep) -> Response:
    """Cancel a job, and remove its shards and its data set."""
    return answer(request, (await captures.delete(name, request.state.caller)).model_dump())


@router.get("/captures/{name}/shards/{number}", **FILE)
async def download_capture_shard(
    name: CaptureName,
    number: int,
    request: Request,
    captures: CapturesDep,
    threads: StoreThreadsDep,
) -> Response:
    """A shard as a safetensors file: activations by layer, and which token each row belongs to."""

    def read(store: CaptureStore) -> bytes:
        index = store.read(name)
        if not 0 <= number < len(index.shards) or not (size := index.shards[number].bytes):
            detail = f"Capture {name!r} has no file of shard {number}; its index lists them."
            raise api_error("not_found", detail)
        request.state.memory.add(2 * size)
        return store.objects.read(store.locate(name, name_shard(number)))

    content = await threads.run(read, captures.find(request.state.caller))
    return Response(content, media_type=SAFETENSORS)


@router.get("/captures/{name}/statistics", **FILE)
async def download_capture_statistics(
    name: CaptureName, request: Request, captures: CapturesDep, threads: StoreThreadsDep
) -> Response:
    """Means and covariances so far, of `reduce`: float64 `mean.LAYER` and `covariance.LAYER`."""
    store = captures.find(request.state.caller)
    content = await threads.run(lambda: save(load_moments(store, store.read(name))))
    return Response(content, media_type=SAFETENSORS)


def _make_card(index: CaptureIndex) -> dict[str, object]:
    return index.model_dump(include=set(CaptureCard.model_fields))


def _show(request: Request, index: CaptureIndex) -> Response:
    return answer(request, _make_card(index))
