"""Files of a directory that several processes list, write and remove at once.

fsspec's own listing leaves out, without a word, a file that goes while it is listed, though the one
that replaced it was there by then; and its writing is seen half-done.
"""

import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp
from typing import BinaryIO

from logsteer_server.stores.layout import OWNER_ONLY_DIRECTORY

PIECE = 16 * 2**20
"""Bytes of a file that are copied at once."""
MAX_LISTINGS = 100
"""Of one directory from which files go while it is listed."""
MAX_TRIES = 3
"""To write to a directory that another process removes because it is empty."""


def list_below(root: Path) -> dict[str, os.stat_result]:
    """Return the files below a directory by their paths from there; none where it is not there.

    A file that another one replaced meanwhile is not left out with it: where something went, the
    directory it was in is listed again. Errors: OSError where it never rests.
    """
    files = {}
    waiting = [""]
    while waiting:
        start = waiting.pop()
        for name, about in _list_directory(root / start).items():
            if stat.S_ISDIR(about.st_mode):
                waiting.append(f"{start}{name}/")
            elif stat.S_ISREG(about.st_mode):
                files[start + name] = about
    return files


def _list_directory(path: Path) -> dict[str, os.stat_result]:
    for _ in range(MAX_LISTINGS):
        try:
            with os.scandir(path) as entries:
                found = list(entries)
        except FileNotFoundError:
            return {}
        try:
            return {entry.name: entry.stat(follow_symlinks=False) for entry in found}
        except FileNotFoundError:
            continue
    raise OSError(f"{path} changes while it is listed")


def write_file(path: Path, data: bytes) -> None:
    """Write a file: whoever reads it meanwhile gets the old one or the new one."""
    _replace(path, lambda file: file.write(data))


def copy_file(source: Path, path: Path) -> None:
    """Copy a file: whoever reads it meanwhile gets the old one or the new one."""
    with source.open("rb") as given:
        _replace(path, lambda file: shutil.copyfileobj(given, file, PIECE))


def remove_file(path: Path, root: Path) -> None:
    """Remove a file, and its directory below a root where that is empty then.

    Errors: FileNotFoundError.
    """
    path.unlink()
    if path.parent != root:
        with suppress(OSError):  # others lie there
            path.parent.rmdir()


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file beside its place and rename it."""
    for left in reversed(range(MAX_TRIES)):
        path.parent.mkdir(OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
        try:
            handle, draft = mkstemp(f".{stamp_ms():x}.part", ".", path.parent)
            break
        except FileNotFoundError:
            if not left:
                raise
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(handle)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def stamp_ms() -> int:
    """Return milliseconds since 1970, by which upkeep knows the age of what is named so."""
    return time.time_ns() // 10**6
