"""What a server does for its stores beside requests: sweep, count, see that a bucket answers."""

import asyncio
import logging
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from logsteer.errors import APIError
from logsteer_server.observation.readings import DiskReading, StoreReading
from logsteer_server.settings import Settings
from logsteer_server.stores.namespace import KEYS_DIRECTORY
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import KINDS, Store
from logsteer_server.stores.threads import StoreThreads

log = logging.getLogger(__name__)

PROBE_EVERY_S = 5.0
READ_EVERY_S = 60.0
LIST_EVERY_S = 600.0
"""A bucket is listed for its bytes, which costs calls."""
WAIT_S = 0.5
"""What whoever asks waits for a disk or a bucket; what comes later is there for the next one."""
SHARED_BYTES = 2**40
"""What everybody's store of a kind may hold: who writes there owns the machine or has the scope
admin, so the disk is the bound."""


def open_stores(objects: Objects, grace_s: float) -> Iterator[Store[Any]]:
    """Yield the stores that have anything, of everybody and of each key."""
    prefixes = set()
    for entry in objects.list(""):
        parts = entry.place.split("/")
        if parts[0] == KEYS_DIRECTORY and len(parts) > 2:
            prefixes.add(f"{KEYS_DIRECTORY}/{parts[1]}/")
    for prefix in ("", *sorted(prefixes)):
        for kind in KINDS:
            yield Store(kind, objects, SHARED_BYTES, prefix, grace_s)


class StoreUpkeep:
    """Sweeps the stores about every half `store_grace_s`; says what they hold, and whether they
    answer. It is used from one event loop.
    """

    def __init__(self, settings: Settings, objects: Objects, threads: StoreThreads) -> None:
        self._settings = settings
        self._objects = objects
        self._threads = threads
        self.reading = DiskReading()
        self._read_at = self._probed_at = float("-inf")
        self._every_s = READ_EVERY_S if objects.is_local else LIST_EVERY_S
        self._sweeping: asyncio.Task[None] | None = None
        self._work: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin to sweep."""
        self._sweeping = asyncio.create_task(self._sweep())

    def close(self) -> None:
        """Sweep and ask no more."""
        for task in (self._sweeping, *self._work.values()):
            if task is not None:
                task.cancel()

    async def _sweep(self) -> None:
        while True:
            try:
                await self._threads.run(sweep, self._objects, self._settings.store_grace_s)
            except APIError as error:
                log.warning("the stores were not swept: %s", error.detail)
            # Servers that were started together do not sweep together.
            await asyncio.sleep(self._settings.store_grace_s * random.uniform(0.4, 0.6))  # noqa: S311

    @property
    def is_local(self) -> bool:
        """Whether the stores are in a directory, which no bucket's outage concerns."""
        return self._objects.is_local

    async def find_trouble(self) -> str | None:
        """Return why a bucket did not answer when it was last asked; None where it did."""
        if not self._objects.is_local and time.monotonic() - self._probed_at >= PROBE_EVERY_S:
            await self._wait("probe", self._probe)
        return self._objects.trouble

    async def refresh(self) -> None:
        """Read what the stores hold where that was long ago, and wait for it a little."""
        if time.monotonic() - self._read_at >= self._every_s:
            await self._wait("read", self._read)

    async def _wait(self, name: str, begin: Any) -> None:
        """Begin a work that is not at work, and wait for it a little."""
        if name not in self._work:
            self._work[name] = asyncio.create_task(begin())
            self._work[name].add_done_callback(lambda _: self._work.pop(name, None))
        await asyncio.wait({self._work[name]}, timeout=WAIT_S)

    async def _probe(self) -> None:
        with suppress(APIError):
            await self._threads.run(self._objects.probe)
        self._probed_at = time.monotonic()

    async def _read(self) -> None:
        try:
            self.reading = await self._threads.run(read_disk, self._settings, self._objects)
        except APIError:
            log.warning("what the stores hold is not known: they do not answer")
        self._read_at = time.monotonic()


def sweep(objects: Objects, grace_s: float) -> list[str]:
    """Remove what killed servers left, and old contents without a name; return their places.

    Errors: those of `Objects`.
    """
    objects.remove_left_overs()
    swept = [place for store in open_stores(objects, grace_s) for place in store.sweep()]
    for place in swept:
        log.info("removed %s, which no name points to", place)
    return swept


def read_disk(settings: Settings, objects: Objects) -> DiskReading:
    """Return what the stores and the result cache's file hold, and what is free. Blocks.

    Errors: those of `Objects`.
    """
    bytes_by_kind: Counter[tuple[bool, str]] = Counter()
    for entry in objects.list(""):
        parts = entry.place.split("/")
        if len(parts) >= 3 and parts[-2] == "contents":
            bytes_by_kind[parts[0] == KEYS_DIRECTORY, parts[-3]] += entry.size
    free = size = None
    with suppress(OSError):
        root = objects.root
        usage = shutil.disk_usage(next(p for p in (root, *root.parents) if p.exists()))
        free, size = usage.free, usage.total
    file_bytes = None
    if settings.cache_file is not None:
        with suppress(OSError):
            path = settings.directory / settings.cache_file.expanduser()
            file_bytes = path.stat().st_size
    stores = [
        StoreReading(
            kind.plural,
            bytes_by_kind[False, kind.plural],
            bytes_by_kind[True, kind.plural],
            SHARED_BYTES,
        )
        for kind in KINDS
    ]
    return DiskReading(stores, free, size, file_bytes)
