"""Files that are being written to a store's directory, and the faults of its disk."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp
from typing import IO

from logsteer.errors import api_error


class Upload:
    """A file that is being written; `discard` it when done, whether or not it was stored."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        handle, name = mkstemp(dir=directory, suffix=".part")
        self.path = Path(name)
        self._file: IO[bytes] = os.fdopen(handle, "wb")
        fcntl.flock(self._file, fcntl.LOCK_EX)  # what nobody locks is left over
        self._hasher = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append bytes. Errors: APIError `internal` where the disk fails."""
        self._hasher.update(data)
        with report_faults(self._directory):
            self._file.write(data)
        self.size += len(data)

    def finish(self) -> str:
        """Bring the bytes to the disk; return their SHA-256. Errors: as `write`."""
        with report_faults(self._directory):
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._hasher.hexdigest()

    def discard(self) -> None:
        """Close the file, and remove it where it was not stored."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):  # what could not be written on a full disk
            self._file.close()


@contextmanager
def report_faults(place: Path) -> Iterator[None]:
    """Turn the faults of a disk into APIError."""
    try:
        yield
    except OSError as error:
        detail = f"{place} cannot be used ({error}). Make room on its disk."
        raise api_error("internal", detail) from error


def sync_directory(directory: Path) -> None:
    """Bring a directory's entries to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
