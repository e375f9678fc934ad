"""A store's directory on disk: what lies where, who may change it, what is in it.

    contents/<sha256>.safetensors   a content; engines read it by this path
    names/<name>.json               a card: the content that the name points to, and what it is
    uploads/                        files that are being written
    lock                            held by the one who changes the others

Directories are for their owner alone (0700), and so are files (0600). Servers that share the
directory tell one another of a change by the lock's time of modification: that takes no room, so
that a name can be deleted on a full disk.
"""

import errno
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar, cast

from pydantic import ValidationError

from logsteer.errors import api_error
from logsteer.schemas import AdapterCard, OverrideCard, VectorCard
from logsteer_server.stores.upload import remove_left_overs, sync_directory

log = logging.getLogger(__name__)

PARSED_CARDS = 1024
"""Cards of which the latest are kept parsed, by their bytes: each request reads those it names."""
LOCK_PAUSE_S = 0.01
"""Between two looks at a lock that another process holds."""
RETRY_AFTER_S = 1.0
MARK_STEP_NS = 2 * 10**9
"""By how much a mark moves at least: file systems keep times to 2 seconds or better."""
DAMAGES = (errno.EIO, errno.EISDIR, errno.EACCES)
"""Of a card's file: what reading it again would not mend."""
OWNER_ONLY_DIRECTORY = 0o700
OWNER_ONLY_FILE = 0o600

_SHA256 = re.compile(r"[0-9a-f]{64}")

C = TypeVar("C", bound=VectorCard | OverrideCard | AdapterCard)


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """What a directory holds: SHA-256 by name, None for a damaged card; bytes by SHA-256."""

    names: dict[str, str | None]
    sizes: dict[str, int]

    @property
    def unclaimed(self) -> set[str]:
        """The contents that no readable card points to."""
        return self.sizes.keys() - set(self.names.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the contents that have a name."""
        return sum(self.sizes[sha256] for sha256 in self.sizes.keys() & set(self.names.values()))

    @property
    def damaged(self) -> list[str]:
        """The names whose cards cannot be read."""
        return sorted(name for name, sha256 in self.names.items() if sha256 is None)

    def frees(self, name: str) -> str | None:
        """Return the content that goes when this name points elsewhere; None where none does."""
        sha256 = self.names.get(name)
        others = (own for other, own in self.names.items() if other != name)
        return None if sha256 is None or sha256 in others else sha256


class StoreDirectory(Generic[C]):
    """The directory of one store; `card` is the class of its cards.

    Errors of all methods: OSError where the disk fails.
    """

    def __init__(self, path: Path, card: type[C], lock_timeout_s: float) -> None:
        self.path = path.absolute()
        self.contents, self.names = self.path / "contents", self.path / "names"
        self.uploads = self.path / "uploads"
        self._lock_timeout_s = lock_timeout_s
        parse = lru_cache(PARSED_CARDS)(card.model_validate_json)
        self._parse_card = cast(Callable[[bytes], C], parse)
        self._thread_lock = threading.Lock()

    def make(self) -> None:
        """Make what is missing, and keep others out of it."""
        for directory in (self.contents, self.names, self.uploads):
            missing = [path for path in (directory, *directory.parents) if not path.exists()]
            for path in reversed(missing):
                path.mkdir(OWNER_ONLY_DIRECTORY, exist_ok=True)
                sync_directory(path.parent)
        for directory in (self.path, self.contents, self.names, self.uploads):
            if directory.stat().st_mode & 0o077:
                with suppress(PermissionError):  # another user's: it is theirs to say who reads it
                    directory.chmod(OWNER_ONLY_DIRECTORY)

    @contextmanager
    def exclude(self) -> Iterator[int]:
        """Keep other threads and processes from changing the directory; give the open lock file.

        Errors: APIError `overloaded` where another holds it for longer than the time allowed.
        """
        end = time.monotonic() + self._lock_timeout_s
        # On a network's disk, a process's threads share a file's lock.
        if not self._thread_lock.acquire(timeout=self._lock_timeout_s):
            raise self._refuse_lock()
        try:
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, OWNER_ONLY_FILE)
            try:
                self._wait_for(lock, end)
                yield lock
            finally:
                os.close(lock)
        finally:
            self._thread_lock.release()

    def _wait_for(self, lock: int, end: float) -> None:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() >= end:
                raise self._refuse_lock()
            time.sleep(LOCK_PAUSE_S)

    def _refuse_lock(self) -> Exception:
        log.warning("%s was locked by others for %g s", self.path, self._lock_timeout_s)
        detail = (
            f"The store of {self.path.name} was locked by others for {self._lock_timeout_s:g} s; "
            "try again."
        )
        return api_error("overloaded", detail, retry_after=RETRY_AFTER_S)

    def read_mark(self, lock: int) -> int:
        """Return what another process's change has changed."""
        return os.fstat(lock).st_mtime_ns

    def change_mark(self, lock: int) -> int:
        """Have other processes read the directory anew; return the new mark."""
        mark = max(time.time_ns(), self.read_mark(lock) + MARK_STEP_NS)
        os.utime(lock, ns=(mark, mark))
        return self.read_mark(lock)

    def locate(self, sha256: str) -> Path:
        """Return where a content lies."""
        return self.contents / f"{sha256}.safetensors"

    def locate_card(self, name: str) -> Path:
        """Return where a name's card lies."""
        return self.names / f"{name}.json"

    def read_card(self, name: str) -> C | None:
        """Return a name's card, None for a damaged one. Errors: FileNotFoundError."""
        path = self.locate_card(name)
        try:
            card = self._parse_card(path.read_bytes())
        except (OSError, ValidationError) as error:
            # What passes, such as a lack of descriptors, is no damage.
            if isinstance(error, OSError) and error.errno not in DAMAGES:
                raise
            log.warning("the card %s cannot be read: %s", path, type(error).__name__)
            return None
        if card.name != name or not _SHA256.fullmatch(card.sha256):
            log.warning("the card %s is not one that was written for this name", path)
            return None
        return card

    def read(self) -> StoreIndex:
        """Return what the directory holds; call it with the lock held."""
        names: dict[str, str | None] = {}
        for path in self.names.glob("*.json"):
            with suppress(FileNotFoundError):  # removed by hand just now
                card = self.read_card(path.stem)
                names[path.stem] = card.sha256 if card else None
        sizes: dict[str, int] = {}
        for path in self.contents.glob("*.safetensors"):
            if _SHA256.fullmatch(path.stem):
                with suppress(FileNotFoundError):
                    sizes[path.stem] = path.stat().st_size
        return StoreIndex(names, sizes)

    def remove_left_overs(self) -> list[Path]:
        """Remove the uploads of servers that were killed, and return them.

        Nobody holds a lock on them. Call it with the lock of the directory held.
        """
        return remove_left_overs(self.uploads)
