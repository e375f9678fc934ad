"""Stores of uploaded safetensors files, by content, and of names that point to them.

    contents/<sha256>.safetensors   a file
    names/<name>.json               its card
    incoming/                       uploads that are not complete

A file has its name only once it is on the disk, so that a server killed at any moment leaves each
name with its old content or its new one. Engines read the contents themselves.
"""

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkstemp
from typing import IO, Generic, Protocol, TypeVar

from pydantic import ValidationError

from logsteer.errors import APIError, api_error
from logsteer.schemas import AdapterCard, OverrideCard
from logsteer.schemas.problem import ProblemCode
from logsteer_server.settings import ConfigurationError

MAX_NAMES = 1000

C = TypeVar("C", bound=OverrideCard | AdapterCard)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A kept file, by the name that it was found under."""

    name: str
    path: str
    sha256: str


class FileSource(Protocol):
    """Where files are kept."""

    def find(self, name: str) -> StoredFile:
        """The file of a name. Errors: APIError, for a name that nothing has."""
        ...


@dataclass(frozen=True, slots=True)
class Kind(Generic[C]):
    """What a store keeps: its noun, the card of one, the error for a name that nothing has."""

    noun: str
    card: type[C]
    unknown: ProblemCode


OVERRIDES = Kind("override", OverrideCard, "unknown_override")
ADAPTERS = Kind("adapter", AdapterCard, "unknown_adapter")


class IncomingFile:
    """An upload that is being written; `discard` when done, whatever became of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        handle, name = mkstemp(dir=directory, suffix=".part")
        self.path = Path(name)
        self._file: IO[bytes] = os.fdopen(handle, "wb")
        fcntl.flock(self._file, fcntl.LOCK_EX)  # it is at work, and no left-over
        self._hasher = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append bytes. Errors: APIError `internal` where the disk fails."""
        self._hasher.update(data)
        with _report_faults(self._directory):
            self._file.write(data)
        self.size += len(data)

    def finish(self) -> str:
        """The SHA-256 of the bytes, which are on the disk."""
        with _report_faults(self._directory):
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._hasher.hexdigest()

    def discard(self) -> None:
        """Close the file, and take it away where it was not kept."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):  # what could not be written on a full disk
            self._file.close()


class FileStore(Generic[C]):
    """Kept files of a kind in a directory, made when the first one comes; threads may share it.

    Its methods block: call them in a thread. Errors of all of them: APIError `unknown` of the kind,
    and `internal` where the disk fails.
    """

    def __init__(self, kind: Kind[C], directory: Path, max_bytes: int) -> None:
        self._kind = kind
        self.directory = directory
        self.max_bytes = max_bytes
        self._contents, self._names = directory / "contents", directory / "names"
        self._incoming = directory / "incoming"
        self._lock = threading.Lock()
        if directory.exists():
            try:
                self._drop_left_overs()
            except OSError as error:
                raise ConfigurationError(
                    f"{kind.noun}_directory: {directory} cannot be used ({error}); name another one"
                ) from error

    def _drop_left_overs(self) -> None:
        """Take away the uploads of servers that were killed: nobody holds a lock on them."""
        for path in self._incoming.glob("*.part"):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                path.unlink(missing_ok=True)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """The directory for one thread of one server."""
        with (
            _report_faults(self.directory),
            self._lock,
            (self.directory / "lock").open("wb") as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @property
    def noun(self) -> str:
        """What it keeps."""
        return self._kind.noun

    def receive(self) -> IncomingFile:
        """A file for an upload."""
        with _report_faults(self.directory):
            for directory in (self._contents, self._names, self._incoming):
                directory.mkdir(parents=True, exist_ok=True)
            return IncomingFile(self._incoming)

    def keep(self, incoming: IncomingFile, card: C) -> None:
        """Point the card's name to an upload that is finished, whatever it pointed to before.

        Errors: APIError `payload_too_large` where the store is full.
        """
        with self._change():
            content = self._find_content(card.sha256)
            before = self._read(self._names / f"{card.name}.json")
            self._check_room(card, before, content)
            incoming.path.replace(content)
            _sync(self._contents)
            self._write_card(card)
            if before is not None:
                self._drop_unnamed(before.sha256)

    def _write_card(self, card: C) -> None:
        handle, name = mkstemp(dir=self._names, suffix=".new")
        with os.fdopen(handle, "wb") as file:
            file.write(card.model_dump_json().encode())
            file.flush()
            os.fsync(handle)
        Path(name).replace(self._names / f"{card.name}.json")
        _sync(self._names)

    def _check_room(self, card: C, before: C | None, content: Path) -> None:
        cards = self._read_all()
        freed = 0
        if before is not None and sum(c.sha256 == before.sha256 for c in cards) == 1:
            freed = before.bytes
        added = 0 if content.exists() else card.bytes
        total = self._count_bytes() + added - freed
        if total > self.max_bytes:
            detail = (
                f"The {self.noun} store would hold {total} bytes, at most {self.max_bytes} "
                f"are kept: delete {self.noun}s, or raise {self.noun}_store_bytes."
            )
            raise api_error("payload_too_large", detail)
        if before is None and len(cards) >= MAX_NAMES:
            detail = f"There are {MAX_NAMES} {self.noun}s, which is the limit: delete some."
            raise api_error("payload_too_large", detail)

    def _find_content(self, sha256: str) -> Path:
        return self._contents / f"{sha256}.safetensors"

    def _count_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._contents.glob("*.safetensors"))

    def _drop_unnamed(self, sha256: str) -> None:
        if all(card.sha256 != sha256 for card in self._read_all()):
            self._find_content(sha256).unlink(missing_ok=True)

    def _read(self, path: Path) -> C | None:
        try:
            card: C = self._kind.card.model_validate_json(path.read_bytes())  # type: ignore[assignment]
            return card
        except FileNotFoundError:
            return None
        except ValidationError as error:
            detail = f"{path} is damaged; remove it and upload the {self.noun} again"
            raise OSError(detail) from error

    def _read_all(self) -> list[C]:
        found = [self._read(path) for path in self._names.glob("*.json")]
        return sorted((card for card in found if card), key=lambda card: card.name)

    def describe(self, name: str) -> C:
        """The card of a name."""
        with _report_faults(self.directory):
            card = self._read(self._names / f"{name}.json")
            if card is None:
                raise self._refuse_name(name)
        return card

    def find(self, name: str) -> StoredFile:
        """The file of a name."""
        card = self.describe(name)
        path = self._find_content(card.sha256).resolve()
        return StoredFile(name, str(path), card.sha256)

    def _refuse_name(self, name: str) -> APIError:
        names = [card.name for card in self._read_all()]
        known = ", ".join(names[:20]) + (", and more" if len(names) > 20 else "")
        there = f"these are there: {known}." if names else "none is there yet; PUT one."
        detail = f"No {self.noun} is named {name!r}; {there}"
        return api_error(self._kind.unknown, detail)

    def list_all(self) -> tuple[list[C], int]:
        """Every name's card, by name, and the bytes of all contents."""
        with _report_faults(self.directory):
            return self._read_all(), self._count_bytes()

    def delete(self, name: str) -> str:
        """The content that the name pointed to; the name is gone, and the content with the last."""
        self.describe(name)
        with self._change():
            path = self._names / f"{name}.json"
            card = self._read(path)
            if card is None:
                raise self._refuse_name(name)
            path.unlink()
            _sync(self._names)
            self._drop_unnamed(card.sha256)
        return card.sha256


@contextmanager
def _report_faults(directory: Path) -> Iterator[None]:
    """The faults of a disk as APIError."""
    try:
        yield
    except OSError as error:
        detail = f"The store {directory} cannot be used ({error}). Make room on its disk."
        raise api_error("internal", detail) from error


def stamp() -> str:
    """Now, as cards say it: RFC 3339, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _sync(directory: Path) -> None:
    """Have a directory's entries on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
