"""What stored kinds have alike as endpoints: cards, deletion, uploads of files and of forms."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from logsteer.errors import APIError, api_error
from logsteer.schemas import (
    AdapterCard,
    AdapterList,
    Deleted,
    OverrideCard,
    OverrideList,
    SaeCard,
    SaeList,
    VariantCard,
    VariantList,
    VectorCard,
    VectorList,
)
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
from logsteer_server.stores.namespace import Namespace
from logsteer_server.stores.store import (
    ADAPTERS,
    OVERRIDES,
    SAES,
    VARIANTS,
    VECTORS,
    C,
    Kind,
    StoredContent,
    digest_request,
)
from logsteer_server.stores.threads import FairTurns, StoreThreads
from logsteer_server.stores.upload import Upload, report_faults

WRITTEN_AT_ONCE = 2**22
"""Bytes that are collected before a thread writes them."""
READ_BYTES = 2**26
"""Memory for reading a file of tensors in pieces, with a header of the largest size."""
MAX_SIDE_BYTES = 2**22
"""Bytes of a file other than weights."""
WEIGHTS = "weights"
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


@dataclass(frozen=True, slots=True)
class Resource(Generic[C]):
    """A kind of stored content as endpoints: its answers, and where its store is."""

    kind: Kind[C]
    listed: type[BaseModel]
    find: Callable[[Stores], Namespace[C]]
    deletion: str = ""
    """What else its documentation says of a deletion."""
    choose: Callable[..., Awaitable[Choose]] = keep_all
    """A list's dependency, which returns the function that selects its cards."""


VECTOR_RESOURCE: Resource[VectorCard] = Resource(
    VECTORS, VectorList, lambda stores: stores.vectors.files, choose=choose_fitting
)
OVERRIDE_RESOURCE: Resource[OverrideCard] = Resource(
    OVERRIDES, OverrideList, lambda stores: stores.overrides
)
ADAPTER_RESOURCE: Resource[AdapterCard] = Resource(
    ADAPTERS,
    AdapterList,
    lambda stores: stores.adapters,
    "\n\nAn engine that has it loaded forgets it when it needs its place for another.",
)
VARIANT_RESOURCE: Resource[VariantCard] = Resource(
    VARIANTS, VariantList, lambda stores: stores.variants
)
SAE_RESOURCE: Resource[SaeCard] = Resource(SAES, SaeList, lambda stores: stores.saes.names)


def make_router(resource: Resource[C]) -> APIRouter:
    """Return a router that lists a resource's cards, shows one and deletes one."""
    kind = resource.kind
    every, one = f"/{kind.plural}", f"/{kind.plural}/{{name:stored}}"
    router = APIRouter(route_class=KeyedRoute, tags=[kind.plural])

    @router.get(
        every,
        name=f"list_{kind.plural}",
        description=f"The card of every stored {kind.noun}, by name.",
        responses={200: {"model": resource.listed}},
    )
    async def list_all(
        request: Request,
        stores: StoresDep,
        threads: StoreThreadsDep,
        choose: Annotated[Choose, Depends(resource.choose)],
    ) -> Response:
        store = resource.find(stores)
        listing = await threads.run(store.list_all)
        document = {
            kind.plural: [card.model_dump() for card in choose(listing.cards)],
            "damaged": listing.damaged,
            "bytes": listing.num_bytes,
            "max_bytes": store.max_bytes,
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
        card, _ = await threads.run(resource.find(stores).look_up, name)
        return answer(request, card.model_dump())

    @router.delete(
        one,
        name=f"delete_{kind.noun}",
        description="The name is gone. Its content goes too where no other name has it: at once "
        "where it is old, else within a few hours (`store_grace_s`)." + resource.deletion,
        responses={200: {"model": Deleted}},
    )
    async def delete(
        name: VectorName, request: Request, stores: StoresDep, threads: StoreThreadsDep
    ) -> Response:
        def work() -> str | None:
            check_unused(kind.noun, name, stores)
            return resource.find(stores).delete(name)

        sha256 = await threads.run(work)
        return answer(request, {"name": name, "sha256": sha256})

    return router


def describe_file(description: str) -> dict[str, Any]:
    """Return the OpenAPI description of a request whose body is a file."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


@dataclass(frozen=True, slots=True)
class UploadLimit:
    """The bytes that an upload may have, and the setting that says so."""

    max_bytes: int
    setting: str

    def refuse(self) -> APIError:
        """Return the error for an upload that is too large."""
        detail = f"The file is larger than {self.max_bytes} bytes: raise {self.setting} to take it."
        return api_error("payload_too_large", detail)


def read_announced(request: Request) -> int:
    """Return the bytes that a body says to have, 0 where it says nothing."""
    announced = request.headers.get("content-length", "")
    return int(announced) if announced.isdecimal() else 0


async def read_upload(request: Request, limit: UploadLimit) -> AsyncIterator[bytes]:
    """Yield the body of an upload, piece by piece. Errors: APIError `payload_too_large`."""
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit.max_bytes:
            raise limit.refuse()
        yield chunk


class Receiver(Protocol):
    """What opens the file of an upload: see `Store.receive`."""

    def receive(self, name: str, announced: int = 0, /) -> Upload:
        """Open a file for the upload of a name of at least `announced` bytes."""
        ...


@asynccontextmanager
async def open_upload(
    request: Request, store: Receiver, name: str, limit: UploadLimit, threads: StoreThreads
) -> AsyncIterator[Upload]:
    """Open a file for an upload; it is closed afterwards, and removed if it was not stored.

    Nothing is read of what the store has no room for. Errors: APIError `payload_too_large`.
    """
    announced = read_announced(request)
    if announced > limit.max_bytes:
        raise limit.refuse()
    receiving = asyncio.ensure_future(threads.run(store.receive, name, announced))
    try:
        upload = await asyncio.shield(receiving)
    except asyncio.CancelledError:  # the file may come into being all the same
        receiving.add_done_callback(_discard_late)
        raise
    try:
        yield upload
    finally:
        await asyncio.to_thread(upload.discard)  # as a store thread it might be refused


def _discard_late(receiving: "asyncio.Future[Upload]") -> None:
    if not receiving.cancelled() and receiving.exception() is None:
        receiving.result().discard()


async def write_body(
    request: Request, upload: Upload, limit: UploadLimit, threads: StoreThreads
) -> None:
    """Write a request's body to the file. Errors: those of `read_upload` and of `Upload.write`."""
    waiting, size = bytearray(), 0
    async for chunk in read_upload(request, limit):
        size += len(chunk)
        upload.check(size)
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
    store: Namespace[C],
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
    limit: UploadLimit,
    upload: Upload,
    required: Mapping[str, str],
    *further: str,
) -> AsyncIterator[dict[str, UploadFile]]:
    """Give the files in the body by part, and close them afterwards.

    `required` is part -> what the file is called. The body is read up to `limit`, and `upload`
    reserves its bytes. Errors: APIError for a form without a required file or with a file beside
    the weights that is too large.
    """
    form = await _read_form(request, limit, upload, len(required) + len(further))
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


async def _read_form(
    request: Request, limit: UploadLimit, upload: Upload, max_files: int
) -> FormData:
    """Return the form in the body. Errors: APIError, for one that is too large or no form."""
    try:
        with report_faults(Path(tempfile.gettempdir())):
            form = _LimitedForm(request, limit, upload)
            return await form.form(max_files=max_files, max_fields=0)
    except HTTPException as error:
        detail = f"The body is not a form of {max_files} files: {error.detail}."
        raise api_error("invalid_request", detail) from error


class _LimitedForm(Request):
    """A request whose form is read up to a limit of bytes, and to the store's room.

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
            self._upload.check(size)
            yield chunk
