"""What the stores hold on disk, and what is free there, read now and then for the metrics."""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from logsteer.errors import APIError
from logsteer_server.observation.readings import DiskReading, StoreReading
from logsteer_server.settings import Settings
from logsteer_server.stores.bucket import Bucket
from logsteer_server.stores.bucket_index import count_bucket
from logsteer_server.stores.namespace import KEYS_DIRECTORY
from logsteer_server.stores.store import KINDS

log = logging.getLogger(__name__)

READ_EVERY_S = 60.0
LIST_EVERY_S = 600.0
"""A store behind a URL is listed for that, which costs calls."""
WAIT_S = 0.5
"""What whoever asks waits for the disk; what it says later is there for the next one."""


class DiskUsage:
    """The latest reading of the disk. It is used from one event loop, and reads in a thread."""

    def __init__(self, settings: Settings, bucket: Bucket | None = None) -> None:
        self.reading = DiskReading()
        self._bucket = bucket
        self._every_s = READ_EVERY_S if bucket is None else LIST_EVERY_S
        self._settings = settings
        self._read_at = -self._every_s
        self._work: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Read the disk where that was long ago, and wait for it a little."""
        if self._work is None and time.monotonic() - self._read_at >= self._every_s:
            self._work = asyncio.create_task(self._refresh())
        if self._work is not None:
            await asyncio.wait({self._work}, timeout=WAIT_S)

    async def _refresh(self) -> None:
        try:
            self.reading = await asyncio.to_thread(read_disk, self._settings, self._bucket)
        except APIError:
            log.warning("what the shared store holds is not known: it does not answer")
        finally:
            self._read_at, self._work = time.monotonic(), None


def read_disk(settings: Settings, bucket: Bucket | None = None) -> DiskReading:
    """Return what the stores and the result cache's file hold, and what is free. Blocks.

    Errors: those of `Bucket`, where the stores are there.
    """
    root = settings.store_path
    own, keys = _count_directory(root) if bucket is None else count_bucket(bucket)
    limits = {
        "vectors": settings.vector_store_bytes,
        "overrides": settings.override_store_bytes,
        "adapters": settings.adapter_store_bytes,
    }
    free = size = None
    with suppress(OSError):
        there = next(path for path in (root, *root.absolute().parents) if path.exists())
        usage = shutil.disk_usage(there)
        free, size = usage.free, usage.total
    file_bytes = None
    if settings.cache_file is not None:
        with suppress(OSError):
            path = settings.directory / settings.cache_file.expanduser()
            file_bytes = path.stat().st_size
    stores = [StoreReading(kind, own[kind], keys[kind], limits[kind]) for kind in own]
    return DiskReading(stores, free, size, file_bytes)


def _count_directory(root: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of everybody's contents by kind, and of those of keys."""
    own = {kind.plural: _count_bytes(root / kind.plural) for kind in KINDS}
    keys = dict.fromkeys(own, 0)
    for place in _list_directory(root / KEYS_DIRECTORY):
        for plural in keys:
            keys[plural] += _count_bytes(Path(place.path) / plural)
    return own, keys


def _count_bytes(store: Path) -> int:
    """Return the bytes of a store's contents."""
    total = 0
    for entry in _list_directory(store / "contents"):
        with suppress(OSError):  # it was removed since
            total += entry.stat().st_size
    return total


def _list_directory(path: Path) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(path) as entries:
        yield from entries
