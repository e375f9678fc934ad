"""`/vectors`: steering vectors, stored by name: uploaded, downloaded and combined."""

import asyncio
from typing import Annotated

from fastapi import Query, Request, Response

from logsteer.schemas import (
    CombineRequest,
    ContentFormat,
    VectorAbout,
    VectorCard,
    VectorFormat,
    VectorPart,
)
from logsteer.schemas.steering import VectorName
from logsteer_server.http.dependencies import (
    FileReadersDep,
    SettingsDep,
    VectorsDep,
    read_upload,
)
from logsteer_server.http.respond import answer, run_within
from logsteer_server.routes.resources import VECTOR_RESOURCE, describe_file, make_router
from logsteer_server.stores.formats.vector_file import MEDIA_TYPES, read_file, write_file
from logsteer_server.stores.layer_vectors import invalid_vector
from logsteer_server.stores.vectors import StoredVectors, VectorStore
from logsteer_server.tasks.training import combine_vectors

router = make_router(VECTOR_RESOURCE)

FORMAT_OF_FILE = Query(description="null: what the file looks like.")


@router.get(
    "/vectors/{name:stored}/content",
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
    card = await asyncio.to_thread(store.files.describe, name)
    found = await asyncio.to_thread(store.find, name)
    hint = card.about.model_hint or card.about.model
    headers = {
        "ETag": f'"{found.sha256}{"" if format == "safetensors" else "-" + format}"',
        "Content-Disposition": f'attachment; filename="{name.rpartition("/")[2]}.{format}"',
    }
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": headers["ETag"]})
    content = await asyncio.to_thread(write_file, found.vectors, format, hint)
    return Response(content, headers=headers, media_type=MEDIA_TYPES[format])


@router.put(
    "/vectors/{name:stored}",
    responses={200: {"model": VectorCard}},
    openapi_extra=describe_file(
        "The file as it is: safetensors, GGUF, or a dictionary that torch.save has written."
    ),
)
async def upload_vector(
    name: VectorName,
    request: Request,
    settings: SettingsDep,
    store: VectorsDep,
    readers: FileReadersDep,
    format: Annotated[VectorFormat | None, FORMAT_OF_FILE] = None,  # noqa: A002
) -> Response:
    """Store the file's vector under this name, whatever the name stood for before."""
    store.files.check_writing(name)
    chunks = read_upload(request, settings.max_vector_bytes, "max_vector_bytes")
    data = b"".join([chunk async for chunk in chunks])
    if not data:
        raise invalid_vector("the body is empty; send the file's bytes.")
    work = _read_and_put(name, data, format, store, readers)
    card = await run_within(request, settings.request_timeout_s, work)
    return answer(request, card.model_dump())


async def _read_and_put(
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


@router.post("/vectors/{name:stored}/combine", responses={200: {"model": VectorCard}})
async def combine_vector(
    name: VectorName, body: CombineRequest, request: Request, store: VectorsDep
) -> Response:
    """A weighted sum of stored vectors, stored under this name."""
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
