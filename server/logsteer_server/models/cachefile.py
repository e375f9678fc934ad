"""Results in a SQLite file: they survive a restart, and the file stays within its bound."""

import logging
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, islice
from pathlib import Path

from logsteer_server.settings import ConfigurationError, Settings

log = logging.getLogger(__name__)

APPLICATION_ID = 0x6C67_7374
SCHEMA_VERSION = 1
SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
CREATE TABLE results (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, value BLOB NOT NULL, used INTEGER NOT NULL
);
CREATE INDEX results_by_use ON results (used);
"""

KEYS_AT_ONCE = 30_000
"""Parameters of one statement; SQLite takes 32,766."""
EVICTED_AT_ONCE = 256
ROW_BYTES = 160
"""What a row takes beyond its value: its key twice, its places in the indices, half-full pages."""
PAGE_BYTES = 4096
LOG_BYTES = 4 * 2**20
"""Of the write-ahead log before it goes into the file. A transaction takes at most one row for
each of its pages, because a row's key may lie on a page of its own."""
TOUCHES_AT_ONCE = 65_536
CRC_BYTES = 4


def check_cache_file(settings: Settings) -> None:
    """Make sure that the file can serve. Errors: ConfigurationError."""
    if settings.cache_file is None:
        return
    path = settings.directory / settings.cache_file.expanduser()
    if path.exists():
        CacheFile(path, settings.cache_file_bytes).close()
    elif not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigurationError(
            f"cache_file: {path.parent} is not a directory that can be written to; create it, or "
            "name another file"
        )


def _make_private(path: Path) -> None:
    """Make the file where it is missing, and have its owner alone read it: it tells what was asked.

    SQLite gives the files beside it the same mode. Errors: OSError.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(PermissionError):  # another user's, who let us write to it
            os.fchmod(handle, 0o600)
    finally:
        os.close(handle)


class CacheFile:
    """Values by key in a file of at most `max_bytes`; those used longest ago make room.

    One thread at a time may use it. A fault of the disk costs the results, never the request: it
    is logged, and a damaged file is left alone from then on. Errors: ConfigurationError where the
    file is none of ours or cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._log_bytes = min(LOG_BYTES, max_bytes // 8)
        self._touched: set[int] = set()
        self._is_sound = True
        try:
            _make_private(path)
        except OSError as error:
            raise self._refuse(error) from error
        try:
            self._db = sqlite3.connect(path, timeout=5, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._refuse(error) from error
        try:
            self._prepare()
        except (sqlite3.Error, ConfigurationError) as error:
            self._db.close()
            raise self._refuse(error) from error

    def _refuse(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"cache_file: {self._path} cannot hold results ({error}); name a file in a directory "
            "that can be written to, or delete this one, and it is made anew"
        )

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
        self._clock = 1 + (self._ask("SELECT max(used) FROM results") or 0)
        if self._ask("PRAGMA page_count") * PAGE_BYTES > self._max_bytes:
            with self._db:
                self._make_room(0)
            self._db.execute("VACUUM")  # rows leave holes in the file, which only this gives back

    def _ask(self, statement: str) -> int:
        """Return the one number that a statement gives."""
        number: int = self._db.execute(statement).fetchone()[0]
        return number

    def read(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the values of the keys that are there."""
        found: dict[bytes, bytes] = {}
        if not self._is_sound:
            return found
        try:
            for start in range(0, len(keys), KEYS_AT_ONCE):
                part = keys[start : start + KEYS_AT_ONCE]
                marks = ",".join("?" * len(part))
                rows = self._db.execute(
                    f"SELECT id, key, value FROM results WHERE key IN ({marks})",  # noqa: S608
                    part,
                )
                for row_id, key, stored in rows:
                    if (value := _verify(stored)) is not None:
                        found[key] = value
                        self._touched.add(row_id)
            if len(self._touched) > TOUCHES_AT_ONCE:
                self._touch()
        except sqlite3.Error as error:
            self._bear(error)
        return found

    def write(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Store values."""
        if not self._is_sound:
            return
        try:
            self._touch()
            for part, size in self._split(rows):
                with self._db:
                    self._make_room(size)
                    self._db.executemany(
                        "INSERT OR REPLACE INTO results (key, value, used) VALUES (?, ?, ?)",
                        [(key, _seal(value), self._clock) for key, value in part],
                    )
        except sqlite3.Error as error:
            self._bear(error)

    def _split(
        self, rows: Sequence[tuple[bytes, bytes]]
    ) -> Iterator[tuple[list[tuple[bytes, bytes]], int]]:
        """Yield rows for one transaction each, and their size; leave out those too large."""
        part: list[tuple[bytes, bytes]] = []
        size = 0
        for row in rows:
            own = len(row[1]) + ROW_BYTES
            if own > self._max_bytes // 2:
                continue
            if part and (size + own > self._log_bytes or len(part) == self._rows_at_once):
                yield part, size
                part, size = [], 0
            part.append(row)
            size += own
        if part:
            yield part, size

    def _touch(self) -> None:
        """Note which rows were read since the last time."""
        self._clock += 1
        while self._touched:
            part = list(islice(self._touched, self._rows_at_once))
            with self._db:
                self._db.executemany(
                    "UPDATE results SET used = ? WHERE id = ?", [(self._clock, i) for i in part]
                )
            self._touched.difference_update(part)

    @property
    def _rows_at_once(self) -> int:
        return self._log_bytes // PAGE_BYTES

    def _make_room(self, size: int) -> None:
        """Delete the rows used longest ago until `size` more bytes fit, or none is left."""
        while (excess := self._count_bytes() + size - self._max_bytes) > 0:
            oldest = self._db.execute(
                "SELECT id, length(value) FROM results ORDER BY used LIMIT ?", (EVICTED_AT_ONCE,)
            ).fetchall()
            if not oldest:
                return
            freed = accumulate(length + ROW_BYTES for _, length in oldest)
            count = 1 + sum(total < excess for total in freed)
            gone = [(row_id,) for row_id, _ in oldest[:count]]
            self._db.executemany("DELETE FROM results WHERE id = ?", gone)

    def _count_bytes(self) -> int:
        """Count the bytes of the file's pages that hold something."""
        pages = self._ask("PRAGMA page_count") - self._ask("PRAGMA freelist_count")
        return pages * PAGE_BYTES

    def _bear(self, error: sqlite3.Error) -> None:
        """Go on without the disk: for now where it is full or busy, for good where it is broken."""
        if isinstance(error, sqlite3.OperationalError):
            log.warning("cache_file %s: %s; results are not kept there now", self._path, error)
            return
        self._is_sound = False
        log.error(
            "cache_file %s is damaged (%s) and not used any more; stop the server and delete it",
            self._path,
            error,
        )

    def close(self) -> None:
        """Close the file."""
        try:
            if self._is_sound:
                self._touch()
        except sqlite3.Error as error:
            self._bear(error)
        self._db.close()


def _seal(value: bytes) -> bytes:
    """Put a checksum in front of a value: SQLite does not notice a bit that the disk has turned."""
    return zlib.crc32(value).to_bytes(CRC_BYTES, "little") + value


def _verify(stored: bytes) -> bytes | None:
    value = stored[CRC_BYTES:]
    return value if _seal(value)[:CRC_BYTES] == stored[:CRC_BYTES] else None
