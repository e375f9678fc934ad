"""One job of `/captures`: a data set's activations, written to the store shard by shard.

It plans documents in slices, which run at priority `batch`, two at a time, so that its memory does
not grow with the data set:

    source ──► plan a slice ──► Run ──► buffer ──► shard, sums, index
               16,384 tokens            64 MiB     what is in the index is done

The index is read before it is written: a job whose index says that it is paused, gone or another
server's ends there. So any server of a bucket may pause, resume or delete it.
"""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import orjson
from pydantic import ValidationError
from safetensors.numpy import load, save

from logsteer.errors import APIError, api_error
from logsteer.schemas import ActivationItem
from logsteer.schemas.captures import CaptureIndex, CaptureRequest
from logsteer.schemas.faults import explain
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import CaptureJob
from logsteer_server.interventions.interventions import (
    Interventions,
    NamespaceRegistry,
    Stores,
)
from logsteer_server.interventions.probes import ResolvedProbe, resolve_probes
from logsteer_server.interventions.steering import place_positions
from logsteer_server.keys.keyring import KeyRing
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.stores.captures import (
    CapturedDocument,
    add_shard,
    count_shard_rows,
    lay_out,
    name_sums,
    read_lines,
)
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import digest_request
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.tasks.activations import (
    CaptureSite,
    count_numbers,
    plan_captures,
    read_items,
)
from logsteer_server.tasks.planning import Capacity, Planner
from logsteer_server.tasks.reduction import Reduction
from logsteer_server.tasks.run import Batch, Collector, Run, Task
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.tokenizer import TextCodec

log = logging.getLogger(__name__)

SLICE_TOKENS = 2**14
SLICE_BYTES = 2**25
SLICE_DOCUMENTS = 1024
"""Bounds of what is planned and run at once; a document may go beyond them."""
SLICES = 2
"""That are with the engine at once, so that it need not wait for a shard."""
SHARD_DOCUMENTS = 2**16
MAX_CHARS = 2**20
"""Of a document's text: encoding it takes up to a few hundred bytes each."""
MAX_MOMENT_BYTES = 2**30
SHOWN_TOKENS = 24
RETRY_S = 5.0


class CaptureStoppedError(Exception):
    """The index says that this job must stop here."""


@dataclass(slots=True)
class PlannedDocument(CapturedDocument):
    """A document with its job, unless it has a problem."""

    job: CaptureJob | None = None


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """What a request means for a model as it is now."""

    body: CaptureRequest
    codec: TextCodec
    info: EngineInfo
    site: CaptureSite
    interventions: Interventions
    probes: tuple[ResolvedProbe, ...]

    @classmethod
    def make(cls, body: CaptureRequest, model: ResidentModel, stores: Stores) -> "CapturePlan":
        """Resolve the names of a request; it blocks. Errors: APIError that refuses it."""
        codec, info = model.require()
        if body.special_tokens == "text":
            codec = codec.literal
        where = place_positions(body.positions)
        site = CaptureSite.resolve(body.hook, body.layers, body.read, info, where, codec.bos_id)
        layers = site.capture.layers
        asked = body.reduce
        probes = resolve_probes(asked.top if asked else None, stores.vectors, info)
        for one in probes:
            if one.probe.hook != body.hook or one.probe.layer not in layers:
                detail = (
                    f"{one.name or one.sha256[:12]} reads {one.probe.hook} of layer "
                    f"{one.probe.layer}, which is not captured: name its layers, or capture those."
                )
                raise api_error("invalid_request", detail, param="reduce.top")
        size = 8 * len(layers) * site.width**2
        if asked is not None and asked.covariance and size > MAX_MOMENT_BYTES:
            detail = f"The covariances take {size} bytes, at most {MAX_MOMENT_BYTES}: fewer layers."
            raise api_error("payload_too_large", detail, param="reduce.covariance")
        interventions = Interventions.resolve(body, stores, info, codec)
        return cls(body, codec, info, site, interventions, probes)

    @property
    def writes(self) -> bool:
        """Whether activations are written."""
        asked = self.body.shards
        return self.body.reduce is None if asked is None else asked

    @property
    def changes(self) -> str:
        """A digest of the stored contents that decide what is computed."""
        own, probes = self.interventions, [one.sha256 for one in self.probes]
        vectors = own.steering.vectors if own.steering else ()
        used = [one.used if one else None for one in (own.override, own.adapter)]
        steered = [vector.sha256 for vector in vectors]
        return digest_request("changes", steering=steered, used=used, probes=probes)

    def plan(self, number: int, line: bytes) -> PlannedDocument:
        """Plan a line; what is wrong with it is its problem."""
        found, body = PlannedDocument(number), self.body
        try:
            row = read_row(line)
            if isinstance(row, str) and len(row) > MAX_CHARS:
                detail = f"It has {len(row)} characters, at most {MAX_CHARS}: split it."
                raise api_error("payload_too_large", detail)
            form = ChatForm.of(body, is_whole=True)
            (tokens,) = read_items([row], body.bos, self.codec, self.info.vocab_size, form)
            place, length = f"document {number}", body.max_length or len(tokens)
            (found.job,), (excess,) = plan_captures(
                [tokens[:length]], [place], self.site, self.info, lambda _: None, body.on_overflow
            )
            found.tokens, found.is_cut = found.job.tokens, excess > 0 or length < len(tokens)
        except APIError as error:
            found.problem = error
        return found

    def plan_slice(
        self, lines: Iterator[tuple[int, bytes]], max_bytes: int
    ) -> list[PlannedDocument]:
        """Plan the next documents; none at the end of the data set."""
        found: list[PlannedDocument] = []
        tokens = size = 0
        for number, line in lines:
            found.append(document := self.plan(number, line))
            tokens += len(document.tokens)
            if document.job is not None:
                size += 4 * count_numbers([document.job], self.site.width)
            if tokens >= SLICE_TOKENS or size >= max_bytes or len(found) >= SLICE_DOCUMENTS:
                break
        return found


def read_row(line: bytes) -> str | ActivationItem:
    """Return what a line of a data set holds. Errors: APIError `invalid_request`."""
    form = 'write {"text": …}, {"token_ids": […]}, {"messages": […]}, or a text in quotation marks'
    try:
        row = orjson.loads(line)
        if isinstance(row, dict):
            known = {name: row[name] for name in ActivationItem.model_fields if name in row}
            row = row["text"] if "text" in row else ActivationItem.model_validate(known)
    except (orjson.JSONDecodeError, ValidationError) as error:
        told = f"It is not JSON: {error}"
        if isinstance(error, ValidationError):
            told = explain(error, ActivationItem)
        raise api_error("invalid_request", f"{told}; {form}.") from None
    if isinstance(row, str | ActivationItem):
        return row
    raise api_error("invalid_request", f"It has no text: {form}.")


class CaptureTask(Task):
    """The activations of a slice of a data set."""

    kind = "capture"

    def __init__(
        self, model: ResidentModel, plan: CapturePlan, documents: Sequence[PlannedDocument]
    ) -> None:
        super().__init__(model)
        self.interventions = plan.interventions
        self._width = plan.site.width
        self._documents = documents
        self.results = []  # documents have their outputs

    def check_limits(self, settings: Settings) -> None:
        """Leave the bounds to what plans the slice."""

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Capture all documents in one batch."""
        found = [one.job for one in self._documents if one.job is not None]
        jobs = self.interventions.apply(found)
        planner.hold_activations(count_numbers(jobs, self._width))
        collector = Collector()
        yield Batch(jobs, collector.take)
        for document, output in zip(self._documents, collector.outputs, strict=True):
            document.activations = output.activations


@dataclass(slots=True)
class CaptureHost:
    """What jobs of this server run with, and where their files are."""

    settings: Settings
    objects: Objects
    threads: StoreThreads
    models: ModelRegistry
    capacity: Capacity
    namespaces: NamespaceRegistry
    keys: KeyRing

    @property
    def server(self) -> str:
        """What this server is called in an index; it is the same after a restart."""
        own = sha256(str(self.settings.store_path).encode()).hexdigest()[:8]
        return f"{socket.gethostname()}:{self.settings.port}/{own}"

    def is_own(self, index: CaptureIndex) -> bool:
        """Return whether a job is to run on this server."""
        return index.state == "running" and index.server == self.server


async def retry(work: Any) -> Any:
    """Return what `work` returns, tried again while it may pass. Errors: APIError."""
    while True:
        try:
            return await work()
        except APIError as error:
            if not error.retryable:
                raise
            await asyncio.sleep(error.retry_after or RETRY_S)


class CaptureJobRun:
    """One job from where its index says that it is to its end."""

    def __init__(self, host: CaptureHost, namespace: str | None, index: CaptureIndex) -> None:
        self._host = host
        self._caller = host.keys.find_caller(namespace, f"capture-{index.name}")
        self._store = host.namespaces.find_captures(self._caller)
        self._index = index
        self._threads = host.threads
        self._buffer: list[PlannedDocument] = []
        self._rows = 0
        self._since = time.monotonic()
        self._reduction: Reduction | None = None

    @property
    def _model(self) -> ResidentModel:
        return self._host.models.find(self._index.model)

    async def finish(self) -> None:
        """Capture what is left. Errors: APIError that fails the job; CaptureStoppedError."""
        host, index = self._host, self._index
        self._plan = plan = await retry(self._make_plan)
        if plan.body.reduce is not None:
            await retry(partial(self._threads.run, self._open_reduction, plan))
        open_source = partial(self._store.open_source, index.name, index.source)
        file = await retry(partial(self._threads.run, open_source))
        most_rows = min(plan.body.shard_rows, count_shard_rows(index))
        max_bytes = min(SLICE_BYTES, host.settings.max_activation_bytes // 2)
        running: deque[asyncio.Task[list[PlannedDocument]]] = deque()
        try:
            lines = read_lines(file, index.documents)
            while True:
                while len(running) < SLICES:
                    documents = await host.capacity.call_long(plan.plan_slice, lines, max_bytes)
                    if not documents:
                        break
                    running.append(asyncio.create_task(self._run_slice(documents)))
                if not running:
                    break
                for document in await running[0]:
                    self._buffer.append(document)
                    self._rows += document.num_rows
                    if self._rows >= most_rows or len(self._buffer) >= SHARD_DOCUMENTS:
                        await self._commit()
                running.popleft()
            await self._commit(is_last=True)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            file.close()

    async def _make_plan(self) -> CapturePlan:
        body = CaptureRequest.model_validate(self._index.request)
        stores = await self._host.namespaces.find(self._caller)
        plan = await self._host.capacity.call_long(CapturePlan.make, body, self._model, stores)
        if (plan.info.weights_digest, plan.changes) != (
            self._index.weights_digest,
            self._index.changes,
        ):
            detail = (
                "The model's weights, or vectors, override or adapter that it runs under, are "
                "others than at the beginning: capture under another name."
            )
            raise api_error("exists", detail)
        return plan

    def _open_reduction(self, plan: CapturePlan) -> None:
        assert plan.body.reduce is not None
        sums: Mapping[str, Any] = {}
        if self._index.shards:
            file = name_sums(len(self._index.shards) - 1)
            sums = load(self._store.objects.read(self._store.locate(self._index.name, file)))
        self._reduction = Reduction(
            plan.body.reduce, plan.probes, plan.codec.bos_id, sums, self._index.reduced
        )

    async def _run_slice(self, documents: list[PlannedDocument]) -> list[PlannedDocument]:
        """Run a slice, and its documents one by one where it fails as a whole."""
        own = [document for document in documents if document.problem is None]
        if not own:
            return documents

        task = CaptureTask(self._model, self._plan, own)
        try:
            await retry(lambda: Run(task, self._host.capacity, self._caller).finish())
        except APIError as error:
            await retry(self._check_model)  # one that fails is no document's problem
            if len(own) == 1:
                own[0].problem = error
            else:
                for document in own:
                    await self._run_slice([document])
        await retry(self._check_model)
        return documents

    async def _check_model(self) -> None:
        _, info = self._model.require()
        if info.weights_digest != self._index.weights_digest:
            detail = f"Model {self._index.model} was replaced by other weights meanwhile."
            raise api_error("exists", detail)

    # ------------------------------------------------------------------ shards

    async def _commit(self, is_last: bool = False) -> None:
        """Write a shard of what is in the buffer, then the index, to the end of both."""
        part = await self._host.capacity.call_long(self._make_part, is_last)
        writing = asyncio.ensure_future(retry(partial(self._threads.run, self._write, *part)))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # Whoever stops the job writes the index after this has.
            await asyncio.wait([writing])
            raise
        self._index, self._buffer, self._rows = part[0], [], 0
        self._since = time.monotonic()

    def _make_part(self, is_last: bool) -> tuple[CaptureIndex, dict[str, bytes]]:
        """Return the index with the buffer's documents as its next shard, and the shard's files."""
        index, documents = self._index, self._buffer
        seconds = index.seconds + time.monotonic() - self._since
        changed: dict[str, Any] = {"seconds": seconds, "state": "done" if is_last else "running"}
        files: dict[str, bytes] = {}
        if documents:
            tensors = lay_out(index, documents)
            index, files = add_shard(index, documents, tensors, writes=self._plan.writes)
            if self._reduction is not None:
                self._add(self._reduction, tensors)
                changed["reduced"] = self._reduction.describe()
                files[name_sums(len(index.shards) - 1)] = save(self._reduction.sums)
        return index.model_copy(update=changed), files

    def _add(self, reduction: Reduction, tensors: Mapping[str, Any]) -> None:
        """Add a shard's rows to the statistics."""
        plan = self._plan
        layers = {n: tensors[f"{plan.body.hook}.{n}"] for n in plan.site.capture.layers}
        columns = [tensors[name] for name in ("document", "position", "token_ids")]
        rows_N3 = np.stack(columns, axis=1)
        tokens = {one.number: one.tokens for one in self._buffer}

        def write(row: int) -> str:
            own, end = tokens[int(rows_N3[row, 0])], int(rows_N3[row, 1]) + 1
            shown = own[max(0, end - SHOWN_TOKENS) : end] if end else own[:SHOWN_TOKENS]
            return str(plan.codec.decode(shown.tolist()))

        reduction.add(layers, rows_N3, write)

    def _write(self, index: CaptureIndex, files: Mapping[str, bytes]) -> None:
        """Write a shard's files, then the index that lists it, if this job is still wanted here.

        Errors: CaptureStoppedError.
        """
        store, name = self._store, index.name
        store.write_files(name, files)
        there = store.find(name)
        if there is None or not self._host.is_own(there) or there.digest != index.digest:
            if there is None:
                store.remove(name, files.__contains__)
            raise CaptureStoppedError
        store.write_index(index)
        if self._reduction is not None:
            # Who reads the index of before may still ask for the last but one.
            with suppress(FileNotFoundError):
                store.objects.remove(store.locate(name, name_sums(len(index.shards) - 3)))
