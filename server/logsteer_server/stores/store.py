"""A store of uploaded contents: a name points to a content, which is addressed by its SHA-256.

    contents/<sha256>.safetensors   a content; engines read it by this path
    names/<name>.json               a card: the content that the name points to, and what it is
    uploads/                        files that are being written
    lock                            held by the one who changes the others

After `a` and `b` were given the same file there are two cards and one content. When `a` is given
another file there are two contents, and when `b` is deleted the first of them goes.

Content and card are on the disk before one rename gives the name its new card, so that a server
killed at any moment leaves each name with its old content or its new one. A content that was left
without a name is removed when a store next reads the directory. Threads and server processes may
share a directory.
"""

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar, cast

from pydantic import ValidationError

from logsteer.errors import APIError, api_error
from logsteer.schemas import AdapterCard, OverrideCard, VectorCard
from logsteer.schemas.problem import ProblemCode
from logsteer_server.settings import ConfigurationError, Settings
from logsteer_server.stores.upload import Upload, report_faults, sync_directory

log = logging.getLogger(__name__)

MAX_NAMES = 10_000
SHOWN_NAMES = 20
"""Names that an error lists."""
PARSED_CARDS = 1024
"""Cards of which the latest are kept parsed, by their bytes: each request reads those it names."""
MARK_BYTES = 16

C = TypeVar("C", bound=VectorCard | OverrideCard | AdapterCard)


@dataclass(frozen=True, slots=True)
class Kind(Generic[C]):
    """What a store holds: its noun, the class of its cards, the error for a name without one."""

    noun: str
    card: type[C]
    unknown: ProblemCode
    how: str
    """How one gets there."""

    @property
    def plural(self) -> str:
        """The noun for several: the kind's directory, path and key of the list."""
        return f"{self.noun}s"


VECTORS = Kind("vector", VectorCard, "unknown_vector", "PUT or train one")
OVERRIDES = Kind("override", OverrideCard, "unknown_override", "PUT one")
ADAPTERS = Kind("adapter", AdapterCard, "unknown_adapter", "PUT one")
KINDS = (VECTORS, OVERRIDES, ADAPTERS)


@dataclass(frozen=True, slots=True)
class StoredContent:
    """A content's file, and the name that it was found under: None where found by SHA-256."""

    name: str | None
    sha256: str
    path: Path


@dataclass(frozen=True, slots=True)
class _Index:
    """What the directory holds: SHA-256 by name, None for a damaged card; bytes by SHA-256."""

    names: dict[str, str | None]
    sizes: dict[str, int]

    def list_unnamed(self) -> set[str]:
        """Return the contents that no name points to.

        While a card is damaged, any content may be its own: none is then said to be unnamed.
        """
        named = set(self.names.values())
        return set() if None in named else self.sizes.keys() - named


class Store(Generic[C]):
    """Contents of a kind in a directory of their own below `root`, of at most `max_bytes`.

    The directory is made when the first content comes. Methods block: call them in a thread. Errors
    of all of them: APIError `unknown` of the kind, and `internal` where the disk fails or a file is
    damaged. Errors here: ConfigurationError where the directory cannot be used.
    """

    def __init__(self, kind: Kind[C], root: Path, max_bytes: int) -> None:
        self.kind = kind
        self.directory = (root / kind.plural).absolute()
        self.max_bytes = max_bytes
        self._contents, self._names = self.directory / "contents", self.directory / "names"
        self._uploads = self.directory / "uploads"
        parse = lru_cache(PARSED_CARDS)(kind.card.model_validate_json)
        self._parse_card = cast(Callable[[bytes], C], parse)
        self._thread_lock = threading.Lock()
        self._index: _Index | None = None
        self._mark = b""
        if self.directory.exists():
            try:
                self._make_directories()
                with self._exclude() as lock:
                    self._remove_left_overs()
                    self._read_index(lock)
            except OSError as error:
                raise ConfigurationError(
                    f"store_directory: {self.directory} cannot be used ({error}); name another one"
                ) from error

    def _make_directories(self) -> None:
        for directory in (self._contents, self._names, self._uploads):
            missing = [path for path in (directory, *directory.parents) if not path.exists()]
            directory.mkdir(parents=True, exist_ok=True)
            for path in missing:
                sync_directory(path.parent)

    def _remove_left_overs(self) -> None:
        """Remove the uploads of servers that were killed: nobody holds a lock on them."""
        for path in self._uploads.glob("*.part"):
            # One that is at work is locked, or gone by now: done with.
            with suppress(BlockingIOError, FileNotFoundError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()

    @contextmanager
    def _exclude(self) -> Iterator[int]:
        """Keep other threads and servers from changing the directory; give the open lock file."""
        with self._thread_lock:  # on a network's disk, a process's threads share a file's lock
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield lock
            finally:
                os.close(lock)

    def _read_index(self, lock: int) -> _Index:
        """Return what the directory holds, read anew where another server has changed it."""
        mark = os.pread(lock, MARK_BYTES, 0)
        if self._index is None or mark != self._mark:
            names: dict[str, str | None] = {}
            for path in self._names.glob("*.json"):
                with suppress(FileNotFoundError):  # removed by hand just now
                    card = self._read_card(path)
                    names[path.stem] = card.sha256 if card else None
            files = [path for path in self._contents.glob("*.safetensors") if len(path.stem) == 64]
            sizes = {path.stem: path.stat().st_size for path in files}
            self._index, self._mark = _Index(names, sizes), mark
            self._remove_unnamed(self._index)
        return self._index

    @contextmanager
    def _change(self, lock: int) -> Iterator[None]:
        """Have other servers read the directory anew, and this one too where the change fails."""
        index, self._index = self._index, None
        self._mark = os.urandom(MARK_BYTES)
        os.pwrite(lock, self._mark, 0)  # before the change: this server may be killed during it
        yield
        self._index = index

    def receive(self) -> Upload:
        """Open a file for an upload."""
        with report_faults(self.directory):
            self._make_directories()
            with self._exclude():
                return Upload(self._uploads)

    def put(self, upload: Upload, card: C) -> None:
        """Point the card's name to a finished upload, whatever it pointed to before.

        Errors: APIError `payload_too_large` where the store is full.
        """
        with report_faults(self.directory), self._exclude() as lock:
            index = self._read_index(lock)
            self._check_room(index, card)
            draft = Upload(self._uploads)
            try:
                draft.write(card.model_dump_json().encode())
                draft.finish()
                with self._change(lock):
                    upload.path.replace(self._locate(card.sha256))
                    sync_directory(self._contents)
                    draft.path.replace(self._locate_card(card.name))
                    sync_directory(self._names)
                    index.names[card.name] = card.sha256
                    index.sizes[card.sha256] = card.bytes
                    self._remove_unnamed(index)
            finally:
                draft.discard()

    def _check_room(self, index: _Index, card: C) -> None:
        """Refuse a card with which the store would hold more than it may."""
        noun, nouns = self.kind.noun, self.kind.plural
        after = _Index(
            index.names | {card.name: card.sha256}, index.sizes | {card.sha256: card.bytes}
        )
        total = sum(after.sizes.values()) - sum(after.sizes[old] for old in after.list_unnamed())
        if total > self.max_bytes:
            detail = (
                f"The {noun} store would hold {total} bytes, at most {self.max_bytes} are kept: "
                f"delete {nouns}, or raise {noun}_store_bytes."
            )
            raise api_error("payload_too_large", detail)
        if len(after.names) > max(MAX_NAMES, len(index.names)):
            detail = f"There are {len(index.names)} {nouns}, which is the limit: delete some."
            raise api_error("payload_too_large", detail)

    def _remove_unnamed(self, index: _Index) -> None:
        for sha256 in index.list_unnamed():
            self._locate(sha256).unlink(missing_ok=True)
            del index.sizes[sha256]

    def _locate(self, sha256: str) -> Path:
        return self._contents / f"{sha256}.safetensors"

    def _locate_card(self, name: str) -> Path:
        return self._names / f"{name}.json"

    def _read_card(self, path: Path) -> C | None:
        """Return a card, None for a damaged one. Errors: OSError."""
        try:
            return self._parse_card(path.read_bytes())
        except ValidationError:
            log.warning("the card %s is damaged: PUT the %s again", path, self.kind.noun)
            return None

    def describe(self, name: str) -> C:
        """Return the card of a name."""
        path = self._locate_card(name)
        with report_faults(self.directory):
            try:
                card = self._read_card(path)
            except FileNotFoundError as error:
                raise self._refuse_name(name) from error
        if card is None:
            raise self.report_damage(path)
        return card

    def find(self, name: str) -> StoredContent:
        """Return the content of a name."""
        card = self.describe(name)
        while not (path := self._locate(card.sha256)).exists():
            missing, card = card, self.describe(name)
            if card.sha256 == missing.sha256:  # it was not just given another content
                raise self.report_damage(path)
        return StoredContent(name, card.sha256, path)

    def find_content(self, sha256: str) -> StoredContent:
        """Return the content with a SHA-256."""
        path = self._locate(sha256)
        if not path.exists():
            detail = f"No {self.kind.noun} has the content {sha256}; GET /{self.kind.plural} lists "
            raise api_error(self.kind.unknown, detail + "what there is.")
        return StoredContent(None, sha256, path)

    def report_damage(self, path: Path) -> APIError:
        """Return the error for a file that is not as this store has written it."""
        detail = f"{path} is damaged: PUT the {self.kind.noun} again, or restore the file."
        return api_error("internal", detail)

    def _refuse_name(self, name: str) -> APIError:
        names = sorted(path.stem for path in self._names.glob("*.json"))
        known = ", ".join(names[:SHOWN_NAMES]) + (", and more" if names[SHOWN_NAMES:] else "")
        there = f"these are there: {known}." if names else f"none is there yet; {self.kind.how}."
        detail = f"No {self.kind.noun} is named {name!r}; {there}"
        return api_error(self.kind.unknown, detail)

    def list_all(self) -> tuple[list[C], int]:
        """Return every name's card, by name, and the bytes of all contents.

        Damaged cards are left out, and logged.
        """
        if not self.directory.exists():
            return [], 0
        cards = []
        with report_faults(self.directory):
            with self._exclude() as lock:
                index = self._read_index(lock)
                names, total = sorted(index.names), sum(index.sizes.values())
            for name in names:
                with suppress(FileNotFoundError):  # deleted since
                    cards.append(self._read_card(self._locate_card(name)))
        return [card for card in cards if card], total

    def delete(self, name: str) -> str:
        """Remove a name, and its content where it had no other name; return its SHA-256."""
        self.describe(name)  # where nothing was ever stored, there is no lock to hold
        with report_faults(self.directory), self._exclude() as lock:
            index = self._read_index(lock)
            card = self.describe(name)
            with self._change(lock):
                self._locate_card(name).unlink()
                sync_directory(self._names)
                index.names.pop(name, None)
                self._remove_unnamed(index)
        return card.sha256


def check_store_directory(settings: Settings) -> None:
    """Make sure that the stores can be used, without making them. Errors: ConfigurationError."""
    for kind in KINDS:
        directory = settings.store_path / kind.plural
        there = next(path for path in (directory, *directory.parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.R_OK | os.W_OK | os.X_OK)):
            raise ConfigurationError(
                f"store_directory: {there} is not a directory that can be written to; name another"
            )


def stamp() -> str:
    """Return the time as cards give it: RFC 3339, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
