"""Contents as whole files of this machine, which jobs name by path, and downloads are sent from.

A directory's own file serves as it is. What is in a bucket is fetched once:

    fetched/<sha256>.safetensors    a content that is whole
    fetched/*.part                  one that is being fetched, of the size that it will have

A file is read against its SHA-256 once in a process. Processes of a machine may share the
directory: who uses a file has it locked, as one of many readers, and what is locked is not removed
to make room. The lock of a process that is killed ends with it.
"""

import asyncio
import fcntl
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cachetools import LRUCache

from logsteer.errors import APIError, api_error
from logsteer.schemas.common import ProblemCode
from logsteer_server.contract.batches import change_all, read_all
from logsteer_server.contract.jobs import Job
from logsteer_server.contract.parameters import Adapter, Direction
from logsteer_server.settings import Settings
from logsteer_server.stores.objects import Objects, make_directory
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.stores.upload import Upload, digest_file, remove_left_overs, report_faults

log = logging.getLogger(__name__)

KNOWN_FILES = 4096
"""Files of which a process remembers that it has read them against their SHA-256."""
STRIPES = 64
"""Contents that may be fetched at once; those that have the same stripe wait for one another."""
RETRY_AFTER_S = 5.0

Content = Adapter | Direction
UNKNOWN: Mapping[type[Content], tuple[str, ProblemCode]] = {
    Adapter: ("adapter", "unknown_adapter"),
    Direction: ("override", "unknown_override"),
}


class DamagedContentError(Exception):
    """A content that is not what its SHA-256 says."""


@dataclass(frozen=True, slots=True)
class HeldContent:
    """The file of a content, which stays until this is released."""

    path: Path
    _handle: int | None = None

    def release(self) -> None:
        """Need the content no more."""
        if self._handle is not None:
            os.close(self._handle)


class ContentFiles:
    """Whole files of the contents of some objects; threads and processes may share them.

    Of a bucket's, at most `max_bytes` are kept, those that are being fetched included.
    """

    def __init__(self, objects: Objects, max_bytes: int) -> None:
        self._objects = objects
        self.directory = objects.root / "fetched"
        self._max_bytes = max_bytes
        self._known: LRUCache[str, tuple[int, int, int]] = LRUCache(KNOWN_FILES)
        self._lock = threading.Lock()
        self._making_room = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(STRIPES)]

    @contextmanager
    def open(self, sha256: str, source: str) -> Iterator[Path]:
        """Give the file of a content, which stays for so long. Errors: as `hold`."""
        held = self.hold(sha256, source)
        try:
            yield held.path
        finally:
            held.release()

    def hold(self, sha256: str, source: str) -> HeldContent:
        """Return the file of a content.

        `source` is as in `StoredContent`. Errors: FileNotFoundError where the store does not have
        it; DamagedContentError; APIError `overloaded` where a bucket does not answer or there is no
        room beside what is in use, `payload_too_large` where there never is, `internal` where the
        disk fails.
        """
        if Path(source).is_absolute():
            self._check(Path(source), sha256)
            return HeldContent(Path(source))
        path = self.directory / f"{sha256}.safetensors"
        with self._stripes[int(sha256[:8], 16) % STRIPES], report_faults(self.directory):
            while (handle := _lock_file(path)) is None:
                self._fetch(path, sha256, source)
            try:
                self._check(path, sha256)
                # The one unused for longest goes first.
                os.utime(path, ns=(now := time.time_ns(), now))
            except BaseException:
                os.close(handle)
                raise
        return HeldContent(path, handle)

    def _check(self, path: Path, sha256: str) -> None:
        """Read a file against its SHA-256, once. One that was fetched is removed where it differs.

        Errors: FileNotFoundError, DamagedContentError, APIError `internal`.
        """
        is_fetched = path.parent == self.directory
        with report_faults(path):
            about = path.stat()
            identity = about.st_ino, about.st_size, 0 if is_fetched else about.st_mtime_ns
            with self._lock:
                if self._known.get(sha256) == identity:
                    return
            if digest_file(path) != sha256:
                log.error("%s is damaged", path)
                if is_fetched:
                    path.unlink(missing_ok=True)
                raise DamagedContentError(path)
            with self._lock:
                self._known[sha256] = identity

    def _fetch(self, path: Path, sha256: str, place: str) -> None:
        size = self._objects.measure(place)
        part = self._open_part(size)
        try:
            self._objects.download(place, part.write)
            if part.finish() != sha256:
                log.error("what came of %s is not what its SHA-256 says", place)
                raise DamagedContentError(place)
            with suppress(FileExistsError):  # another process was quicker
                os.link(part.path, path)
        finally:
            part.discard()

    def _open_part(self, size: int) -> Upload:
        """Open a file for a content of so many bytes, for which room is made. Errors: APIError."""
        if size > self._max_bytes:
            detail = (
                f"The content has {size} bytes, and {self._max_bytes} are kept of the shared "
                "store's: raise store_cache_bytes."
            )
            raise api_error("payload_too_large", detail)
        make_directory(self.directory)
        with self._making_room:
            self._make_room(size)
            part = Upload(self.directory)
            os.truncate(part.path, size)
            return part

    def _make_room(self, size: int) -> None:
        """Remove what nobody uses until `size` more bytes fit. Errors: APIError `overloaded`."""
        remove_left_overs(self.directory)
        files = []
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        total = size + sum(own for _, own, _ in files)
        for _, own, path in sorted(files):
            if total > self._max_bytes and path.suffix == ".safetensors" and _remove_unused(path):
                total -= own
        if total > self._max_bytes:
            detail = (
                f"The contents in use fill the {self._max_bytes} bytes that are kept of the shared "
                "store's: try again when requests have ended, or raise store_cache_bytes."
            )
            raise api_error("overloaded", detail, retry_after=RETRY_AFTER_S)


def _remove_unused(path: Path) -> bool:
    """Remove a file unless somebody has it locked; return whether it is gone."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True


def _lock_file(path: Path) -> int | None:
    """Return a file that was fetched, open and locked; None where there is none."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    fcntl.flock(handle, fcntl.LOCK_SH)
    if os.fstat(handle).st_nlink:
        return handle
    os.close(handle)  # removed before it was locked
    return None


class JobContents:
    """Has the contents that jobs name, as whole files of this machine, while the jobs run.

    It is used from one event loop.
    """

    def __init__(self, files: ContentFiles, threads: StoreThreads) -> None:
        self._files = files
        self._threads = threads

    @classmethod
    def of_settings(cls, settings: Settings) -> "JobContents":
        """Return what serves the jobs of a server. Errors: ConfigurationError."""
        files = ContentFiles(Objects.open(settings), settings.store_cache_bytes)
        return cls(files, StoreThreads())

    @asynccontextmanager
    async def open(self, jobs: Sequence[Job]) -> AsyncIterator[Sequence[Job]]:
        """Give the jobs with files of this machine, which stay for so long.

        Errors: APIError `unknown_adapter`, `unknown_override` where one was deleted meanwhile,
        `internal` where it is damaged, and those of `ContentFiles.hold`.
        """
        wanted = list(dict.fromkeys(file for job in read_all(jobs) for file in job.delta.files))
        if not wanted:
            yield jobs
            return
        held: dict[Content, HeldContent] = {}
        try:
            for content in wanted:
                held[content] = await self._hold(content)
            paths = {content: str(file.path) for content, file in held.items()}
            if all(content.path == path for content, path in paths.items()):
                yield jobs
            else:
                yield change_all(jobs, lambda job: _move(job, paths))
        finally:
            for file in held.values():
                file.release()

    async def _hold(self, content: Content) -> HeldContent:
        """Return a content's file. A caller that leaves early holds nothing."""
        noun, unknown = UNKNOWN[type(content)]
        work = self._threads.run(self._files.hold, content.sha256, content.path)
        holding = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(holding)
        except asyncio.CancelledError:  # it may be fetched all the same
            holding.add_done_callback(
                lambda done: None if done.exception() else done.result().release()
            )
            raise
        except FileNotFoundError as error:
            detail = f"The {noun} was deleted while the request waited; upload it again."
            raise api_error(unknown, detail) from error
        except DamagedContentError as error:
            raise refuse_damage(noun, content.sha256) from error


def refuse_damage(noun: str, sha256: str) -> APIError:
    """Return the error for a content that is not what its SHA-256 says."""
    detail = f"The content {sha256} is damaged: PUT the {noun} again with overwrite=true, or "
    return api_error("internal", f"{detail}DELETE it.")


def _move(job: Job, paths: Mapping[Content, str]) -> Job:
    """Return a job with the paths of its contents."""
    adapter, override = job.adapter, job.override
    if adapter is not None:
        adapter = replace(adapter, path=paths[adapter])
    if override is not None:
        direction = replace(override.direction, path=paths[override.direction])
        override = replace(override, direction=direction)
    return replace(job, adapter=adapter, override=override)
