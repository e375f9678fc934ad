"""Contents of a shared store on this machine: fetched once, checked, held while they are in use.

    fetched/<sha256>.safetensors    a content that is whole
    fetched/*.part                  one that is on its way, of the size that it will have
    fetched/lock                    held by the one who makes room, or gives a content its name

All processes of a machine may share the directory. Whoever uses a content has its file locked, as
one of many readers: what is locked is not removed to make room, and the lock of a process that is
killed ends with it.
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cachetools import LRUCache

from logsteer.errors import APIError, api_error
from logsteer_server.stores.bucket import Bucket
from logsteer_server.stores.layout import OWNER_ONLY_DIRECTORY, OWNER_ONLY_FILE
from logsteer_server.stores.upkeep import digest_file
from logsteer_server.stores.upload import Upload, report_faults

log = logging.getLogger(__name__)

FETCHES = 2
"""Times that a content is fetched which is not what its SHA-256 says."""
KNOWN_FILES = 4096
"""Files of which a process remembers that it has read them against their SHA-256."""
STRIPES = 64
"""Contents that may be fetched at once; those that have the same stripe wait for one another."""
RETRY_AFTER_S = 5.0


class DamagedContentError(Exception):
    """A content that is not what its SHA-256 says, however often it is fetched."""


@dataclass
class _Held:
    handle: int
    users: int = 1


class FetchedContents:
    """The directory of contents of one shared store; threads and processes may share it.

    It has at most `max_bytes`, those that are on their way included.
    """

    def __init__(self, bucket: Bucket, directory: Path, max_bytes: int) -> None:
        self._bucket = bucket
        self.directory = directory.absolute() / "fetched"
        self._max_bytes = max_bytes
        self._held: dict[str, _Held] = {}
        self._known: LRUCache[str, tuple[int, int]] = LRUCache(KNOWN_FILES)
        self._lock = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(STRIPES)]

    @contextmanager
    def open(self, sha256: str, place: str) -> Iterator[Path]:
        """Give the file of a content, which stays for so long. Errors: as `hold`."""
        path = self.hold(sha256, place)
        try:
            yield path
        finally:
            self.release(sha256)

    def hold(self, sha256: str, place: str) -> Path:
        """Return the file of a content that lies at a place of the store, fetched if need be.

        It stays until `release` was called as often as this. Errors: FileNotFoundError where the
        store does not have it; DamagedContentError; APIError `overloaded` where the store does not
        answer or there is no room beside what is in use, `payload_too_large` where there never is,
        `internal` where the disk fails.
        """
        path = self.directory / f"{sha256}.safetensors"
        with self._stripes[int(sha256[:8], 16) % STRIPES]:
            with self._lock:
                if (held := self._held.get(sha256)) is not None:
                    held.users += 1
                    return path
            with _report_faults(self.directory):
                handle = self._lock_whole(path, sha256)
                while handle is None:
                    self._fetch(path, sha256, place)
                    handle = self._lock_whole(path, sha256)
                # The one unused for longest goes first; the system's own times come in steps of ms.
                os.utime(path, ns=(now := time.time_ns(), now))
            with self._lock:
                self._held[sha256] = _Held(handle)
        return path

    def release(self, sha256: str) -> None:
        """Need a content no more."""
        with self._lock:
            held = self._held[sha256]
            held.users -= 1
            if held.users:
                return
            del self._held[sha256]
        os.close(held.handle)

    def _lock_whole(self, path: Path, sha256: str) -> int | None:
        """Return a file that is whole, open and locked; None where there is none."""
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            about = os.fstat(handle)
            if not about.st_nlink:  # removed before it was locked
                os.close(handle)
                return None
            identity = about.st_ino, about.st_size
            # Once in a process: reading it again takes long, and what lies there is not written to.
            with self._lock:
                is_known = self._known.get(sha256) == identity
            if not is_known:
                if digest_file(path) != sha256:
                    log.error("%s is damaged, and is fetched again", path)
                    self._remove_damaged(path, about)
                    os.close(handle)
                    return None
                self._note_whole(sha256, about)
        except BaseException:
            with suppress(OSError):
                os.close(handle)
            raise
        return handle

    def _remove_damaged(self, path: Path, about: os.stat_result) -> None:
        """Remove a file, unless another process has put a whole one in its place by now."""
        with self._lock_directory(), suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), about):
                path.unlink()

    def _note_whole(self, sha256: str, about: os.stat_result) -> None:
        with self._lock:
            self._known[sha256] = about.st_ino, about.st_size

    def _fetch(self, path: Path, sha256: str, place: str) -> None:
        """Fetch a content. Errors: as `hold`."""
        for _ in range(FETCHES):
            size = self._bucket.measure(place)
            part = self._open_part(size)
            try:
                self._bucket.download(place, part.write, size)
                if part.finish() == sha256:
                    self._note_whole(sha256, part.path.stat())
                    with self._lock_directory():  # who makes room sees it under one name
                        with suppress(FileExistsError):  # another process was quicker
                            os.link(part.path, path)
                        part.discard()
                    return
            finally:
                part.discard()
            log.error("%s: what came of %s is not what its SHA-256 says", self._bucket.url, place)
        raise DamagedContentError(place)

    def _open_part(self, size: int) -> Upload:
        """Open a file for a content of so many bytes, for which room is made. Errors: APIError."""
        if size > self._max_bytes:
            detail = (
                f"The content has {size} bytes, and {self._max_bytes} are kept of the shared "
                "store's: raise store_cache_bytes."
            )
            raise api_error("payload_too_large", detail)
        self.directory.mkdir(OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
        with self._lock_directory():
            self._make_room(size)
            part = Upload(self.directory)
            os.truncate(part.path, size)
            return part

    @contextmanager
    def _lock_directory(self) -> Iterator[None]:
        """Keep others from making room, and from giving contents their names."""
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, OWNER_ONLY_FILE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _make_room(self, size: int) -> None:
        """Remove what nobody uses until `size` more bytes fit. Errors: APIError `overloaded`."""
        files = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    about = entry.stat()
                    files.append((about.st_mtime_ns, about.st_size, Path(entry.path)))
        total = sum(own for _, own, _ in files)
        for _, own, path in sorted(files):
            if path.suffix == ".part" and _remove_unused(path):  # of a process that was killed
                total -= own
        for _, own, path in sorted(files):
            if total + size <= self._max_bytes:
                return
            if path.suffix == ".safetensors" and _remove_unused(path):
                total -= own
        if total + size > self._max_bytes:
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


@contextmanager
def _report_faults(directory: Path) -> Iterator[None]:
    """Turn the faults of a disk into APIError; a content that the store lacks is none."""
    try:
        yield
    except (FileNotFoundError, APIError):
        raise
    except OSError as error:
        with report_faults(directory):
            raise error
