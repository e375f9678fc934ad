"""`/vectors`: the steering vectors that are kept, uploaded, downloaded, trained and combined."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from logsteer.schemas import (
    CombineRequest,
    ContentFormat,
    DeletedVector,
    TrainAnswer,
    TrainRequest,
    VectorAbout,
    VectorCard,
    VectorFormat,
    VectorList,
    VectorPart,
)
from logsteer.schemas.steering import VectorName
from logsteer_server.http.dependencies import (
    FileReadersDep,
    LimitedRoute,
    ModelsDep,
    SettingsDep,
    VectorsDep,
    describe_answer,
    read_upload,
)
from logsteer_server.http.respond import answer, respond, run_within
from logsteer_server.stores.formats import MEDIA_TYPES, read_file, write_file
from logsteer_server.stores.layer_vectors import invalid_vector
from logsteer_server.stores.vectors import StoredVectors, VectorStore
from logsteer_server.tasks.train import TrainTask
from logsteer_server.tasks.training import combine_vectors

router = APIRouter(route_class=LimitedRoute, tags=["vectors"])

FORMAT_OF_FILE = Query(description="null: what the file looks like.")


@router.get("/vectors", responses={200: {"model": VectorList}})
async def list_vectors(request: Request, store: VectorsDep) -> Response:
    """The card of every kept vector, by name."""
    cards, total = await asyncio.to_thread(store.list_all)
    vectors = [card.model_dump() for card in cards]
    return answer(request, {"vectors": vectors, "bytes": total, "max_bytes": store.max_bytes})


@router.post("/vectors/train", responses=describe_answer(TrainAnswer))
async def train_vector(
    body: TrainRequest, request: Request, models: ModelsDep, store: VectorsDep
) -> Response:
    """A vector from the activations of contrasting texts, kept under the name given."""
    return await respond(request, TrainTask(body, models.find(body.model), store))


@router.get("/vectors/{name}", responses={200: {"model": VectorCard}})
async def show_vector(name: VectorName, request: Request, store: VectorsDep) -> Response:
    """The card of one kept vector."""
    return answer(request, (await asyncio.to_thread(store.describe, name)).model_dump())


@router.get(
    "/vectors/{name}/content",
    response_class=Response,
    responses={
        200: {
            "description": "The file. The SHA-256 of the safetensors file is the vector's own.",
            "content": {
                media_type: {"schema": {"type": "string", "format": "binary"}}
                for media_type in MEDIA_TYPES.values()
            },
        }
    },
)
async def download_vector(
    name: VectorName,
    request: Request,
    store: VectorsDep,
    format: Annotated[ContentFormat, Query()] = "safetensors",  # noqa: A002
) -> Response:
    """The vector as a file: safetensors, or a GGUF control vector for llama.cpp and repeng."""
    card = await asyncio.to_thread(store.describe, name)
    found = await asyncio.to_thread(store.find, name)
    hint = card.about.model_hint or card.about.model
    headers = {
        "ETag": f'"{found.sha256}{"" if format == "safetensors" else "-" + format}"',
        "Content-Disposition": f'attachment; filename="{name}.{format}"',
    }
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": headers["ETag"]})
    content = await asyncio.to_thread(write_file, found.vectors, format, hint)
    return Response(content, headers=headers, media_type=MEDIA_TYPES[format])


@router.put(
    "/vectors/{name}",
    responses={200: {"model": VectorCard}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "The file as it is: safetensors, GGUF, or a dictionary that torch.save "
            "has written.",
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
)
async def upload_vector(
    name: VectorName,
    request: Request,
    settings: SettingsDep,
    store: VectorsDep,
    readers: FileReadersDep,
    format: Annotated[VectorFormat | None, FORMAT_OF_FILE] = None,  # noqa: A002
) -> Response:
    """Keep the file's vector under this name, whatever the name stood for before."""
    chunks = read_upload(request, settings.max_vector_bytes, "max_vector_bytes")
    data = b"".join([chunk async for chunk in chunks])
    if not data:
        raise invalid_vector("the body is empty; send the file's bytes.")
    work = _keep(name, data, format, store, readers)
    card = await run_within(request, settings.request_timeout_s, work)
    return answer(request, card.model_dump())


async def _keep(
    name: str,
    data: bytes,
    given: VectorFormat | None,
    store: VectorStore,
    readers: asyncio.Semaphore,
) -> VectorCard:
    async with readers:
        read = await asyncio.to_thread(read_file, data, given)
    about = VectorAbout(source="upload", format=read.format, model_hint=read.model_hint)
    return await asyncio.to_thread(store.put, name, read.vectors, about)


@router.delete("/vectors/{name}", responses={200: {"model": DeletedVector}})
async def delete_vector(name: VectorName, request: Request, store: VectorsDep) -> Response:
    """The name is gone, and the content too where it had no other."""
    sha256 = await asyncio.to_thread(store.delete, name)
    return answer(request, {"name": name, "sha256": sha256})


@router.post("/vectors/{name}/combine", responses={200: {"model": VectorCard}})
async def combine_vector(
    name: VectorName, body: CombineRequest, request: Request, store: VectorsDep
) -> Response:
    """A weighted sum of kept vectors, kept under this name."""
    return answer(request, (await asyncio.to_thread(_combine, name, body, store)).model_dump())


def _combine(name: str, body: CombineRequest, store: VectorStore) -> VectorCard:
    parts = [(store.find(part.name), part.weight) for part in body.vectors]
    others = [store.find(other) for other in body.orthogonal_to]
    combined = combine_vectors(
        [(found.vectors, weight) for found, weight in parts], [found.vectors for found in others]
    )
    about = VectorAbout(
        source="combination",
        parts=[_describe_part(found, weight) for found, weight in parts],
        orthogonal_to=[_describe_part(found, None) for found in others] or None,
    )
    return store.put(name, combined, about)


def _describe_part(found: StoredVectors, weight: float | None) -> VectorPart:
    assert found.name is not None
    return VectorPart(name=found.name, sha256=found.sha256, weight=weight)
