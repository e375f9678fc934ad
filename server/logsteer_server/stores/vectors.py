"""The vector store: steering vectors in one SQLite file, by name and by content.

A name points to a content; a content that no name points to goes. Every change is one transaction
and on the disk when it is reported, so that a server killed at any moment leaves each name with its
old content or its new one.
"""

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cachetools import LRUCache

from logsteer.errors import APIError, api_error
from logsteer.schemas import VectorAbout, VectorCard
from logsteer_server.settings import ConfigurationError, Settings
from logsteer_server.stores.layer_vectors import LayerVectors, parse_content

APPLICATION_ID = 0x6C67_7376
SCHEMA_VERSION = 1
MAX_NAMES = 10_000
CACHED_BYTES = 64 * 2**20
"""Of contents that were read lately; they are checked once, not at each request."""

CREATE = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
    "CREATE TABLE contents (sha256 TEXT PRIMARY KEY, card TEXT NOT NULL, data BLOB NOT NULL)",
    "CREATE TABLE names (name TEXT PRIMARY KEY, created TEXT NOT NULL, about TEXT NOT NULL, "
    "sha256 TEXT NOT NULL REFERENCES contents (sha256))",
    "CREATE INDEX names_by_content ON names (sha256)",
)
CARDS = "SELECT name, sha256, created, about, card FROM names JOIN contents USING (sha256)"


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """Kept vectors: the name that they were found under, None where they were read by content."""

    name: str | None
    sha256: str
    vectors: LayerVectors


def check_vector_file(settings: Settings) -> None:
    """Make sure that the file can serve, without making it. Errors: ConfigurationError."""
    path = settings.vector_path
    if path.exists():
        VectorStore(path, settings.vector_store_bytes).close()
        return
    home = next(parent for parent in path.parents if parent.exists())
    is_default = settings.vector_file is None
    if not (home.is_dir() and os.access(home, os.W_OK) and (is_default or home == path.parent)):
        raise ConfigurationError(
            f"vector_file: {path.parent} is not a directory that can be written to; create it, or "
            "name a file elsewhere"
        )


class VectorStore:
    """Kept vectors, in a file of at most about `max_bytes`; threads may share it.

    Its methods block: call them in a thread. Errors of all of them: APIError `unknown_vector`, and
    `internal` where the disk fails or the file is found damaged. Errors here: ConfigurationError
    where the file is no vector store, is damaged, or cannot be used; it is then left as it is.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._cache: LRUCache[str, LayerVectors] = LRUCache(CACHED_BYTES, lambda v: v.num_bytes)
        try:
            self._db = sqlite3.connect(
                path, timeout=10, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._refuse(error) from error
        try:
            self._prepare()
        except (sqlite3.Error, ConfigurationError) as error:
            self._db.close()
            raise self._refuse(error) from error

    @classmethod
    def open(cls, settings: Settings) -> "VectorStore":
        """The store of these settings, made where there is none. Errors: ConfigurationError."""
        path = settings.vector_path
        if settings.vector_file is None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError(
                    f"vector_file: {path.parent} cannot be made ({error}); name a file elsewhere"
                ) from error
        return cls(path, settings.vector_store_bytes)

    def _refuse(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(
            f"vector_file: {self.path} cannot hold vectors ({error}). It was left as it is: move "
            "it away or restore a copy of it, or name another file in a directory that can be "
            "written to"
        )

    def _prepare(self) -> None:
        # A rollback journal, not a write-ahead log: the store is then one file, and sound on
        # network file systems. EXTRA is FULL and, with such a journal, lasting at a power cut, too.
        self._db.execute("PRAGMA synchronous = EXTRA")
        self._db.execute("PRAGMA foreign_keys = ON")
        if self._ask("SELECT count(*) FROM sqlite_schema") == 0:
            with self._transact():
                if self._ask("SELECT count(*) FROM sqlite_schema") == 0:
                    for statement in CREATE:
                        self._db.execute(statement)
        if self._ask("PRAGMA application_id") != APPLICATION_ID:
            raise ConfigurationError("it is another program's database")
        if self._ask("PRAGMA user_version") != SCHEMA_VERSION:
            raise ConfigurationError("another version of this server wrote it")
        found = self._ask("PRAGMA quick_check(1)")
        if found != "ok":
            raise ConfigurationError(f"it is damaged: {found}")

    def _ask(self, statement: str) -> Any:
        """The one value that a statement gives."""
        return self._db.execute(statement).fetchone()[0]

    @contextmanager
    def _transact(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        """A transaction: all of it or, after an error, nothing."""
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _use(self) -> Iterator[None]:
        """The file for one thread, its faults as APIError."""
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise self._fail(error) from error

    def _fail(self, cause: object) -> APIError:
        return api_error(
            "internal",
            f"The vector store {self.path} cannot be used ({cause}). Make room on its disk, or "
            "stop the server and restore the file from a copy.",
        )

    def put(self, name: str, vectors: LayerVectors, about: VectorAbout) -> VectorCard:
        """Point a name to vectors, whatever it pointed to before; their card.

        Errors: APIError `payload_too_large` where the store is full.
        """
        created = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        content = vectors.content
        facts = {
            "hook": vectors.hook,
            "layers": list(vectors.layers),
            "width": vectors.width,
            "norms": {str(layer): norm for layer, norm in vectors.norms().items()},
            "bytes": len(content),
        }
        with self._use(), self._transact():
            self._db.execute(
                "INSERT OR IGNORE INTO contents VALUES (?, ?, ?)",
                (vectors.sha256, json.dumps(facts), content),
            )
            self._db.execute(
                "INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)",
                (name, created, about.model_dump_json(exclude_none=True), vectors.sha256),
            )
            self._drop_unnamed()
            self._check_room()
        return VectorCard(name=name, sha256=vectors.sha256, created=created, about=about, **facts)

    def _check_room(self) -> None:
        """Errors: APIError for more than the store may hold."""
        total = self._count_bytes()
        if total > self.max_bytes:
            detail = (
                f"The vector store would hold {total} bytes, at most {self.max_bytes} are kept: "
                "delete vectors, or raise vector_store_bytes."
            )
            raise api_error("payload_too_large", detail)
        if self._ask("SELECT count(*) FROM names") > MAX_NAMES:
            detail = f"The vector store has {MAX_NAMES} names, which is its limit: delete vectors."
            raise api_error("payload_too_large", detail)

    def _count_bytes(self) -> int:
        total: int = self._ask("SELECT coalesce(sum(length(data)), 0) FROM contents")
        return total

    def _drop_unnamed(self) -> None:
        self._db.execute("DELETE FROM contents WHERE sha256 NOT IN (SELECT sha256 FROM names)")

    def find(self, name: str) -> StoredVectors:
        """The vectors of a name."""
        with self._use(), self._transact("DEFERRED"):  # another server may have the file, too
            row = self._db.execute("SELECT sha256 FROM names WHERE name = ?", (name,)).fetchone()
            if row is None:
                raise self._refuse_name(name)
            return StoredVectors(name, row[0], self._load(row[0]))

    def read(self, sha256: str) -> StoredVectors:
        """The vectors of a content."""
        with self._use():
            return StoredVectors(None, sha256, self._load(sha256))

    def _load(self, sha256: str) -> LayerVectors:
        """A content, from the cache where it is still kept in the file."""
        wanted = "1" if sha256 in self._cache else "data"
        row = self._db.execute(
            f"SELECT {wanted} FROM contents WHERE sha256 = ?",  # noqa: S608
            (sha256,),
        ).fetchone()
        if row is None:
            detail = f"No vector has the content {sha256}; GET /vectors lists what there is."
            raise api_error("unknown_vector", detail)
        if sha256 in self._cache:
            return self._cache[sha256]
        if hashlib.sha256(row[0]).hexdigest() != sha256:
            raise self._fail(f"the content {sha256} is damaged")
        try:
            vectors = parse_content(row[0])
        except ValueError as error:
            raise self._fail(f"the content {sha256} cannot be read: {error}") from error
        if vectors.num_bytes <= CACHED_BYTES:
            self._cache[sha256] = vectors
        return vectors

    def _refuse_name(self, name: str) -> APIError:
        rows = self._db.execute("SELECT name FROM names ORDER BY name LIMIT 21").fetchall()
        names = [row[0] for row in rows]
        known = ", ".join(names[:20]) + (", and more" if len(names) > 20 else "")
        there = f"these are there: {known}." if names else "none is there yet; PUT or train one."
        return api_error("unknown_vector", f"No vector is named {name!r}; {there}")

    def describe(self, name: str) -> VectorCard:
        """The card of a name."""
        with self._use():
            row = self._db.execute(f"{CARDS} WHERE name = ?", (name,)).fetchone()
            if row is None:
                raise self._refuse_name(name)
        return _read_card(row)

    def list_all(self) -> tuple[list[VectorCard], int]:
        """Every name's card, by name, and the bytes of all contents."""
        with self._use():
            rows = self._db.execute(f"{CARDS} ORDER BY name").fetchall()
            total = self._count_bytes()
        return [_read_card(row) for row in rows], total

    def delete(self, name: str) -> str:
        """The content that the name pointed to; the name is gone, and the content with the last."""
        with self._use(), self._transact():
            row = self._db.execute("SELECT sha256 FROM names WHERE name = ?", (name,)).fetchone()
            if row is None:
                raise self._refuse_name(name)
            self._db.execute("DELETE FROM names WHERE name = ?", (name,))
            self._drop_unnamed()
        return str(row[0])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()


def _read_card(row: tuple[str, str, str, str, str]) -> VectorCard:
    name, sha256, created, about, facts = row
    return VectorCard(
        name=name, sha256=sha256, created=created, about=json.loads(about), **json.loads(facts)
    )
