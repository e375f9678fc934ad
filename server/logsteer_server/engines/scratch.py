"""Directories for files that nobody needs once their process is gone.

Each holds a lock for as long as a process has it open, so that after a kill or a crash the next
server knows what nobody owns any more, and removes it.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

PREFIX = "logsteer-run-"
LOCK = ".lock"
NEW_S = 60.0
"""A directory without a lock is left alone for so long: its owner may be about to lock it."""


class ScratchDirectory(AbstractContextManager[Path]):
    """A directory of its own below `parent` (None: the system's), until it is closed.

    Errors: OSError where it cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        new = self.path / f"{LOCK}.new"
        self._lock = new.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / LOCK)  # so nobody finds one that is not locked yet

    def close(self) -> None:
        """Remove the directory and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(parent: Path | None = None) -> list[Path]:
    """Remove this user's directories below `parent` that no process owns; return what they were."""
    removed = []
    for path in Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            facts = path.lstat()
            if facts.st_uid != os.geteuid() or path.is_symlink() or not path.is_dir():
                continue
            if not (path / LOCK).exists() and time.time() - facts.st_mtime < NEW_S:
                continue
            if _is_owned(path / LOCK):
                continue
            shutil.rmtree(path)
        except OSError:
            continue  # another server is faster, or it is not to be removed
        removed.append(path)
    return removed


def _is_owned(lock: Path) -> bool:
    if not lock.exists():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
