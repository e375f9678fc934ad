"""Object storage with obstore: a directory of this machine, or a bucket of S3, GCS or Azure.

Objects are read and written whole. In a directory, an object is synced to disk before it gets its
name, and its name before the write returns: obstore does not sync, so this module writes these
files itself. A bucket keeps what it has confirmed.
"""

import errno
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from tempfile import mkstemp
from typing import IO, Literal

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, ObjectStore, from_url

from logsteer.errors import APIError, api_error
from logsteer_server.settings import ConfigurationError, Settings

log = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=10)
"""Timeout of a bucket's answer, retries included, and of a connection; a request waits for it."""
MAX_RETRIES = 3
REST_S = 2.0
"""Seconds for which calls fail at once after a failure, so that not all planning threads wait for a
bucket that does not answer."""
PIECE = 4 * 2**20
"""Bytes of an object downloaded at once."""
REFUSALS = (PermissionDeniedError, UnauthenticatedError, NotSupportedError)
"""A bucket's errors for which a retry does not help."""
OWNER_ONLY_DIRECTORY = 0o700
UNLOCKED_S = 60.0
"""An upload that nobody has locked for so long is not one that is just being opened."""
INSUFFICIENT_STORAGE = 507
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Upload:
    """A file that is being written; `discard` it when done, whether or not it was stored.

    `check` refuses a size that the store has no room for.
    """

    def __init__(self, directory: Path, check: Callable[[int], None] | None = None) -> None:
        self._directory = directory
        self.check = check or (lambda _size: None)
        self._lock = threading.Lock()
        self._is_open = False
        self._handle, name = mkstemp(dir=directory, suffix=".part")
        self.path = Path(name)
        fcntl.flock(self._handle, fcntl.LOCK_EX)  # what nobody locks is left over
        self._hasher = hashlib.sha256()
        self._is_open = True
        self.size = 0

    def __del__(self) -> None:
        self.discard()  # nobody got it: its caller left while it was opened

    def write(self, data: bytes) -> None:
        """Append bytes. Errors: as `check`; APIError `internal` where the disk fails."""
        with self._use():
            self.check(self.size + len(data))
            self._hasher.update(data)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._handle, rest) :]
            self.size += len(data)

    def finish(self) -> str:
        """Bring the bytes to the disk; return their SHA-256. Errors: as `write`."""
        with self._use():
            os.fsync(self._handle)
            return self._hasher.hexdigest()

    @contextmanager
    def _use(self) -> Iterator[None]:
        """Keep the file open: who uploads may be gone while a thread still writes."""
        with report_faults(self._directory), self._lock:
            if not self._is_open:
                raise OSError(errno.EBADF, "the upload was given up")
            yield

    def discard(self) -> None:
        """Close the file, and remove it where it was not stored."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            try:
                with suppress(FileNotFoundError):
                    os.unlink(self.path)  # noqa: PTH108
            except OSError as error:  # the next start removes it
                log.warning("%s could not be removed: %s", self.path, error)
            finally:
                os.close(self._handle)


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """An object in a listing; a different `version` means different bytes."""

    place: str
    size: int
    version: str

    @property
    def name(self) -> str:
        """The part of its place after the last slash."""
        return self.place.rpartition("/")[2]


class Objects:
    """The objects of a bucket `url`, or without one of a directory `root`.

    Uploads are written to `<root>/uploads` first. Threads and processes may share it. Errors of all
    methods: FileNotFoundError; APIError `overloaded` if a bucket does not answer, `internal` if it
    refuses or a disk fails, with status 507 if the disk is full. Errors of the constructor:
    ConfigurationError.
    """

    def __init__(self, root: Path, url: str | None = None, options: dict[str, str] | None = None):
        self.root = root.absolute()
        self.url = url
        self.uploads = self.root / "uploads"
        self.trouble: str | None = None
        """Why the last call to a bucket failed, or None."""
        self._rests_until = 0.0
        self._bucket = None if url is None else _open_bucket(url, dict(options or {}))

    @classmethod
    def open(cls, settings: Settings) -> "Objects":
        """Return the objects of these settings. Errors: ConfigurationError."""
        return cls(settings.store_path, settings.store_url, settings.store_options)

    @property
    def is_local(self) -> bool:
        """Whether the objects are files of this machine."""
        return self._bucket is None

    @cached_property
    def _store(self) -> ObjectStore:
        if self._bucket is not None:
            return self._bucket
        make_directory(self.root)
        return LocalStore(self.root)

    def locate(self, place: str) -> str:
        """Return an object's absolute path, or its place in the bucket."""
        return str(self.root / place) if self.is_local else place

    def open_upload(self, check: Callable[[int], None] | None = None) -> Upload:
        """Open a file that `write_file` can give a place; see `Upload`."""
        with report_faults(self.uploads):
            make_directory(self.uploads)
            return Upload(self.uploads, check)

    def remove_left_overs(self, min_age_s: float = UNLOCKED_S) -> None:
        """Remove the uploads of servers that were killed, which nobody has locked."""
        newest = time.time() - min_age_s
        with report_faults(self.uploads):
            for path in self.uploads.glob("*.part"):
                # One that is at work is locked, or gone by now: done with.
                with suppress(BlockingIOError, FileNotFoundError), path.open("rb") as file:
                    if path.stat().st_mtime <= newest:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        path.unlink()
                        log.info("removed %s, which a server that was killed had left", path)

    def list(self, prefix: str) -> list[ObjectEntry]:
        """Return the objects below a prefix, sorted by place."""
        if self.is_local and not self.root.exists():
            return []
        with self._call():
            found = [entry for batch in obstore.list(self._store, prefix) for entry in batch]
        return sorted(
            (ObjectEntry(e["path"], e["size"], str(e["e_tag"])) for e in found),
            key=lambda entry: entry.place,
        )

    def measure(self, place: str) -> int:
        """Return an object's size."""
        with self._call():
            return int(obstore.head(self._store, place)["size"])

    def read(self, place: str) -> bytes:
        """Return an object's bytes."""
        with self._call():
            return bytes(obstore.get(self._store, place).bytes())

    def download(self, place: str, write: Callable[[bytes], object]) -> None:
        """Pass an object's bytes to `write`, piece by piece."""
        with self._call():
            pieces = iter(obstore.get(self._store, place).stream(min_chunk_size=PIECE))
        while True:
            with self._call():
                piece = next(pieces, None)
            if piece is None:
                return
            write(bytes(piece))

    def open_file(self, place: str) -> IO[bytes]:
        """Open an object as a file; one of a bucket is fetched, and removed when it is closed."""
        if self.is_local:
            with report_faults(path := self.root / place):
                return path.open("rb")
        fetched = self.open_upload()
        try:
            self.download(place, fetched.write)
            return fetched.path.open("rb")
        finally:
            fetched.discard()

    def write_file(self, upload: Upload, place: str, *, create: bool) -> bool:
        """Store a finished upload at a place; with `create`, return False if an object exists.

        Without `create` it replaces an existing object.
        """
        if self.is_local:
            return self._link(upload.path, self.root / place, create=create)
        try:
            with self._call():  # a large file goes in parts, unless it is to be created
                mode: Literal["create", "overwrite"] = "create" if create else "overwrite"
                obstore.put(self._store, place, upload.path, mode=mode)
        except AlreadyExistsError:
            return False
        except FileNotFoundError as error:  # the bucket itself
            raise self._refuse_for_good(error) from error
        return True

    def _link(self, source: Path, target: Path, *, create: bool) -> bool:
        """Link or rename a synced file to its place in the directory, and sync that."""
        with report_faults(target):
            make_directory(target.parent)
            try:
                if create:
                    os.link(source, target)
                else:
                    os.replace(source, target)  # noqa: PTH105
            except FileExistsError:
                return False
            sync_directory(target.parent)
        return True

    def write(self, data: bytes, place: str, *, create: bool) -> bool:
        """Store a small object; see `write_file`."""
        draft = self.open_upload()
        try:
            draft.write(data)
            draft.finish()
            return self.write_file(draft, place, create=create)
        finally:
            draft.discard()

    def remove(self, place: str) -> None:
        """Remove an object; works on a full disk. A bucket may not report a missing object."""
        if not self.is_local:
            with self._call():
                obstore.delete(self._store, place)
            return
        path = self.root / place
        with report_faults(path):
            os.unlink(path)  # noqa: PTH108
            sync_directory(path.parent)

    def probe(self) -> None:
        """Call the bucket, which updates `trouble`."""
        with suppress(FileNotFoundError, APIError):
            self.measure("probe")

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Convert obstore's errors in the block to those of this class."""
        if time.monotonic() < self._rests_until:
            raise self._refuse()
        try:
            yield
        except (FileNotFoundError, AlreadyExistsError):
            self.trouble = None
            raise
        except REFUSALS as error:
            raise self._refuse_for_good(error) from error
        except (BaseError, OSError) as error:
            if self.is_local:
                with report_faults(self.root):
                    raise OSError(str(error)) from error
            if self.trouble is None:
                log.error("%s cannot be used: %s", self.url, error)
            self.trouble = str(error).partition("\n")[0]
            self._rests_until = time.monotonic() + REST_S
            raise self._refuse() from error
        if self.trouble is not None:
            log.warning("%s answers again", self.url)
        self.trouble = None

    def _refuse_for_good(self, error: Exception) -> APIError:
        self.trouble = str(error).partition("\n")[0]
        log.error("%s refuses: %s", self.url or self.root, error)
        return api_error("internal", "The store refuses this server; the server's log says why.")

    def _refuse(self) -> APIError:
        detail = (
            "The shared store of vectors, overrides and adapters does not answer. Try again; "
            "requests that name none of them are answered meanwhile."
        )
        return api_error("overloaded", detail, retry_after=REST_S)


def _open_bucket(url: str, options: dict[str, str]) -> ObjectStore:
    """Return obstore's store of a URL. Errors: ConfigurationError."""
    client = {"allow_http": True, "timeout": TIMEOUT, "connect_timeout": TIMEOUT}
    retry = {"max_retries": MAX_RETRIES, "retry_timeout": TIMEOUT}
    try:
        return from_url(url, config=options, client_options=client, retry_config=retry)  # type: ignore[call-overload,no-any-return]
    except (BaseError, ValueError, TypeError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"store_url, store_options: {url} cannot be used: {why}; give s3://, gs:// or az:// "
            "and obstore's options of it, or leave it out for a directory"
        ) from error


@contextmanager
def report_faults(place: Path) -> Iterator[None]:
    """Turn the faults of a disk into APIError; where it was is for the log alone.

    `internal`, with status 507 where the disk is full. A file that is not there is no fault.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        log.error("%s cannot be used: %s", place, error)
        why = error.strerror or type(error).__name__
        status = INSUFFICIENT_STORAGE if error.errno in FULL else None
        detail = f"The server's disk failed ({why}): make room on it; the server's log says where."
        raise api_error("internal", detail, status=status) from error


def sync_directory(directory: Path) -> None:
    """Bring a directory's entries to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(directory: Path) -> None:
    """Create a directory for its owner only, and sync it. Errors: OSError."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(OWNER_ONLY_DIRECTORY, exist_ok=True)
        sync_directory(path.parent)


def check_store_directory(settings: Settings) -> None:
    """Check that the stores can be created and written. Errors: ConfigurationError."""
    objects = Objects.open(settings)
    for directory in (objects.uploads, objects.root / "vectors"):
        there = next(path for path in (directory, *directory.parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.R_OK | os.W_OK | os.X_OK)):
            raise ConfigurationError(
                f"store_directory: {there} is not a directory that can be written to; name another"
            )
