"""`/vectors`: steering vectors, stored by name: uploaded, downloaded and combined."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Annotated

from fastapi import Query, Request, Response
from fastapi.responses import StreamingResponse

from logsteer.schemas import (
    CombineRequest,
    ContentFormat,
    VectorAbout,
    VectorCard,
    VectorFormat,
    VectorList,
    VectorPart,
)
from logsteer.schemas.steering import VectorName
from logsteer_server.api.dependencies import (
    ContentFilesDep,
    SettingsDep,
    StoresDep,
    StoreThreadsDep,
)
from logsteer_server.api.respond import answer, run_within
from logsteer_server.api.routes.resources import (
    OVERWRITE,
    choose_fitting,
    describe_file,
    make_router,
    open_upload,
    take_turn,
    write_body,
)
from logsteer_server.stores.contents import ContentFiles
from logsteer_server.stores.formats.vector_file import MEDIA_TYPES, read_file, write_file
from logsteer_server.stores.layer_vectors import (
    LayerVectors,
    Vector,
    invalid_vector,
    parse_safetensors,
    read_layer,
)
from logsteer_server.stores.objects import report_faults
from logsteer_server.stores.store import VECTORS, StoredContent, digest_request
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.stores.vectors import VectorStore
from logsteer_server.tasks.training import check_parts, combine_layer

router = make_router(VECTORS, VectorList, choose=choose_fitting)

FORMAT_OF_FILE = Query(description="null: what the file looks like.")
READ_MEMORY = 8
"""Bytes that reading a file takes for each of its own: 2 of half precision become 4, which are
copied to be checked, and again to be stored."""
CONVERT_MEMORY = 4
"""The same of writing a content in another format."""
COPIES = 3
"""Of a combination, while it is stored: as it was summed, checked, and written."""
VECTOR_LIMIT = "max_vector_bytes"
"""The setting that limits uploads of vectors."""
SENT_AT_ONCE = 2**18
"""Bytes of a download that are held in memory."""


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
    settings: SettingsDep,
    stores: StoresDep,
    files: ContentFilesDep,
    threads: StoreThreadsDep,
    format: Annotated[ContentFormat, Query()] = "safetensors",  # noqa: A002
) -> Response:
    """The vector as a file: safetensors, or a GGUF control vector for llama.cpp and repeng."""
    card, found = await threads.run(stores.vectors.look_up, name)
    hint = card.about.model_hint or card.about.model
    headers = {
        "ETag": f'"{found.sha256}{"" if format == "safetensors" else "-" + format}"',
        "Content-Disposition": f'attachment; filename="{name.rpartition("/")[2]}.{format}"',
    }
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": headers["ETag"]})

    def open_file() -> IO[bytes]:
        with files.open(VECTORS, found) as path, report_faults(path):
            if format == "safetensors":
                return path.open("rb")
            written = write_file(parse_safetensors(path.read_bytes()), format, hint)
            # A file without a name, so that a slow reader holds no memory.
            converted = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115
            converted.write(written)
            converted.seek(0)
            return converted

    async def open_in_turn() -> IO[bytes]:
        async with take_turn(request, CONVERT_MEMORY * card.bytes):
            return await threads.run(open_file)

    file = await run_within(request, settings.request_timeout_s, open_in_turn())
    headers["Content-Length"] = str(os.fstat(file.fileno()).st_size)
    return StreamingResponse(_read_pieces(file), headers=headers, media_type=MEDIA_TYPES[format])


def _read_pieces(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while piece := file.read(SENT_AT_ONCE):
            yield piece


@router.put(
    "/vectors/{name:stored}",
    responses={200: {"model": VectorCard}},
    openapi_extra=describe_file("The file as it is: safetensors, or a GGUF control vector."),
)
async def upload_vector(
    name: VectorName,
    request: Request,
    settings: SettingsDep,
    stores: StoresDep,
    threads: StoreThreadsDep,
    format: Annotated[VectorFormat | None, FORMAT_OF_FILE] = None,  # noqa: A002
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> Response:
    """Store the file's vector under this name."""
    store = stores.vectors.of_writable(name)
    async with open_upload(request, store.receive, name, threads, VECTOR_LIMIT) as upload:
        await write_body(request, upload, threads, VECTOR_LIMIT)

        async def read_and_store() -> VectorCard:
            sha256 = await threads.run(upload.finish)
            digest = digest_request("put", sha256=sha256, format=format)
            there = await threads.run(store.find_repeat, name, digest, overwrite=overwrite)
            if there is not None:
                return there
            async with take_turn(request, READ_MEMORY * upload.size):
                read = await threads.run(lambda: read_file(upload.path.read_bytes(), format))
                # What is stored is written anew, in the one form that contents have.
                about = VectorAbout(source="upload", format=read.format, model_hint=read.model_hint)
                return await threads.run(
                    stores.vectors.put, name, read.vectors, about, digest, overwrite=overwrite
                )

        card = await run_within(request, settings.request_timeout_s, read_and_store())
    return answer(request, card.model_dump())


@router.post(
    "/vectors/{name:stored}/combine",
    responses={200: {"model": VectorCard}},
)
async def combine_vector(
    name: VectorName,
    body: CombineRequest,
    request: Request,
    settings: SettingsDep,
    stores: StoresDep,
    files: ContentFilesDep,
    threads: StoreThreadsDep,
) -> Response:
    """A weighted sum of stored vectors, stored under this name."""
    work = _combine(name, body, request, stores.vectors, files, threads)
    card = await run_within(request, settings.request_timeout_s, work)
    return answer(request, card.model_dump())


async def _combine(
    name: str,
    body: CombineRequest,
    request: Request,
    store: VectorStore,
    files: ContentFiles,
    threads: StoreThreads,
) -> VectorCard:
    """Sum vectors layer by layer, so that memory is needed for the sum alone."""
    own = store.of_writable(name)

    def look_up(names: Sequence[str]) -> list[tuple[VectorCard, StoredContent]]:
        return [store.look_up(name) for name in names]

    parts = await threads.run(look_up, [part.name for part in body.vectors])
    weights = [part.weight for part in body.vectors]
    others = await threads.run(look_up, body.orthogonal_to)
    cards = [card for card, _ in parts + others]
    check_parts(cards)
    digests = {card.about.weights_digest for card, _ in parts}
    about = VectorAbout(
        source="combination",
        weights_digest=digests.pop() if len(digests) == 1 else None,
        parts=[
            _describe_part(part, weight) for (part, _), weight in zip(parts, weights, strict=True)
        ],
        orthogonal_to=[_describe_part(other, None) for other, _ in others] or None,
    )
    digest = digest_request("combine", **about.model_dump(include={"parts", "orthogonal_to"}))
    there = await threads.run(own.find_repeat, name, digest, overwrite=body.overwrite)
    if there is not None:
        return there
    hook, width = cards[0].hook, cards[0].width
    chosen = sorted({layer for card, _ in parts for layer in card.layers})

    def read(found: StoredContent, layer: int) -> Vector:
        with files.open(VECTORS, found) as path:
            return read_layer(path, layer, hook)

    def combine(layer: int) -> Vector:
        terms = (
            (read(found, layer), weight)
            for (card, found), weight in zip(parts, weights, strict=True)
            if layer in card.layers
        )
        taken = [read(found, layer) for card, found in others if layer in card.layers]
        return combine_layer(terms, taken)

    # A layer's sums are float64; least squares holds the others at that layer three times.
    needed = 4 * COPIES * width * len(chosen) + 8 * width * (4 + 3 * len(others))
    async with take_turn(request, needed):
        layers = {layer: await threads.run(combine, layer) for layer in chosen}
        if not any(vector_D.any() for vector_D in layers.values()):
            raise invalid_vector("nothing is left of this combination: every layer is zero.")
        vectors = LayerVectors(layers, hook)
        return await threads.run(store.put, name, vectors, about, digest, overwrite=body.overwrite)


def _describe_part(card: VectorCard, weight: float | None) -> VectorPart:
    return VectorPart(name=card.name, sha256=card.sha256, weight=weight)
