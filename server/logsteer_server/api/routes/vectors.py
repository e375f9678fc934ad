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
from logsteer_server.api.dependencies import (
    FileReadersDep,
    SettingsDep,
    StoreThreadsDep,
    VectorsDep,
)
from logsteer_server.api.respond import answer, run_within
from logsteer_server.api.routes.resources import (
    VECTOR_RESOURCE,
    UploadLimit,
    describe_file,
    make_router,
    open_upload,
    write_body,
)
from logsteer_server.stores.formats.vector_file import MEDIA_TYPES, ReadFile, read_file, write_file
from logsteer_server.stores.layer_vectors import invalid_vector
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.stores.upload import Upload
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
    threads: StoreThreadsDep,
    format: Annotated[ContentFormat, Query()] = "safetensors",  # noqa: A002
) -> Response:
    """The vector as a file: safetensors, or a GGUF control vector for llama.cpp and repeng."""
    card = await threads.run(store.files.describe, name)
    found = await threads.run(store.find, name)
    hint = card.about.model_hint or card.about.model
    headers = {
        "ETag": f'"{found.sha256}{"" if format == "safetensors" else "-" + format}"',
        "Content-Disposition": f'attachment; filename="{name.rpartition("/")[2]}.{format}"',
    }
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": headers["ETag"]})
    content = await threads.run(write_file, found.vectors, format, hint)
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
    threads: StoreThreadsDep,
    readers: FileReadersDep,
    format: Annotated[VectorFormat | None, FORMAT_OF_FILE] = None,  # noqa: A002
) -> Response:
    """Store the file's vector under this name, whatever the name stood for before."""
    limit = UploadLimit(settings.max_vector_bytes, "max_vector_bytes")
    async with open_upload(request, store.files, name, limit, threads) as upload:
        await write_body(request, upload, limit, threads)
        if not upload.size:
            raise invalid_vector("the body is empty; send the file's bytes.")
        reading = _read(upload, format, threads, readers)
        read = await run_within(request, settings.request_timeout_s, reading)
    # What is stored is written anew, in the one form that contents have.
    about = VectorAbout(source="upload", format=read.format, model_hint=read.model_hint)
    card = await threads.run(store.put, name, read.vectors, about)
    return answer(request, card.model_dump())


async def _read(
    upload: Upload, given: VectorFormat | None, threads: StoreThreads, readers: asyncio.Semaphore
) -> ReadFile:
    async with readers:
        return await threads.run(lambda: read_file(upload.path.read_bytes(), given))


@router.post(
    "/vectors/{name:stored}/combine",
    responses={200: {"model": VectorCard}},
)
async def combine_vector(
    name: VectorName,
    body: CombineRequest,
    request: Request,
    store: VectorsDep,
    threads: StoreThreadsDep,
) -> Response:
    """A weighted sum of stored vectors, stored under this name."""
    card = await threads.run(_combine, name, body, store)
    return answer(request, card.model_dump())


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
