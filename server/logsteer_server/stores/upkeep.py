"""A server's background work for its stores: sweep, measure, probe the bucket."""

import asyncio
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from logsteer.errors import APIError
from logsteer_server.observation.metrics import DiskReading
from logsteer_server.settings import Settings
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import (
    KEYS_DIRECTORY,
    KINDS,
    Store,
    list_keys,
    name_prefix,
    open_all,
)
from logsteer_server.stores.threads import StoreThreads

log = logging.getLogger(__name__)

PROBE_EVERY_S = 5.0
READ_EVERY_S = 60.0
LIST_EVERY_S = 600.0
"""Period of measuring a bucket, which takes a listing and so costs calls."""
SHARED_BYTES = 2**40
"""Limit of the shared store of a kind, larger than disks: its writers own the machine or have the
scope admin."""


def open_stores(objects: Objects, grace_s: float) -> Iterator[Store[Any]]:
    """Yield the shared stores, and those of each key that has stored something."""
    for key in list_keys(objects):
        yield from open_all(objects, SHARED_BYTES, name_prefix(key), grace_s)


class StoreUpkeep:
    """Sweep the stores about every half `store_grace_s`, measure them, and probe the bucket."""

    def __init__(self, settings: Settings, objects: Objects, threads: StoreThreads) -> None:
        self._settings = settings
        self._objects = objects
        self._threads = threads
        self.reading = DiskReading()
        """The latest sizes."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the tasks; call it from the event loop."""
        grace_s = self._settings.store_grace_s
        work: list[tuple[Callable[[], object], float]] = [
            (partial(sweep, self._objects, grace_s), grace_s / 2),
            (self._read, READ_EVERY_S if self._objects.is_local else LIST_EVERY_S),
        ]
        if not self._objects.is_local:
            work.append((self._objects.probe, PROBE_EVERY_S))
        self._tasks = [asyncio.create_task(self._repeat(*each)) for each in work]

    def close(self) -> None:
        """Cancel the tasks."""
        for task in self._tasks:
            task.cancel()

    async def _repeat(self, work: Callable[[], object], every_s: float) -> None:
        while True:
            try:
                await self._threads.run(work)
            except APIError as error:
                log.warning("the stores do not answer: %s", error.detail)
            # So servers that were started together do not sweep together.
            await asyncio.sleep(every_s * random.uniform(0.8, 1.2))  # noqa: S311

    def _read(self) -> None:
        self.reading = read_disk(self._objects)


def sweep(objects: Objects, grace_s: float) -> list[str]:
    """Remove killed servers' uploads, and old contents without a name; return the contents' places.

    Errors: those of `Objects`.
    """
    objects.remove_left_overs()
    swept = [place for store in open_stores(objects, grace_s) for place in store.sweep()]
    for place in swept:
        log.info("removed %s, which no name points to", place)
    return swept


def read_disk(objects: Objects) -> DiskReading:
    """Measure the stores and the disk. Blocks.

    Errors: those of `Objects`.
    """
    held = {kind.plural: {"shared": 0, "keys": 0} for kind in KINDS}
    for entry in objects.list(""):
        parts = entry.place.split("/")
        if len(parts) >= 3 and parts[-2] == "contents" and parts[-3] in held:
            held[parts[-3]]["keys" if parts[0] == KEYS_DIRECTORY else "shared"] += entry.size
    free = size = None
    with suppress(OSError):
        root = objects.root
        usage = shutil.disk_usage(next(p for p in (root, *root.parents) if p.exists()))
        free, size = usage.free, usage.total
    return DiskReading(held, SHARED_BYTES, free, size)
