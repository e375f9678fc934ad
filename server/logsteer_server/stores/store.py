"""Stores of uploaded contents: a name points to a content, whose address is its SHA-256.

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
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, ValidationError

from logsteer.errors import APIError, api_error
from logsteer.schemas import AdapterCard, OverrideCard, SaeCard, VariantCard, VectorCard
from logsteer.schemas.common import ProblemCode
from logsteer_server.stores.objects import ObjectEntry, Objects, Upload

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

SHARED = "shared"
PREFIX = f"{SHARED}/"
"""What the shared names of a caller with a namespace of its own begin with."""
KEYS_DIRECTORY = "keys"
"""First part of the places of all keys' stores."""

C = TypeVar("C", bound=VectorCard | OverrideCard | AdapterCard | SaeCard | VariantCard)


@dataclass(frozen=True, slots=True)
class Kind(Generic[C]):
    """A kind of content: its noun, the class of its cards, the error code of an unknown name."""

    noun: str
    card: type[C]
    unknown: ProblemCode

    @property
    def plural(self) -> str:
        """The noun for several: the kind's directory, path and key of the list."""
        return f"{self.noun}s"

    def report_damage(self, what: str, place: str) -> APIError:
        """Log that an object is damaged; return the error for it."""
        log.error("%s is damaged: PUT or DELETE the %s", place, self.noun)
        detail = (
            f"The {what} is damaged: PUT the {self.noun} again with overwrite=true, or DELETE it."
        )
        return api_error("internal", detail)


VECTORS = Kind("vector", VectorCard, "unknown_vector")
OVERRIDES = Kind("override", OverrideCard, "unknown_override")
ADAPTERS = Kind("adapter", AdapterCard, "unknown_adapter")
SAES = Kind("sae", SaeCard, "unknown_sae")
VARIANTS = Kind("variant", VariantCard, "unknown_model")
KINDS = (VECTORS, OVERRIDES, ADAPTERS, SAES, VARIANTS)


@dataclass(frozen=True, slots=True)
class StoredContent:
    """A content, and the name that it was looked up by; None for a lookup by SHA-256.

    `source`: its file's absolute path, or its place below `store_url`.
    """

    name: str | None
    sha256: str
    source: str

    def describe(self, kind: Kind[Any]) -> str:
        """Return what an error calls it."""
        return f"content of {kind.noun} {(self.name or self.sha256)!r}"


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


def measure(records: Mapping[str, NameRecord[C] | None], without: str | None = None) -> int:
    """Return the bytes of all contents of named records, without those of one name."""
    found = [one for name, one in records.items() if one is not None and name != without]
    return sum({one.content: one.card.bytes for one in found}.values())


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
    label: str = ""
    """Prefix of its names as callers see them: empty, or `shared/`."""

    def __post_init__(self) -> None:
        self._root = f"{self.prefix}{self.kind.plural}"
        self._parsed: dict[ObjectEntry, NameRecord[C] | None] = {}

    def _locate(self, name: str) -> str:
        return f"{self._root}/names/{name.removeprefix(PREFIX)}.json"

    def _label(self, card: C) -> C:
        """Return a card with the name that callers see."""
        name = self.label + card.name
        return cast(C, card.model_copy(update={"name": name})) if self.label else card

    def _locate_content(self, content: str) -> str:
        return f"{self._root}/contents/{content}"

    def receive(self, name: str, announced: int = 0) -> Upload:
        """Open a file for the upload of a name of at least `announced` bytes.

        Errors: APIError `payload_too_large` and `overloaded` without room.
        """
        records, name = self._read_records(), name.removeprefix(PREFIX)
        self._check_count(records, name)
        stored = measure(records, without=name)

        def check(size: int) -> None:
            if stored + size > self.max_bytes:
                raise refuse_size(self.kind.noun, stored + size, self.max_bytes)

        check(announced)
        held = sum(entry.size for entry in self._list_contents())
        if held + announced > SLACK * self.max_bytes:
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
        except FileNotFoundError:
            return None
        return None if record is None else self._repeat(record, request)

    def _repeat(self, record: NameRecord[C], request: str) -> C:
        card = self._label(record.card)
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
        records, name = self._read_records(), card.name.removeprefix(PREFIX)
        self._check_count(records, name)
        total = measure(records, without=name) + card.bytes
        if total > self.max_bytes:
            raise refuse_size(self.kind.noun, total, self.max_bytes)
        if (there := self.find_repeat(name, request, overwrite=overwrite)) is not None:
            return there
        begin = int(time.time() // self.grace_s * self.grace_s)
        content = f"{card.sha256}-{begin}.safetensors"
        self.objects.write_file(upload, self._locate_content(content), create=False)
        card = cast(C, card.model_copy(update={"name": name}))
        data = NameRecord[C](card=card, content=content, request=request).model_dump_json().encode()
        create = not overwrite and name not in records
        if not self.objects.write(data, self._locate(name), create=create):
            return self._repeat(self._find_record(name), request)  # another server's
        return self._label(card)

    def _check_count(self, names: Mapping[str, object], name: str) -> None:
        if name not in names and len(names) >= MAX_NAMES:
            detail = f"There are {len(names)} {self.kind.plural}, which is the limit: delete some."
            raise api_error("payload_too_large", detail)

    def look_up(self, name: str) -> tuple[C, StoredContent]:
        """Return the card of a name, and its content."""
        record = self._find_record(name)
        return self._label(record.card), self._show(name, record)

    def look_up_content(self, sha256: str) -> tuple[C, StoredContent]:
        """Return the named content with a SHA-256, and its name's card."""
        for record in self._read_records().values():
            if record is not None and record.card.sha256 == sha256:
                return self._label(record.card), self._show(None, record)
        detail = f"No {self.kind.noun} has the content {sha256}; GET /{self.kind.plural} lists "
        raise api_error(self.kind.unknown, detail + "what there is.")

    def _show(self, name: str | None, record: NameRecord[C]) -> StoredContent:
        source = self.objects.locate(self._locate_content(record.content))
        return StoredContent(name, record.card.sha256, source)

    def list_all(self) -> StoreListing[C]:
        """Return all cards, and the damaged names."""
        records = self._read_records()
        sizes = {entry.name: entry.size for entry in self._list_contents()}
        cards: list[C] = []
        damaged: list[str] = []
        for name, record in records.items():
            if record is None or sizes.get(record.content) != record.card.bytes:
                damaged.append(self.label + name)
            else:
                cards.append(self._label(record.card))
        return StoreListing(cards, damaged, measure(records))

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

    def _find_record(self, name: str) -> NameRecord[C]:
        """Return the current record of a name."""
        try:
            record = self._read_record(name)
        except FileNotFoundError as error:
            raise self._refuse_name(name) from error
        if record is None:
            what = f"card of {self.kind.noun} {name!r}"
            raise self.kind.report_damage(what, self._locate(name))
        return record

    def _refuse_name(self, name: str) -> APIError:
        names = (entry.name.removesuffix(".json") for entry in self._list_names())
        shown = sorted(self.label + name for name in names)
        known = ", ".join(shown[:SHOWN_NAMES]) + (", and more" if shown[SHOWN_NAMES:] else "")
        there = f"these are there: {known}." if shown else "none is there yet; PUT one."
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
        if self._locate(card.name) != place or content is None or content["sha256"] != card.sha256:
            log.warning("the name %s has a record that was not written for it", place)
            return None
        return record

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


class Namespace(Generic[C]):
    """Resolve a caller's names: `happy` in its own store, `shared/happy` in the shared one.

    Without keys both are one store, and `shared/happy` is `happy`. Errors are those of `Store`.
    """

    def __init__(self, own: Store[C], shared: Store[C] | None = None, *, may_share: bool = True):
        self.own = own
        self.shared = own if shared is None else shared
        self._may_share = may_share

    def of(self, name: str) -> Store[C]:
        """Return the store of a name."""
        return self.shared if name.startswith(PREFIX) else self.own

    def of_writable(self, name: str) -> Store[C]:
        """Return the store of a name that this caller may write under. Errors: APIError."""
        if name.startswith(PREFIX) and not self._may_share:
            detail = (
                f"{name}: what is shared takes a key with the scope admin to write; store the "
                f"{self.own.kind.noun} under a name without {PREFIX}."
            )
            raise api_error("forbidden", detail)
        if name == SHARED and self.own is not self.shared:
            detail = f"{SHARED} is what shared names begin with; choose another name."
            raise api_error("invalid_request", detail, param="name")
        return self.of(name)

    def look_up(self, name: str) -> tuple[C, StoredContent]:
        """Return the card of a name, and its content."""
        return self.of(name).look_up(name)

    def look_up_content(self, sha256: str) -> tuple[C, StoredContent]:
        """Return the own or shared content with a SHA-256, and the card of a name that has it."""
        try:
            return self.own.look_up_content(sha256)
        except APIError as error:
            if error.code != self.own.kind.unknown or self.shared is self.own:
                raise
        return self.shared.look_up_content(sha256)

    def list_all(self) -> StoreListing[C]:
        """Return every card, own ones first; `num_bytes` counts own contents."""
        own = self.own.list_all()
        if self.shared is self.own:
            return own
        shared = self.shared.list_all()
        return StoreListing(own.cards + shared.cards, own.damaged + shared.damaged, own.num_bytes)


def open_all(
    objects: Objects, max_bytes: int, prefix: str, grace_s: float, label: str = ""
) -> list[Store[Any]]:
    """Return the stores of all kinds below a prefix, in the order of `KINDS`."""
    return [Store(kind, objects, max_bytes, prefix, grace_s, label) for kind in KINDS]


def name_prefix(key: str | None) -> str:
    """Return what the places of a key's namespace, or of everybody's, begin with."""
    return "" if key is None else f"{KEYS_DIRECTORY}/{key}/"


def list_keys(objects: Objects) -> list[str | None]:
    """Return the namespaces that may have contents: everybody's, and keys'."""
    parts = (entry.place.split("/") for entry in objects.list(KEYS_DIRECTORY))
    return [None, *sorted({own[1] for own in parts if len(own) > 2})]


def refuse_size(noun: str, total: int, max_bytes: int) -> APIError:
    """Return the error for contents that are more than a store may hold."""
    detail = (
        f"The {noun} store would hold {total} bytes, at most {max_bytes} are allowed: delete "
        f"{noun}s, or raise max_key_bytes or the key's stored_bytes."
    )
    return api_error("payload_too_large", detail)


def _read_time(entry: ObjectEntry) -> int:
    """Return the start of the period in which a content was written."""
    found = _CONTENT.fullmatch(entry.name)
    assert found is not None, "only contents are asked for"
    return int(found["time"])


def stamp() -> str:
    """Return the current time in the format of cards: RFC 3339, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
