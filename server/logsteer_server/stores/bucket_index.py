"""What lies behind a shared store's URL, and what its names point to.

    vectors/names/<name>/<revision><random>.json          a pointer: a card, its content's place
    vectors/names/<name>/<revision><random>.gone          empty: the name was deleted
    vectors/contents/<sha256>/<time><random>.safetensors  a content, as one upload has written it
    keys/<key>/vectors/…                                  the same of a key's namespace

A name means what the last of its files says, by revision: the time of the write in milliseconds, or
one more than the last revision that the writer has seen, where that is more. So a write that was
given up, and arrives after a later one, changes nothing:

    server a writes revision 600, gets no answer and gives up       names/happy/
    server b writes revision 630                                    names/happy/630….json
    what a has written arrives                                      names/happy/600….json 630….json

Clocks of servers may differ by less than the time after which a write is given up. Files that are
not the last are removed by whoever writes the next one, and by upkeep; a `.gone` that is the last
when it is older than any write that may be on its way.

A content lies at a place that no other upload has, and is there before the pointer to it is
written. So nobody can remove, as waste, what another one is about to point to: what is old and has
no pointer never gets one.
"""

import json
import logging
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, cast

from pydantic import ValidationError

from logsteer.errors import APIError, api_error
from logsteer_server.stores.bucket import Bucket, BucketEntry
from logsteer_server.stores.layout import C
from logsteer_server.stores.local_files import stamp_ms
from logsteer_server.stores.namespace import KEYS_DIRECTORY
from logsteer_server.stores.store import KINDS, Kind

log = logging.getLogger(__name__)

RANDOM_BYTES = 8
_CONTENT = re.compile(
    r"contents/(?P<sha256>[0-9a-f]{64})/(?P<ms>[0-9a-f]{12})[0-9a-f]{16}\.safetensors"
)
_VERSION = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,127})/(?P<own>(?P<revision>[0-9a-f]{12})[0-9a-f]{16}"
    r"\.(?P<what>json|gone))"
)
READS = 4
"""Times that a name is looked at whose version is replaced while it is read."""
_DRAFT = re.compile(r"(?:.*/)?\.[^/]*\.(?P<ms>[0-9a-f]+)\.part")
_STORE = re.compile(
    rf"(?P<store>(?:{KEYS_DIRECTORY}/[^/]+/)?(?P<plural>{'|'.join(k.plural for k in KINDS)}))/"
    r"(?P<rest>.+)"
)
PLURALS: dict[str, Kind[Any]] = {kind.plural: kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Pointer(Generic[C]):
    """What a name points to: a card, and the place of its content below the store."""

    card: C
    content: str

    def write(self) -> bytes:
        """Return the file of the pointer."""
        document = {"content": self.content, "card": self.card.model_dump(mode="json")}
        return json.dumps(document).encode()


def name_content(sha256: str) -> str:
    """Return a place below a store for a content, which no other upload has."""
    return f"contents/{sha256}/{stamp_ms():012x}{secrets.token_hex(RANDOM_BYTES)}.safetensors"


@dataclass(frozen=True, slots=True, order=True)
class NameVersion:
    """What was written of a name, by the file it is in; the last in order is what the name means.

    `stamp` differs when the file does.
    """

    file: str
    stamp: str

    @property
    def revision(self) -> int:
        """Milliseconds since 1970, or more."""
        return int(self.file[:12], 16)

    @property
    def is_gone(self) -> bool:
        """Whether it says that the name was deleted."""
        return self.file.endswith(".gone")


class BucketIndex(Generic[C]):
    """The names of one store at a place of a bucket; pointers that did not change are kept.

    Errors of all methods: those of `Bucket`.
    """

    def __init__(self, bucket: Bucket, place: str, kind: Kind[C]) -> None:
        self._bucket = bucket
        self.place = place
        self._kind = kind
        self._read: dict[str, tuple[NameVersion, Pointer[C] | None]] = {}

    def locate(self, name: str) -> str:
        """Return where a name's versions lie below the URL."""
        return f"{self.place}/names/{name}"

    def _locate(self, name: str, version: NameVersion) -> str:
        return f"{self.locate(name)}/{version.file}"

    def list_versions(self) -> dict[str, list[NameVersion]]:
        """Return what was written of each name and not removed, the last one last."""
        return self._sort("", self._bucket.list_files(f"{self.place}/names"))

    def _list_own(self, name: str) -> list[NameVersion]:
        """Return what was written of a name, the last one last."""
        found = self._sort(f"{name}/", self._bucket.list_files(self.locate(name)))
        return found.get(name, [])

    def _sort(self, start: str, files: dict[str, BucketEntry]) -> dict[str, list[NameVersion]]:
        versions: dict[str, list[NameVersion]] = {}
        for file, entry in files.items():
            if match := _VERSION.fullmatch(start + file):
                version = NameVersion(match["own"], entry.version)
                versions.setdefault(match["name"], []).append(version)
        return {name: sorted(own) for name, own in versions.items()}

    def list_names(self) -> list[str]:
        """Return the names that mean something."""
        return [name for name, own in self.list_versions().items() if not own[-1].is_gone]

    def read(self, name: str) -> Pointer[C] | None:
        """Return a name's pointer, None for a damaged one.

        Errors: FileNotFoundError, too; APIError `overloaded` where it is replaced again and again.
        """
        for _ in range(READS):
            versions = self._list_own(name)
            if not versions or versions[-1].is_gone:
                self._read.pop(name, None)
                raise FileNotFoundError(self.locate(name))
            last = versions[-1]
            known = self._read.get(name)
            if known is not None and known[0] == last:
                return known[1]
            with suppress(FileNotFoundError):  # replaced just now
                pointer = self._parse(name, self._bucket.read(self._locate(name, last)))
                self._read[name] = last, pointer
                return pointer
        detail = f"{name!r} is being replaced again and again: try again."
        raise api_error("overloaded", detail, retry_after=1.0)

    def read_all(self) -> dict[str, Pointer[C] | None]:
        """Return every name's pointer, None for a damaged one."""
        last = {name: own[-1] for name, own in self.list_versions().items() if not own[-1].is_gone}
        kept = self._read
        known = {n: kept[n] for n, own in last.items() if n in kept and kept[n][0] == own}
        missing = last.keys() - known.keys()
        places = {self._locate(name, last[name]): name for name in missing}
        for place, data in self._bucket.read_many(list(places)).items():
            name = places[place]
            known[name] = last[name], self._parse(name, data)
        for name in missing - known.keys():  # replaced just now
            with suppress(FileNotFoundError):
                known[name] = last[name], self.read(name)
        self._read = known
        return {name: known[name][1] for name in sorted(known)}

    def write(self, pointer: Pointer[C]) -> None:
        """Have the name of a pointer's card mean this."""
        self._add(pointer.card.name, "json", pointer.write())

    def remove(self, name: str) -> None:
        """Have a name mean nothing."""
        self._add(name, "gone", b"")

    def _add(self, name: str, what: str, data: bytes) -> None:
        """Write the next version of a name, and remove those before it."""
        before = self._list_own(name)
        revision = max([stamp_ms(), *(own.revision + 1 for own in before[-1:])])
        file = f"{revision:012x}{secrets.token_hex(RANDOM_BYTES)}.{what}"
        self._bucket.write(f"{self.locate(name)}/{file}", data)
        with suppress(APIError):  # upkeep removes them
            for version in before:
                self._bucket.remove(self._locate(name, version))

    def remove_old(self, oldest_kept_ms: float, *, damaged: bool = False) -> list[str]:
        """Remove versions that are not the last, and what says of names that they were deleted.

        The latter where that was before a time. With `damaged` names go whose pointers were read
        and are damaged. Return what was removed.
        """
        removed = []
        for name, versions in self.list_versions().items():
            last = versions[-1]
            goes = last.is_gone and last.revision < oldest_kept_ms
            goes |= damaged and self._read.get(name) == (last, None)
            # The last one goes last: without it, one before it would be what the name means.
            for version in versions if goes else versions[:-1]:
                self._bucket.remove(self._locate(name, version))
                removed.append(self._locate(name, version))
        return removed

    def _parse(self, name: str, data: bytes) -> Pointer[C] | None:
        try:
            document = json.loads(data)
            card = cast(C, self._kind.card.model_validate(document["card"]))
            content = str(document["content"])
        except (ValueError, ValidationError, KeyError, TypeError) as error:
            log.warning("%s cannot be read: %s", self.locate(name), type(error).__name__)
            return None
        found = _CONTENT.fullmatch(content)
        if card.name != name or found is None or found["sha256"] != card.sha256:
            log.warning("%s is not one that was written for this name", self.locate(name))
            return None
        return Pointer(card, content)

    def find_contents(self, sha256: str) -> list[str]:
        """Return where below the URL a content lies, each upload's, the latest first."""
        place = f"{self.place}/contents/{sha256}"
        found = [
            f"{place}/{file}"
            for file in self._bucket.list_files(place)
            if _CONTENT.fullmatch(f"contents/{sha256}/{file}")
        ]
        return sorted(found, reverse=True)

    def measure_contents(self) -> dict[str, int]:
        """Return the size of each content by its place below the store."""
        found = self._bucket.list_files(f"{self.place}/contents")
        sizes = {f"contents/{file}": entry.size for file, entry in found.items()}
        return {file: size for file, size in sizes.items() if _CONTENT.fullmatch(file)}


def find_indexes(bucket: Bucket) -> dict[str, BucketIndex[Any]]:
    """Return every store below the URL, by its place there."""
    found = (_STORE.fullmatch(file) for file in bucket.list_files())
    places = {match["store"]: PLURALS[match["plural"]] for match in found if match}
    return {place: BucketIndex(bucket, place, places[place]) for place in sorted(places)}


def count_bucket(bucket: Bucket) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of everybody's contents by kind, and of those of keys."""
    own, keys = dict.fromkeys(PLURALS, 0), dict.fromkeys(PLURALS, 0)
    for file, entry in bucket.list_files().items():
        found = _STORE.fullmatch(file)
        if found and _CONTENT.fullmatch(found["rest"]):
            counted = own if found["store"] == found["plural"] else keys
            counted[found["plural"]] += entry.size
    return own, keys


def collect_bucket(bucket: Bucket, grace_s: float, *, damaged: bool = False) -> list[str]:
    """Remove what names meant before; and, older than `grace_s`, contents without a name,
    half-written files, and what says that names were deleted.

    Any number of servers may do so at once, beside uploads. While a pointer is damaged, a content
    without a name may be its own: both stay, unless `damaged` says that they go. Returns a line
    for each. Errors: those of `Bucket`.
    """
    lines = []
    oldest_kept = stamp_ms() - grace_s * 1000
    candidates: dict[str, list[str]] = {}
    stores = {}
    for file in bucket.list_files():
        found = _STORE.fullmatch(file)
        if draft := _DRAFT.fullmatch(file):
            if int(draft["ms"], 16) < oldest_kept:
                bucket.remove(file)
                lines.append(f"removed {file}: it was left half-written")
        elif found:
            stores[found["store"]] = PLURALS[found["plural"]]
            content = _CONTENT.fullmatch(found["rest"])
            if content and int(content["ms"], 16) < oldest_kept:
                candidates.setdefault(found["store"], []).append(found["rest"])
    for place, kind in sorted(stores.items()):
        index = BucketIndex(bucket, place, kind)
        lines += _collect_store(bucket, index, candidates.get(place, []), oldest_kept, damaged)
    return lines


def _collect_store(
    bucket: Bucket, index: BucketIndex[Any], old: list[str], oldest_kept: float, damaged: bool
) -> list[str]:
    # Read behind the listing of contents: an old one that has a name had it by then.
    pointers = index.read_all() if old or damaged else {}
    lost = [name for name, pointer in pointers.items() if pointer is None]
    used = {pointer.content for pointer in pointers.values() if pointer is not None}
    unclaimed = sorted(set(old) - used)
    removed = index.remove_old(oldest_kept, damaged=damaged)
    lines = [f"removed {own}: its name does not mean it" for own in removed]
    if lost and not damaged:
        return lines + [
            f"kept {index.place}/{own}: it may be that of a damaged card" for own in unclaimed
        ]
    for content in unclaimed:
        bucket.remove(f"{index.place}/{content}")
        lines.append(f"removed {index.place}/{content}: no name points to it")
    return lines


def is_too_late(began: float, grace_s: float) -> bool:
    """Return whether a content that was written since then may be removed before it has a name."""
    return time.monotonic() - began > grace_s / 2
