"""Contents as whole files on this machine, for jobs, which name them by path, and for downloads.

A directory's file is used in place, after its SHA-256 was checked. A content of a bucket is fetched
once per process into `uploads`, as an upload that stays open until its room is needed. It stays
locked, so that the files of a killed process are removed like other uploads.
"""

import asyncio
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from logsteer.errors import api_error
from logsteer_server.contract.batches import change_all, read_all
from logsteer_server.contract.jobs import Job
from logsteer_server.contract.plan import Adapter, Direction
from logsteer_server.stores.objects import Objects, Upload, report_faults
from logsteer_server.stores.store import ADAPTERS, OVERRIDES, Kind, StoredContent
from logsteer_server.stores.threads import StoreThreads

log = logging.getLogger(__name__)

CHECKED_FILES = 4096
"""Files whose SHA-256 check a process remembers."""
MAX_FETCHED = 256
"""Fetched files; each takes a descriptor."""
STRIPES = 64
"""Locks for fetching: contents of the same stripe wait for each other."""
RETRY_AFTER_S = 5.0

Content = Adapter | Direction
KIND_OF: Mapping[type[Content], Kind[Any]] = {Adapter: ADAPTERS, Direction: OVERRIDES}


class DamagedContentError(Exception):
    """A content that does not have its SHA-256."""


@dataclass(slots=True)
class _FetchedFile:
    """A content of a bucket, as an open upload, with the number of its current users."""

    upload: Upload
    size: int
    users: int = 1


class ContentFiles:
    """Provide contents as whole files; threads may share it.

    It keeps at most `max_bytes` of a bucket's contents, including files being fetched.
    """

    def __init__(self, objects: Objects, max_bytes: int) -> None:
        self._objects = objects
        self._max_bytes = max_bytes
        self._fetched: OrderedDict[str, _FetchedFile] = OrderedDict()
        """By SHA-256, least recently used first."""
        self._lock = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(STRIPES)]

    @contextmanager
    def open(self, kind: Kind[Any], content: StoredContent) -> Iterator[Path]:
        """Hold the file of a content while the block runs.

        Errors: APIError as `hold`, and `internal` if the content is damaged or gone.
        """
        try:
            path = self.hold(content.sha256, content.source)
        except (FileNotFoundError, DamagedContentError) as error:
            raise kind.report_damage(content.describe(kind), content.source) from error
        try:
            yield path
        finally:
            self.release(content.sha256)

    def hold(self, sha256: str, source: str) -> Path:
        """Return the file of a content, which stays until each `hold` is released.

        `source`: as in `StoredContent`. Errors: FileNotFoundError if the store does not have it;
        DamagedContentError; APIError `overloaded` if a bucket does not answer, or files in use
        leave no room, `payload_too_large` if it is larger than all room, `internal` if the disk
        fails.
        """
        if Path(source).is_absolute():
            self._check(Path(source), sha256)
            return Path(source)
        with self._stripes[int(sha256[:8], 16) % STRIPES]:
            with self._lock:
                if (known := self._fetched.get(sha256)) is not None:
                    known.users += 1
                    return known.upload.path
            return self._fetch(sha256, source)

    def release(self, sha256: str) -> None:
        """Release one `hold` of a content."""
        with self._lock:
            if (file := self._fetched.get(sha256)) is not None:
                file.users -= 1
                self._fetched.move_to_end(sha256)

    def close(self) -> None:
        """Remove the fetched files."""
        with self._lock:
            while self._fetched:
                self._fetched.popitem()[1].upload.discard()

    def _check(self, path: Path, sha256: str) -> None:
        """Check the SHA-256 of a directory's file, again only after the file changes.

        Errors: FileNotFoundError, DamagedContentError, APIError `internal`.
        """
        with report_faults(path):
            about = path.stat()
            digest = _digest(path, (about.st_ino, about.st_size, about.st_mtime_ns))
        if digest != sha256:
            log.error("%s is damaged", path)
            raise DamagedContentError(path)

    def _fetch(self, sha256: str, place: str) -> Path:
        """Fetch a content of a bucket; return its file, held once."""
        size = self._objects.measure(place)
        with self._lock:
            self._make_room(size)
            file = self._fetched[sha256] = _FetchedFile(self._objects.open_upload(), size)
        try:
            self._objects.download(place, file.upload.write)
            if file.upload.finish() != sha256:
                log.error("what came of %s is not what its SHA-256 says", place)
                raise DamagedContentError(place)
        except BaseException:
            with self._lock:
                del self._fetched[sha256]
            file.upload.discard()
            raise
        return file.upload.path

    def _make_room(self, size: int) -> None:
        """Remove unused files until `size` more bytes fit. Errors: APIError."""
        if size > self._max_bytes:
            detail = (
                f"The content has {size} bytes, and {self._max_bytes} are kept of the shared "
                "store's: raise store_cache_bytes."
            )
            raise api_error("payload_too_large", detail)
        total = size + sum(file.size for file in self._fetched.values())
        for sha256 in [sha256 for sha256, file in self._fetched.items() if not file.users]:
            if total > self._max_bytes or len(self._fetched) >= MAX_FETCHED:
                file = self._fetched.pop(sha256)
                file.upload.discard()
                total -= file.size
        if total > self._max_bytes:
            detail = (
                f"The contents in use fill the {self._max_bytes} bytes that are kept of the shared "
                "store's: try again when requests have ended, or raise store_cache_bytes."
            )
            raise api_error("overloaded", detail, retry_after=RETRY_AFTER_S)


@lru_cache(CHECKED_FILES)
def _digest(path: Path, _identity: tuple[int, ...]) -> str:
    """Return the SHA-256 of a file, which is read once while it has this identity."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class JobContents:
    """Provide the contents that jobs name as files on this machine, while the jobs run.

    Use it from one event loop.
    """

    def __init__(self, files: ContentFiles, threads: StoreThreads) -> None:
        self._files = files
        self._threads = threads

    @asynccontextmanager
    async def open(self, jobs: Sequence[Job]) -> AsyncIterator[Sequence[Job]]:
        """Yield the jobs with the paths of local files, held while the block runs.

        Errors: APIError `unknown_adapter`, `unknown_override` if one was deleted meanwhile,
        `internal` if it is damaged, and those of `ContentFiles.hold`.
        """
        contents = list(dict.fromkeys(file for job in read_all(jobs) for file in job.delta.files))
        if not contents:
            yield jobs
            return
        paths: dict[Content, str] = {}
        try:
            for content in contents:
                paths[content] = str(await self._hold(content))
            if all(content.path == path for content, path in paths.items()):
                yield jobs
            else:
                yield change_all(jobs, lambda job: _set_paths(job, paths))
        finally:
            for content in paths:
                self._files.release(content.sha256)

    async def _hold(self, content: Content) -> Path:
        """Hold a content's file and return it. A cancelled caller holds nothing."""
        kind = KIND_OF[type(content)]
        work = self._threads.run(self._files.hold, content.sha256, content.path)
        holding = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(holding)
        except asyncio.CancelledError:  # the thread may still finish the fetch
            holding.add_done_callback(
                lambda done: None if done.exception() else self._files.release(content.sha256)
            )
            raise
        except FileNotFoundError as error:
            detail = f"The {kind.noun} was deleted while the request waited; upload it again."
            raise api_error(kind.unknown, detail) from error
        except DamagedContentError as error:
            raise kind.report_damage(f"content {content.sha256}", content.path) from error


def _set_paths(job: Job, paths: Mapping[Content, str]) -> Job:
    """Return a job with these paths of its contents."""
    adapter, override = job.adapter, job.override
    if adapter is not None:
        adapter = replace(adapter, path=paths[adapter])
    if override is not None:
        direction = replace(override.direction, path=paths[override.direction])
        override = replace(override, direction=direction)
    return replace(job, adapter=adapter, override=override)
