"""A store of uploaded contents: a name points to a content, which is addressed by its SHA-256.

After `a` and `b` were given the same file there are two cards of one content. When `a` is given
another file there are two contents, and when `b` is deleted the first of them goes.

`DirectoryStore` keeps cards and contents in a directory, `BucketStore` behind a URL; whoever uses a
store does not know which.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic

from logsteer.errors import APIError, api_error
from logsteer.schemas import AdapterCard, OverrideCard, VectorCard
from logsteer.schemas.problem import ProblemCode
from logsteer_server.stores.layout import C
from logsteer_server.stores.upload import StoreRoom, Upload, refuse_size

log = logging.getLogger(__name__)

MAX_NAMES = 10_000
SHOWN_NAMES = 20
"""Names that an error lists."""


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
    """A content, and the name that it was found under: None where found by SHA-256.

    `source` is its file's absolute path, or its place below `store_url`.
    """

    name: str | None
    sha256: str
    source: str

    @property
    def path(self) -> Path:
        """The file of a content of a directory."""
        return Path(self.source)


@dataclass(frozen=True, slots=True)
class StoreListing(Generic[C]):
    """What a store holds: cards by name, the names that are damaged, the bytes of all contents."""

    cards: list[C]
    damaged: list[str]
    num_bytes: int


class Store(ABC, Generic[C]):
    """Contents of a kind, of at most `max_bytes`.

    Methods block: call them in a thread. Errors of all of them: APIError `unknown` of the kind,
    `internal` where the disk fails or a file is damaged, and `overloaded` where a directory that is
    to be changed is locked by others, or a URL does not answer.
    """

    def __init__(self, kind: Kind[C], max_bytes: int) -> None:
        self.kind = kind
        self.max_bytes = max_bytes
        self.room = StoreRoom(kind.noun, max_bytes)

    @abstractmethod
    def receive(self, name: str | None = None, announced: int = 0) -> Upload:
        """Open a file for an upload of at least `announced` bytes, which reserves their room.

        `name` is what it is for, whose content it may take the place of. Errors: APIError
        `payload_too_large` and `overloaded` where there is no room.
        """

    @abstractmethod
    def publish(self, upload: Upload) -> str:
        """Return where engines read a finished upload, which has no name yet."""

    @abstractmethod
    def put(self, upload: Upload, card: C) -> None:
        """Point the card's name to a finished upload, whatever it pointed to before.

        Errors: APIError `payload_too_large` where the store is full.
        """

    @abstractmethod
    def describe(self, name: str) -> C:
        """Return the card of a name."""

    @abstractmethod
    def find(self, name: str) -> StoredContent:
        """Return the content of a name."""

    @abstractmethod
    def find_content(self, sha256: str) -> StoredContent:
        """Return the content with a SHA-256."""

    @abstractmethod
    def read(self, found: StoredContent) -> bytes:
        """Return a content's bytes. Errors: FileNotFoundError where it is gone by now."""

    @abstractmethod
    def list_all(self) -> StoreListing[C]:
        """Return every name's card, and which names are damaged."""

    @abstractmethod
    def delete(self, name: str) -> str | None:
        """Remove a name, and its content where it had no other name.

        Return its SHA-256, None where the card was damaged. No room on the disk is needed.
        """

    def report_damage(self, found: StoredContent) -> APIError:
        """Return the error for a content that is not as this store has written it."""
        noun = self.kind.noun
        what = f"{noun} {found.name!r}" if found.name else found.sha256
        return self._report(f"content of {what}", found.source)

    def report_card(self, name: str, place: str) -> APIError:
        """Return the error for a card that is not as this store has written it."""
        return self._report(f"card of {self.kind.noun} {name!r}", place)

    def _report(self, what: str, place: str) -> APIError:
        noun = self.kind.noun
        log.error("%s is damaged: PUT or DELETE the %s, or restore the file", place, noun)
        detail = f"The {what} is damaged: PUT the {noun} again, or DELETE it."
        return api_error("internal", detail)

    def check_room(self, names: Collection[str], num_bytes: int, card: C) -> None:
        """Refuse a card with which the store would hold `num_bytes`, or too many names."""
        if num_bytes > self.max_bytes:
            raise refuse_size(self.kind.noun, num_bytes, self.max_bytes)
        if card.name not in names and len(names) >= MAX_NAMES:
            nouns = self.kind.plural
            detail = f"There are {len(names)} {nouns}, which is the limit: delete some."
            raise api_error("payload_too_large", detail)

    def refuse_name(self, name: str, names: Collection[str]) -> APIError:
        """Return the error for a name without a content; `names` are those with one."""
        shown = sorted(names)
        known = ", ".join(shown[:SHOWN_NAMES]) + (", and more" if shown[SHOWN_NAMES:] else "")
        there = f"these are there: {known}." if shown else f"none is there yet; {self.kind.how}."
        detail = f"No {self.kind.noun} is named {name!r}; {there}"
        return api_error(self.kind.unknown, detail)

    def refuse_content(self, sha256: str) -> APIError:
        """Return the error for a SHA-256 that no content has."""
        detail = f"No {self.kind.noun} has the content {sha256}; GET /{self.kind.plural} lists "
        return api_error(self.kind.unknown, detail + "what there is.")


def stamp() -> str:
    """Return the time as cards give it: RFC 3339, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
