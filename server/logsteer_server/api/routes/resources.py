"""What stored kinds have alike as endpoints: cards, deletion, uploads of files and of forms."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from logsteer.errors import api_error
from logsteer.schemas import Deleted
from logsteer.schemas.steering import VectorName
from logsteer_server.api.dependencies import (
    ModelsDep,
    StoresDep,
    StoreThreadsDep,
    find_base,
)
from logsteer_server.api.respond import answer, run_within
from logsteer_server.api.routing import KeyedRoute
from logsteer_server.interventions.interventions import Stores
from logsteer_server.interventions.references import find_fitting
from logsteer_server.interventions.variants import check_unused
from logsteer_server.stores.objects import Upload, report_faults
from logsteer_server.stores.store import (
    C,
    Kind,
    Namespace,
    Store,
    StoredContent,
    digest_request,
)
from logsteer_server.stores.threads import FairTurns, StoreThreads

WRITTEN_AT_ONCE = 2**22
"""Bytes that are collected before a thread writes them."""
READ_BYTES = 2**26
"""Memory for reading a file of tensors in pieces, with a header of the largest size."""
MAX_SIDE_BYTES = 2**22
"""Bytes of a file other than weights."""
WEIGHTS = "weights"
UPLOAD_LIMIT = "max_upload_bytes"
"""The setting that limits uploads of all kinds but vectors."""
OVERWRITE = Query(
    description="Whether to replace what another request has stored under this name, which is "
    "otherwise refused: `exists`. The same request again gets the same answer."
)

T = TypeVar("T")


Choose = Callable[[list[Any]], list[Any]]
"""Returns the cards that a list shows, of all."""


async def keep_all() -> Choose:
    """Return a function that selects all cards."""
    return list


async def choose_fitting(
    request: Request,
    models: ModelsDep,
    model: Annotated[str | None, Query(description="List what fits this model alone.")] = None,
) -> Choose:
    """Return a function that selects all vectors, or those of a model. Errors: those of `find`."""
    if model is None:
        return list
    _, info = models.find(await find_base(request, model)).require()
    return partial(find_fitting, info=info)


def make_router(
    kind: Kind[C],
    listed: type[BaseModel],
    deletion: str = "",
    choose: Callable[..., Awaitable[Choose]] = keep_all,
) -> APIRouter:
    """Return a router that lists a kind's cards, shows one and deletes one.

    `deletion`: what else its documentation says of a deletion; `choose`: a list's dependency, which
    returns the function that selects its cards.
    """
    every, one = f"/{kind.plural}", f"/{kind.plural}/{{name:stored}}"
    router = APIRouter(route_class=KeyedRoute, tags=[kind.plural])

    def find(stores: Stores) -> Namespace[C]:
        found: Namespace[C] = getattr(stores, kind.plural)
        return found

    @router.get(
        every,
        name=f"list_{kind.plural}",
        description=f"The card of every stored {kind.noun}, by name.",
        responses={200: {"model": listed}},
    )
    async def list_all(
        request: Request,
        stores: StoresDep,
        threads: StoreThreadsDep,
        chosen: Annotated[Choose, Depends(choose)],
    ) -> Response:
        store = find(stores)
        listing = await threads.run(store.list_all)
        document = {
            kind.plural: [card.model_dump() for card in chosen(listing.cards)],
            "damaged": listing.damaged,
            "bytes": listing.num_bytes,
            "max_bytes": store.own.max_bytes,
        }
        return answer(request, document)

    @router.get(
        one,
        name=f"show_{kind.noun}",
        description=f"The card of one stored {kind.noun}.",
        responses={200: {"model": kind.card}},
    )
    async def show(
        name: VectorName, request: Request, stores: StoresDep, threads: StoreThreadsDep
    ) -> Response:
        card, _ = await threads.run(find(stores).look_up, name)
        return answer(request, card.model_dump())

    @router.delete(
        one,
        name=f"delete_{kind.noun}",
        description="The name is gone. Its content goes too where no other name has it: at once "
        "where it is old, else within a few hours (`store_grace_s`)." + deletion,
        responses={200: {"model": Deleted}},
    )
    async def delete(
        name: VectorName, request: Request, stores: StoresDep, threads: StoreThreadsDep
    ) -> Response:
        def work() -> str | None:
            check_unused(kind.noun, name, stores)
            return find(stores).of_writable(name).delete(name)

        sha256 = await threads.run(work)
        return answer(request, {"name": name, "sha256": sha256})

    return router


def describe_file(description: str) -> dict[str, Any]:
    """Return the OpenAPI description of a request whose body is a file."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


def check_size(request: Request, size: int, setting: str) -> None:
    """Refuse an upload larger than a setting allows. Errors: APIError `payload_too_large`."""
    limit = getattr(request.app.state.settings, setting)
    if size > limit:
        detail = f"The file is larger than {limit} bytes: raise {setting} to take it."
        raise api_error("payload_too_large", detail)


async def read_upload(
    request: Request, upload: Upload, setting: str
) -> AsyncGenerator[bytes, None]:
    """Yield the body of an upload, piece by piece. Errors: as `check_size`, and `Upload.check`."""
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        check_size(request, size, setting)
        upload.check(size)
        yield chunk


@asynccontextmanager
async def open_upload(
    request: Request,
    receive: Callable[[str, int], Upload],
    name: str,
    threads: StoreThreads,
    setting: str = UPLOAD_LIMIT,
) -> AsyncIterator[Upload]:
    """Open a file for an upload; it is closed afterwards, and removed if it was not stored.

    `receive` opens it, given the bytes announced: see `Store.receive`. Nothing is read of what is
    too large, or what the store has no room for. Errors: APIError `payload_too_large`.
    """
    header = request.headers.get("content-length", "")
    announced = int(header) if header.isdecimal() else 0
    check_size(request, announced, setting)
    upload = await threads.run(receive, name, announced)
    try:
        yield upload
    finally:
        await asyncio.to_thread(upload.discard)  # as a store thread it might be refused


async def write_body(
    request: Request, upload: Upload, threads: StoreThreads, setting: str = UPLOAD_LIMIT
) -> None:
    """Write a request's body to the file. Errors: those of `read_upload` and of `Upload.write`."""
    waiting = bytearray()
    async for chunk in read_upload(request, upload, setting):
        waiting += chunk
        if len(waiting) >= WRITTEN_AT_ONCE or not chunk:
            await threads.run(upload.write, bytes(waiting))
            waiting.clear()
    if waiting:
        await threads.run(upload.write, bytes(waiting))


@asynccontextmanager
async def take_turn(request: Request, num_bytes: int) -> AsyncIterator[None]:
    """Wait for the caller's turn to work on stored files; reserve its memory for so long.

    Errors: APIError `overloaded` and `payload_too_large`, as `Reservation.cover`.
    """
    state = request.app.state
    turns: FairTurns = state.store_turns
    async with turns.take(request.state.caller.routing.tenant):
        with state.capacity.memory.enter() as room:
            room.cover(num_bytes)
            yield


async def answer_upload(
    request: Request,
    name: str,
    upload: Upload,
    store: Store[C],
    read: Callable[[Path], T],
    check: Callable[[StoredContent, T], Awaitable[C]],
    *,
    overwrite: bool,
    **asked: Any,
) -> Response:
    """Store an upload for a name that is written, and answer with the name's card.

    `read` says what the file holds; `check` gets where engines find it and that, has the model's
    engine look at it, and makes the card. `asked` is what else of the request decides what is made.
    """
    threads: StoreThreads = request.app.state.store_threads

    async def store_it() -> C:
        async with take_turn(request, READ_BYTES):
            sha256 = await threads.run(upload.finish)
            digest = digest_request("put", sha256=sha256, **asked)
            there = await threads.run(store.find_repeat, name, digest, overwrite=overwrite)
            if there is not None:
                return there
            content = await threads.run(read, upload.path)
        card = await check(StoredContent(None, sha256, str(upload.path)), content)
        return await threads.run(store.put, upload, card, digest, overwrite=overwrite)

    card = await run_within(request, request.app.state.settings.request_timeout_s, store_it())
    return answer(request, card.model_dump())


def describe_form(description: str, required: Mapping[str, str], *further: str) -> dict[str, Any]:
    """Return the OpenAPI description of a request whose body is a form of files."""
    files = {part: {"type": "string", "format": "binary"} for part in (*required, *further)}
    schema = {"type": "object", "required": list(required), "properties": files}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


@asynccontextmanager
async def open_form(
    request: Request,
    upload: Upload,
    required: Mapping[str, str],
    *further: str,
) -> AsyncIterator[dict[str, UploadFile]]:
    """Give the files in the body by part, and close them afterwards.

    `required` is part -> what the file is called. `upload` reserves the bytes of the body. Errors:
    APIError for a form without a required file or with a file beside the weights that is too large.
    """
    max_files = len(required) + len(further)
    try:
        # The parser keeps files in the system's directory for temporary files.
        with report_faults(Path(tempfile.gettempdir())):
            body = read_upload(request, upload, UPLOAD_LIMIT)
            parser = MultiPartParser(request.headers, body, max_files=max_files, max_fields=0)
            form = await parser.parse()
    except (KeyError, MultiPartException) as error:
        detail = f"The body is not a form of {max_files} files: {error}."
        raise api_error("invalid_request", detail) from error
    try:
        files = {
            part: file
            for part in (*required, *further)
            if isinstance(file := form.get(part), UploadFile)
        }
        if not required.keys() <= files.keys():
            told = ", ".join(f"{file} as {part}" for part, file in required.items())
            raise api_error("invalid_request", f"Send the files {told}.")
        for part, file in files.items():
            if part != WEIGHTS and (file.size is None or file.size > MAX_SIDE_BYTES):
                named = required.get(part, part)
                detail = f"{part} is larger than {MAX_SIDE_BYTES} bytes; send {named}."
                raise api_error("payload_too_large", detail)
        yield files
    finally:
        await form.close()
