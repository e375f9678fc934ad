"""Results in a SQLite file: they survive a restart, and the file stays within its bound."""

import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from logsteer_server.settings import ConfigurationError, Settings

log = logging.getLogger(__name__)

APPLICATION_ID = 0x6C67_7374
SCHEMA_VERSION = 2
SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
CREATE TABLE IF NOT EXISTS results (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, value BLOB NOT NULL
);
"""

MAX_BYTES = 4 * 2**30
"""Of the file: some hundred thousand results. A disk that has less keeps what fits."""
ROWS_AT_ONCE = 1024
"""Rows of one transaction, which is in the write-ahead log as a whole."""
EVICTED_AT_ONCE = 8
ROW_BYTES = 150
"""What a row takes beyond its value: its key twice, its place in the index, half-full pages."""
PAGE_BYTES = 4096
LOG_BYTES = 4 * 2**20
"""Of the write-ahead log before it goes into the file."""
CRC_BYTES = 4
OWNER_ONLY = 0o600
LOCKED_S = 5.0
"""For a file that another process has locked."""
DAMAGES = (
    sqlite3.SQLITE_ERROR,  # a table or column is not there
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_NOTADB,
)
UNREADABLE = (TypeError, ValueError, OverflowError)
"""What a damaged file's values raise, where they are of another type than was written."""


def check_cache_file(settings: Settings) -> None:
    """Make sure that the file can serve. Errors: ConfigurationError."""
    if settings.cache_file is None:
        return
    path = settings.directory / settings.cache_file.expanduser()
    if path.exists():
        try:
            CacheFile(path).close()
        except DamagedCacheError as error:  # the server sets it aside, and makes it anew
            log.warning("%s", error)
    elif not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigurationError(
            f"cache_file: {path.parent} is not a directory that can be written to; create it, or "
            "name another file"
        )


class DamagedCacheError(ConfigurationError):
    """The file is no database that can be read; it may be set aside."""


class CacheFile:
    """Values by key in a file of at most `max_bytes`; the oldest make room.

    Oldest by when they were written: what is used often is in memory, and not read here.

    One thread at a time may use it, and its owner alone may read the file. A fault of the disk
    costs the results, never the request: it is logged. Errors: ConfigurationError where the file is
    none of ours or cannot be opened, DamagedCacheError of it where it is damaged.
    """

    @classmethod
    def open(cls, path: Path) -> "CacheFile":
        """Open a file; set a damaged one aside, and make a new one. Errors: ConfigurationError."""
        try:
            return cls(path)
        except DamagedCacheError as error:
            log.error("%s; it is set aside as %s, and another is made", error, set_aside(path))
            return cls(path)

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._log_bytes = min(LOG_BYTES, max_bytes // 8)
        self._is_sound = True
        self._db = self._connect()

    def _connect(self) -> sqlite3.Connection:
        try:
            # SQLite gives its log the permissions that the file has.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, OWNER_ONLY))
            if self._path.stat().st_mode & 0o077:
                self._path.chmod(OWNER_ONLY)
            self._db = sqlite3.connect(self._path, timeout=LOCKED_S, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise self._refuse(error) from error
        try:
            self._prepare_in_turn()
        except (sqlite3.Error, ConfigurationError, *UNREADABLE) as error:
            self._db.close()
            raise self._refuse(error) from error
        return self._db

    def _refuse(self, error: Exception) -> ConfigurationError:
        if is_damage(error):
            return DamagedCacheError(f"cache_file: {self._path} is damaged ({error})")
        return ConfigurationError(
            f"cache_file: {self._path} cannot hold results ({error}); name a file in a directory "
            "that can be written to, or delete this one, and the server makes another"
        )

    def _prepare_in_turn(self) -> None:
        """Prepare the file, again where another process does: for that SQLite does not wait."""
        deadline = time.monotonic() + LOCKED_S
        while True:
            try:
                return self._prepare()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            self._db.rollback()
            time.sleep(0.01)

    def _prepare(self) -> None:
        if self._ask("SELECT count(*) FROM sqlite_schema") == 0:
            self._db.executescript(f"PRAGMA page_size = {PAGE_BYTES};{SCHEMA}")
        if self._ask("PRAGMA application_id") != APPLICATION_ID:
            raise ConfigurationError("it is another program's database")
        if self._ask("PRAGMA user_version") != SCHEMA_VERSION:
            raise ConfigurationError("another version of this server wrote it")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA journal_size_limit = {self._log_bytes}")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {self._log_bytes // PAGE_BYTES}")
        self._ask("SELECT max(id) FROM results")  # damage is found now, not by a request

    def _ask(self, statement: str) -> int:
        """Return the one number that a statement gives."""
        number: int = self._db.execute(statement).fetchone()[0]
        return number

    def read(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the values of the keys that are there, of at most 32,766."""
        if not self._is_sound:
            return {}
        marks = ",".join("?" * len(keys))
        select = f"SELECT key, value FROM results WHERE key IN ({marks})"  # noqa: S608
        try:
            rows = self._db.execute(select, keys).fetchall()
            values = {key: _verify(key, stored) for key, stored in rows}
        except (sqlite3.Error, *UNREADABLE) as error:
            self._bear(error)
            return {}
        return {key: value for key, value in values.items() if value is not None}

    def write(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Store values; leave out one that would take half of the file."""
        if not self._is_sound:
            return
        sealed = [
            (key, _seal(key, value)) for key, value in rows if 2 * len(value) < self._max_bytes
        ]
        try:
            for start in range(0, len(sealed), ROWS_AT_ONCE):
                part = sealed[start : start + ROWS_AT_ONCE]
                with self._db:
                    self._make_room(sum(len(value) + ROW_BYTES for _, value in part))
                    self._db.executemany(
                        "INSERT OR REPLACE INTO results (key, value) VALUES (?, ?)", part
                    )
        except (sqlite3.Error, *UNREADABLE) as error:
            self._bear(error)

    def _make_room(self, size: int) -> None:
        """Delete the oldest rows until `size` more bytes fit, or none is left."""
        oldest = "SELECT id FROM results ORDER BY id LIMIT ?"
        while self._count_bytes() + size > self._max_bytes:
            gone = self._db.execute(
                f"DELETE FROM results WHERE id IN ({oldest})",  # noqa: S608
                (EVICTED_AT_ONCE,),
            )
            if not gone.rowcount:
                return

    def _count_bytes(self) -> int:
        """Count the bytes of the file's pages that hold something."""
        pages = self._ask("PRAGMA page_count") - self._ask("PRAGMA freelist_count")
        return pages * PAGE_BYTES

    def _bear(self, error: Exception) -> None:
        """Go on without the disk: for now where it is full or busy, to the end where the file is
        broken, which the next start sets aside.
        """
        self._is_sound = not is_damage(error)
        log.error("cache_file %s: %s; results are not kept there now", self._path, error)

    def close(self) -> None:
        """Close the file."""
        with suppress(sqlite3.Error):
            self._db.close()


def is_damage(error: Exception) -> bool:
    """Return whether an error says that a file is no database of ours, not that its disk fails.

    Another program's sound database is not damaged.
    """
    if isinstance(error, UNREADABLE):
        return not isinstance(error, ConfigurationError)
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGES


def set_aside(path: Path) -> Path:
    """Rename a damaged file and its log; return its new path. Errors: OSError.

    One that was set aside in the same second is lost: it is a cache.
    """
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside


def _seal(key: bytes, value: bytes) -> bytes:
    """Put a checksum in front of a value: SQLite does not notice a bit that the disk has turned.

    It is one of the key, too, so that no value is given for another's.
    """
    return zlib.crc32(value, zlib.crc32(key)).to_bytes(CRC_BYTES, "little") + value


def _verify(key: bytes, stored: bytes) -> bytes | None:
    value = stored[CRC_BYTES:]
    return value if _seal(key, value)[:CRC_BYTES] == stored[:CRC_BYTES] else None
