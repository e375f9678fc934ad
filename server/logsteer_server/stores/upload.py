"""Files that are being written to a store's directory, their bounds, a disk's faults."""

import errno
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp

from logsteer.errors import APIError, api_error

log = logging.getLogger(__name__)

OWNER_ONLY_DIRECTORY = 0o700
UNLOCKED_S = 60.0
"""An upload that nobody has locked for so long is not one that is just being opened."""
INSUFFICIENT_STORAGE = 507
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refuse_size(noun: str, total: int, max_bytes: int) -> APIError:
    """Return the error for contents that are more than a store may hold."""
    detail = (
        f"The {noun} store would hold {total} bytes, at most {max_bytes} are allowed: delete "
        f"{noun}s, or raise max_key_bytes or the key's stored_bytes."
    )
    return api_error("payload_too_large", detail)


def refuse_damage(what: str, noun: str) -> APIError:
    """Return the error for what is not as the store of a kind has written it."""
    detail = f"The {what} is damaged: PUT the {noun} again with overwrite=true, or DELETE it."
    return api_error("internal", detail)


class Upload:
    """A file that is being written; `discard` it when done, whether or not it was stored.

    `check` refuses a size that the store has no room for.
    """

    def __init__(self, directory: Path, check: Callable[[int], None] | None = None) -> None:
        self._directory = directory
        self.check = check or (lambda _size: None)
        self._handle, name = mkstemp(dir=directory, suffix=".part")
        self.path = Path(name)
        fcntl.flock(self._handle, fcntl.LOCK_EX)  # what nobody locks is left over
        self._hasher = hashlib.sha256()
        self._lock = threading.Lock()
        self._is_open = True
        self.size = 0

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


def remove_left_overs(directory: Path, min_age_s: float = UNLOCKED_S) -> list[Path]:
    """Remove the uploads that nobody has locked, and return them. Errors: OSError."""
    removed = []
    newest = time.time() - min_age_s
    for path in directory.glob("*.part"):
        # One that is at work is locked, or gone by now: done with.
        with suppress(BlockingIOError, FileNotFoundError), path.open("rb") as file:
            if path.stat().st_mtime <= newest:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
    return removed


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


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file. Errors: OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
