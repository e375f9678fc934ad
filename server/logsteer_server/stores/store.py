"""A store of uploaded contents: a name points to a content, whose address is its SHA-256.

    vectors/names/<name>.json                        a record: a card, and its content's name
    vectors/contents/<sha256>-<time>.safetensors     a content, written once
    keys/<key>/vectors/…                             the same in a key's namespace

A record is one small object, written whole, after its content: a name always has its old content or
its new one, and if two servers write it at the same time, the last one wins.

Contents without a name are swept. This needs no lock, because an old content never gets a name:
`<time>` is the start of the period of `grace_s` in which it was written (seconds since 1970), only
contents of the current period get names, and only contents two periods old are swept. For a grace
of an hour, with a put at 12:59 and one of the same bytes at 13:01:

    contents/ab12…-12:00     put at 12:59, named until about 13:59 at the latest
    contents/ab12…-13:00     put at 13:01
    at 14:00                 ab12…-12:00 goes, if no name points to it

So the servers' clocks may differ by less than `grace_s`, and an upload must take less than that.
"""

import json
import logging
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256 as new_sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from logsteer.errors import APIError, api_error
from logsteer.schemas import AdapterCard, OverrideCard, SaeCard, VariantCard, VectorCard
from logsteer.schemas.common import ProblemCode
from logsteer_server.stores.objects import ObjectEntry, Objects
from logsteer_server.stores.upload import Upload, refuse_damage, refuse_size

log = logging.getLogger(__name__)

MAX_NAMES = 10_000
"""Most names of a kind in one namespace: a listing reads as many small objects once, and an answer
with their cards has about 5 MB."""
SHOWN_NAMES = 20
"""Most names that an error lists."""
READERS = 16
"""Threads that read the new records of a listing."""
SLACK = 2
"""Limit of all contents of a store, with contents to be swept, as a multiple of `max_bytes`."""
RETRY_AFTER_S = 60.0
GRACE_S = 3600.0
_CONTENT = re.compile(r"(?P<sha256>[0-9a-f]{64})-(?P<time>[0-9]{1,12})\.safetensors")

C = TypeVar("C", bound=VectorCard | OverrideCard | AdapterCard | SaeCard | VariantCard)


@dataclass(frozen=True, slots=True)
class Kind(Generic[C]):
    """A kind of content: its noun, the class of its cards, the error code of an unknown name."""

    noun: str
    card: type[C]
    unknown: ProblemCode
    how: str
    """How to create one."""

    @property
    def plural(self) -> str:
        """The noun for several: the kind's directory, path and key of the list."""
        return f"{self.noun}s"


VECTORS = Kind("vector", VectorCard, "unknown_vector", "PUT or train one")
OVERRIDES = Kind("override", OverrideCard, "unknown_override", "PUT one")
ADAPTERS = Kind("adapter", AdapterCard, "unknown_adapter", "PUT one")
SAES = Kind("sae", SaeCard, "unknown_sae", "PUT one")
VARIANTS = Kind("variant", VariantCard, "unknown_model", "PUT one")
KINDS = (VECTORS, OVERRIDES, ADAPTERS, SAES, VARIANTS)


@dataclass(frozen=True, slots=True)
class StoredContent:
    """A content, and the name that it was looked up by; None for a lookup by SHA-256.

    `source`: its file's absolute path, or its place below `store_url`.
    """

    name: str | None
    sha256: str
    source: str


@dataclass(frozen=True, slots=True)
class StoreListing(Generic[C]):
    """A listing of a store: its cards, damaged names, and the bytes of all named contents."""

    cards: list[C]
    damaged: list[str]
    num_bytes: int


class NameRecord(BaseModel, Generic[C]):
    """The content that a name points to, and the digest of the request that stored it."""

    card: C
    content: str
    """The content's name in the store."""
    request: str


@dataclass(frozen=True)
class StoreIndex(Generic[C]):
    """All records by name, None for a damaged one, and the sizes of all contents."""

    records: dict[str, NameRecord[C] | None]
    sizes: dict[str, int]

    def is_whole(self, record: NameRecord[C] | None) -> bool:
        """Return whether a record's content exists and has the size in its card."""
        return record is not None and self.sizes.get(record.content) == record.card.bytes

    def measure(self, without: str | None = None) -> int:
        """Return the bytes of all named contents, without those of one name."""
        named = {
            record.content
            for name, record in self.records.items()
            if record is not None and name != without
        }
        return sum(self.sizes.get(content, 0) for content in named)


def digest_request(kind: str, **parts: Any) -> str:
    """Return the digest of everything that determines the result of a storing request."""
    return new_sha256(json.dumps([kind, parts], sort_keys=True).encode()).hexdigest()


@dataclass
class Store(Generic[C]):
    """Contents of a kind below a prefix, at most `max_bytes`; threads may share it.

    Methods block: call them in a thread. Errors of all methods: APIError `unknown` of the kind,
    `internal` for damaged contents, and those of `Objects`.
    """

    kind: Kind[C]
    objects: Objects
    max_bytes: int
    prefix: str = ""
    """Prefix of its places: empty, or `keys/<key>/`."""
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        self._root = f"{self.prefix}{self.kind.plural}"
        self._parsed: dict[ObjectEntry, NameRecord[C] | None] = {}

    def _locate(self, name: str) -> str:
        return f"{self._root}/names/{name}.json"

    def _locate_content(self, content: str) -> str:
        return f"{self._root}/contents/{content}"

    def receive(self, name: str, announced: int = 0) -> Upload:
        """Open a file for the upload of a name of at least `announced` bytes.

        Errors: APIError `payload_too_large` and `overloaded` without room.
        """
        index = self._read_index()
        self._check_count(index.records, name)
        stored = index.measure(without=name)

        def check(size: int) -> None:
            if stored + size > self.max_bytes:
                raise refuse_size(self.kind.noun, stored + size, self.max_bytes)

        check(announced)
        if sum(index.sizes.values()) + announced > SLACK * self.max_bytes:
            detail = (
                f"The {self.kind.noun} store still holds contents that were replaced or deleted "
                f"within the last {3 * self.grace_s:g} s: try again when they are swept."
            )
            raise api_error("overloaded", detail, retry_after=RETRY_AFTER_S)
        return self.objects.open_upload(check)

    def find_repeat(self, name: str, request: str, *, overwrite: bool = False) -> C | None:
        """Return the name's card if an equal request stored it.

        None if the name is free or damaged, or is to be overwritten. Errors: APIError `exists` if
        a different request stored it.
        """
        try:
            record = None if overwrite else self._read_record(name)
            if record is None:
                return None
            size = self.objects.measure(self._locate_content(record.content))
        except FileNotFoundError:
            return None
        return self._repeat(record, request) if size == record.card.bytes else None

    def _repeat(self, record: NameRecord[C], request: str) -> C:
        card = record.card
        if record.request == request:
            return card
        noun = self.kind.noun
        detail = (
            f"The {noun} {card.name!r} exists, of another request: it was stored at {card.created} "
            f"with the SHA-256 {card.sha256}. Send overwrite=true to replace it, DELETE it, or "
            "choose another name."
        )
        raise api_error("exists", detail, param="name")

    def put(self, upload: Upload, card: C, request: str = "", *, overwrite: bool = True) -> C:
        """Point the card's name to a finished upload; return the name's card.

        Without `overwrite` it may be the card of an equal request that was faster. Errors: APIError
        `payload_too_large` if the store is full; as `find_repeat`.
        """
        index = self._read_index()
        self._check_count(index.records, card.name)
        total = index.measure(without=card.name) + card.bytes
        if total > self.max_bytes:
            raise refuse_size(self.kind.noun, total, self.max_bytes)
        if (there := self.find_repeat(card.name, request, overwrite=overwrite)) is not None:
            return there
        is_known = card.name in index.records
        begin = int(time.time() // self.grace_s * self.grace_s)
        content = f"{card.sha256}-{begin}.safetensors"
        # A content of the right size is not written again, unless it may be damaged.
        create = not overwrite and not is_known
        keep = create and index.sizes.get(content) in (None, card.bytes)
        self.objects.write_file(upload, self._locate_content(content), create=keep)
        record = NameRecord[C](card=card, content=content, request=request)
        data = record.model_dump_json().encode()
        if not self.objects.write(data, self._locate(card.name), create=create):
            return self._repeat(self._find_record(card.name), request)  # another server's
        return card

    def _check_count(self, names: Mapping[str, object], name: str) -> None:
        if name not in names and len(names) >= MAX_NAMES:
            detail = f"There are {len(names)} {self.kind.plural}, which is the limit: delete some."
            raise api_error("payload_too_large", detail)

    def look_up(self, name: str) -> tuple[C, StoredContent]:
        """Return the card of a name, and its content."""
        record = self._find_record(name)
        return record.card, self._show(name, record)

    def find_content(self, sha256: str) -> tuple[C, StoredContent]:
        """Return the named content with a SHA-256, and its name's card."""
        for record in self._read_records().values():
            if record is not None and record.card.sha256 == sha256:
                return record.card, self._show(None, record)
        detail = f"No {self.kind.noun} has the content {sha256}; GET /{self.kind.plural} lists "
        raise api_error(self.kind.unknown, detail + "what there is.")

    def _show(self, name: str | None, record: NameRecord[C]) -> StoredContent:
        source = self.objects.locate(self._locate_content(record.content))
        return StoredContent(name, record.card.sha256, source)

    def read(self, found: StoredContent) -> bytes:
        """Return a content's bytes. Errors: APIError `internal` if they are damaged."""
        place = found.source
        if self.objects.is_local:
            place = str(Path(place).relative_to(self.objects.root))
        try:
            content = self.objects.read(place)
        except FileNotFoundError as error:
            raise self.report_damage(found) from error
        if new_sha256(content).hexdigest() != found.sha256:
            raise self.report_damage(found)
        return content

    def list_all(self) -> StoreListing[C]:
        """Return all cards, and the damaged names."""
        index = self._read_index()
        cards = [
            record.card for record in index.records.values() if record and index.is_whole(record)
        ]
        damaged = [name for name, record in index.records.items() if not index.is_whole(record)]
        return StoreListing(cards, damaged, index.measure())

    def delete(self, name: str) -> str | None:
        """Remove a name; return its SHA-256, or None if it was damaged.

        Its content is removed at once if it is old and has no other name, otherwise by a later
        sweep. Works on a full disk.
        """
        try:
            record = self._read_record(name)
            self.objects.remove(self._locate(name))
        except FileNotFoundError as error:
            raise self._refuse_name(name) from error
        with suppress(APIError):  # the name is removed, even if the sweep fails
            self.sweep()
        return record.card.sha256 if record else None

    def sweep(self) -> list[str]:
        """Remove the old contents without a name; return their places.

        Remove nothing while a record is damaged: any content may be the record's.
        """
        oldest = time.time() // self.grace_s * self.grace_s - self.grace_s
        # List contents before names: see the module's docstring.
        old = [entry for entry in self._list_contents() if _read_time(entry) < int(oldest)]
        if not old:
            return []
        records = list(self._read_records().values())
        if None in records:
            log.warning("%s: nothing is swept while a name is damaged", self._root)
            return []
        named = {record.content for record in records if record is not None}
        unnamed = [entry for entry in old if entry.name not in named]
        for entry in unnamed:
            try:
                self.objects.remove(entry.place)
            except FileNotFoundError:
                continue  # another server sweeps, too
        return [entry.place for entry in unnamed]

    def report_damage(self, found: StoredContent) -> APIError:
        """Return the error for a damaged content."""
        what = f"{self.kind.noun} {found.name!r}" if found.name else found.sha256
        return self._report(f"content of {what}", found.source)

    def _report(self, what: str, place: str) -> APIError:
        log.error("%s is damaged: PUT or DELETE the %s", place, self.kind.noun)
        return refuse_damage(what, self.kind.noun)

    def _find_record(self, name: str) -> NameRecord[C]:
        """Return the current record of a name."""
        try:
            record = self._read_record(name)
        except FileNotFoundError as error:
            raise self._refuse_name(name) from error
        if record is None:
            raise self._report(f"card of {self.kind.noun} {name!r}", self._locate(name))
        return record

    def _refuse_name(self, name: str) -> APIError:
        shown = sorted(entry.name.removesuffix(".json") for entry in self._list_names())
        known = ", ".join(shown[:SHOWN_NAMES]) + (", and more" if shown[SHOWN_NAMES:] else "")
        there = f"these are there: {known}." if shown else f"none is there yet; {self.kind.how}."
        detail = f"No {self.kind.noun} is named {name!r}; {there}"
        return api_error(self.kind.unknown, detail)

    def _read_record(self, name: str) -> NameRecord[C] | None:
        """Return the record of a name; None for a damaged one. Errors: FileNotFoundError."""
        place = self._locate(name)
        data = self.objects.read(place)
        try:
            record = NameRecord[self.kind.card].model_validate_json(data)  # type: ignore[name-defined]
        except ValidationError:
            log.warning("the name %s cannot be read", place)
            return None
        content, card = _CONTENT.fullmatch(record.content), record.card
        if card.name != name or content is None or content["sha256"] != card.sha256:
            log.warning("the name %s has a record that was not written for it", place)
            return None
        return record

    def _read_index(self) -> StoreIndex[C]:
        records = self._read_records()
        return StoreIndex(records, {entry.name: entry.size for entry in self._list_contents()})

    def _read_records(self) -> dict[str, NameRecord[C] | None]:
        """Return all records by name; read only records that changed since the last call."""
        known = self._parsed
        entries = {entry.name.removesuffix(".json"): entry for entry in self._list_names()}
        new = {name: entry for name, entry in entries.items() if entry not in known}
        found = {name: known[entry] for name, entry in entries.items() if entry in known}

        def read(name: str) -> None:
            with suppress(FileNotFoundError):  # deleted just now
                found[name] = self._read_record(name)

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, new))
        self._parsed = {entry: found[name] for name, entry in entries.items() if name in found}
        return {name: found[name] for name in sorted(found)}

    def _list_names(self) -> list[ObjectEntry]:
        entries = self.objects.list(f"{self._root}/names")
        return [entry for entry in entries if entry.name.endswith(".json")]

    def _list_contents(self) -> list[ObjectEntry]:
        entries = self.objects.list(f"{self._root}/contents")
        return [entry for entry in entries if _CONTENT.fullmatch(entry.name)]


def open_all(
    objects: Objects, max_bytes: int, prefix: str, grace_s: float
) -> tuple[
    Store[VectorCard],
    Store[OverrideCard],
    Store[AdapterCard],
    Store[SaeCard],
    Store[VariantCard],
]:
    """Return the stores of all kinds below a prefix, each of at most `max_bytes`."""
    return (
        Store(VECTORS, objects, max_bytes, prefix, grace_s),
        Store(OVERRIDES, objects, max_bytes, prefix, grace_s),
        Store(ADAPTERS, objects, max_bytes, prefix, grace_s),
        Store(SAES, objects, max_bytes, prefix, grace_s),
        Store(VARIANTS, objects, max_bytes, prefix, grace_s),
    )


def _read_time(entry: ObjectEntry) -> int:
    """Return the start of the period in which a content was written."""
    found = _CONTENT.fullmatch(entry.name)
    assert found is not None, "only contents are asked for"
    return int(found["time"])


def stamp() -> str:
    """Return the current time in the format of cards: RFC 3339, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
