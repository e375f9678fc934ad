"""`/captures`: the jobs of this server that write activations to the store.

A job is one task of the server that was asked for it. Its index in the store says what it is to do:
what is `running` there, by this server's name, resumes at its next start.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from hashlib import sha256
from typing import IO, Any
from weakref import WeakValueDictionary

import orjson

from logsteer.errors import APIError, api_error
from logsteer.schemas import Deleted
from logsteer.schemas.captures import (
    CaptureIndex,
    CaptureRequest,
    CaptureSource,
    CaptureState,
)
from logsteer_server.keys.caller import Requester
from logsteer_server.stores.captures import (
    SOURCE,
    CaptureStore,
    begin_index,
    read_lines,
    refuse_name,
)
from logsteer_server.stores.objects import Upload
from logsteer_server.stores.store import digest_request, list_keys, name_prefix
from logsteer_server.stores.threads import FairTurns
from logsteer_server.tasks.capture_job import (
    CaptureHost,
    CaptureJobRun,
    CapturePlan,
    CaptureStoppedError,
    retry,
)

log = logging.getLogger(__name__)

RUNNING = 2
"""Jobs that run at once; others wait for their turn."""


class CaptureJobs:
    """The data sets of activations that this server computes. It is used from one event loop."""

    def __init__(self, host: CaptureHost) -> None:
        self._host = host
        self._threads = host.threads
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._turns = FairTurns(RUNNING)
        self.find: Callable[[Requester], CaptureStore] = host.namespaces.find_captures

    def start(self) -> None:
        """Resume what this server was computing when it ended."""
        self._launch("", self._resume_all())

    def _launch(self, place: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[place] = asyncio.create_task(work)

    async def close(self) -> None:
        """Stop all jobs where they are."""
        for place in list(self._tasks):
            await self._stop(place)

    async def _stop(self, place: str) -> None:
        if (task := self._tasks.pop(place, None)) is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _resume_all(self) -> None:
        try:
            for namespace in await retry(lambda: self._threads.run(list_keys, self._host.objects)):
                store = self._open(namespace)
                for index in await retry(partial(self._threads.run, store.list_all)):
                    place = store.locate(index.name)
                    if self._host.is_own(index) and place not in self._tasks:
                        log.info("capture %s resumes at document %d", index.name, index.documents)
                        self._launch(place, self._run(namespace, index))
        except APIError as error:
            log.error("no capture resumes, the store refuses: %s", error.detail)

    def _open(self, namespace: str | None) -> CaptureStore:
        return CaptureStore(self._host.objects, name_prefix(namespace))

    async def _run(self, namespace: str | None, index: CaptureIndex) -> None:
        """Run a job to its end; what fails it is in its index."""
        try:
            async with self._turns.take(namespace or ""):
                await CaptureJobRun(self._host, namespace, index).finish()
            return
        except CaptureStoppedError:
            return
        except APIError as failure:
            reason = failure.detail
        except Exception:
            log.exception("capture %s failed", index.name)
            reason = "A fault of the server; its log has it."
        try:
            await self._threads.run(self._fail, self._open(namespace), index.name, reason)
        except APIError:
            log.exception("the end of capture %s could not be stored", index.name)

    def _fail(self, store: CaptureStore, name: str, reason: str) -> None:
        if (index := store.find(name)) is not None and self._host.is_own(index):
            store.write_index(index.model_copy(update={"state": "failed", "error": reason}))

    # ------------------------------------------------------------------ requests

    async def put_source(
        self, name: str, upload: Upload, caller: Requester, *, overwrite: bool
    ) -> CaptureSource:
        """Store a data set; errors: APIError `exists` where something else was captured of one."""
        store = self.find(caller)
        place = store.locate(name)
        async with self._locks.setdefault(place, asyncio.Lock()):
            digest = await self._threads.run(upload.finish)
            there = await self._threads.run(store.find, name)
            if there is not None and there.source != digest:
                if not overwrite:
                    raise refuse_name(there)
                await self._stop(place)
                await self._threads.run(store.remove, name)
            with upload.path.open("rb") as file:
                documents = await self._threads.run(_count_lines, file)
            await self._threads.run(store.put_source, name, upload, digest)
        return CaptureSource(name=name, sha256=digest, documents=documents, bytes=upload.size)

    async def begin(self, body: CaptureRequest, caller: Requester) -> CaptureIndex:
        """Start a job, or return the one that the same request has started.

        Errors: APIError that refuses it; `exists` where another request has the name.
        """
        store, stores = self.find(caller), await self._host.namespaces.find(caller)
        model = self._host.models.find(body.model)
        body = body.model_copy(update={"model": model.id})
        plan = await self._host.capacity.call_long(CapturePlan.make, body, model, stores)
        place = store.locate(body.name)
        async with self._locks.setdefault(place, asyncio.Lock()):
            if body.overwrite:
                await self._stop(place)
            index, is_new = await self._threads.run(self._write_first, store, plan)
            if is_new:
                self._launch(place, self._run(caller.namespace, index))
        return index

    def _write_first(self, store: CaptureStore, plan: CapturePlan) -> tuple[CaptureIndex, bool]:
        body, name = plan.body, plan.body.name
        asked = body.model_dump(mode="json", exclude={"items", "overwrite"})
        rows = [
            orjson.dumps(
                item if isinstance(item, str) else item.model_dump(mode="json", exclude_none=True)
            )
            + b"\n"
            for item in body.items or ()
        ]
        source = sha256(b"".join(rows)).hexdigest() if rows else store.find_source(name)
        if (there := store.find(name)) is not None and not body.overwrite:
            if there.digest == digest_request("capture", rows=source, **asked):
                return there, False
            raise refuse_name(there)
        if body.source is not None:
            source = store.copy_source(name, body.source.removeprefix("store://"))
        elif rows:
            source = store.write_source(name, rows)
        if source is None:
            detail = f"There is no data set: send items, or PUT it to /captures/{name}/source."
            raise api_error("invalid_request", detail, param="items")
        if there is not None:
            store.remove(name, lambda file: not file.startswith(SOURCE))
        with store.open_source(name, source) as file:
            total = _count_lines(file)
        if not total:
            raise api_error("invalid_request", "The data set has no rows.", param="items")
        index = begin_index(
            plan.site.capture,
            name=name,
            model=str(body.model),
            weights_digest=plan.info.weights_digest,
            dtype=body.dtype,
            width=plan.site.width,
            documents_total=total,
            server=self._host.server,
            request=asked,
            source=source,
            digest=digest_request("capture", rows=source, **asked),
            changes=plan.changes,
        )
        store.write_index(index)
        return index, True

    async def change(self, name: str, caller: Requester, state: CaptureState) -> CaptureIndex:
        """Pause a job, or resume one here; one that is done stays so."""
        store = self.find(caller)
        place = store.locate(name)
        async with self._locks.setdefault(place, asyncio.Lock()):
            index = await self._threads.run(store.read, name)
            if state == "running":
                self._host.models.find(index.model)
            await self._stop(place)
            index = await self._threads.run(store.read, name)
            if index.state != "done":
                changed = {"state": state, "error": None, "server": self._host.server}
                index = index.model_copy(update=changed)
                await self._threads.run(store.write_index, index)
                if state == "running":
                    self._launch(place, self._run(caller.namespace, index))
        return index

    async def delete(self, name: str, caller: Requester) -> Deleted:
        """Stop a job, and remove all of its files, its data set too."""
        store = self.find(caller)
        place = store.locate(name)
        async with self._locks.setdefault(place, asyncio.Lock()):
            source = await self._threads.run(store.find_source, name)
            if source is None:
                await self._threads.run(store.read, name)
            await self._stop(place)
            await self._threads.run(store.remove, name)
        return Deleted(name=name, sha256=source)


def _count_lines(file: IO[bytes]) -> int:
    return sum(1 for _ in read_lines(file))
