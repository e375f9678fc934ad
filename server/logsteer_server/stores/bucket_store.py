"""A store behind a URL that the servers of several machines share.

The last of several uploads of a name wins, and wins whole: a content is behind the URL before one
write gives the name its pointer, and never changes. What a name means is asked of the URL whenever
it is used, unless settings allow that to be a little old; what a request was answered with is the
content whose SHA-256 its answer says. `bucket_index` says what lies where.

There is no lock among servers: each refuses what would be more than the store may hold, and several
of them that store at one moment may together pass that by what they store then.
"""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from logsteer.errors import APIError, api_error
from logsteer_server.settings import ConfigurationError, SharedStore
from logsteer_server.stores.bucket import Bucket
from logsteer_server.stores.bucket_index import BucketIndex, Pointer, is_too_late, name_content
from logsteer_server.stores.fetched import DamagedContentError, FetchedContents
from logsteer_server.stores.layout import OWNER_ONLY_DIRECTORY, C
from logsteer_server.stores.lookups import Lookups
from logsteer_server.stores.store import Kind, Store, StoredContent, StoreListing
from logsteer_server.stores.upload import Upload, UploadRoom, remove_left_overs, report_faults

log = logging.getLogger(__name__)

LEFT_OVER_S = 60.0
"""Age of an upload's file that nobody has locked, from which on it is removed."""


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """A bucket, what this machine has of it, and where uploads are written before they go there."""

    settings: SharedStore
    bucket: Bucket
    fetched: FetchedContents
    uploads: Path

    @classmethod
    def open(cls, store: SharedStore) -> "SharedFiles":
        """Return the files of a shared store. Errors: ConfigurationError."""
        bucket = Bucket(store)
        fetched = FetchedContents(bucket, store.path, store.cache_bytes)
        uploads = store.path.absolute() / "uploads"
        try:
            remove_left_overs(uploads, LEFT_OVER_S)
        except OSError as error:
            raise ConfigurationError(
                f"store_directory: {uploads} cannot be used ({error}); name another one"
            ) from error
        return cls(store, bucket, fetched, uploads)


class BucketUpload(Upload):
    """An upload to a bucket: a file of this machine, then a content that has no name yet.

    It is removed there with `discard`, where no pointer to it was written or tried.
    """

    def __init__(self, files: SharedFiles, place: str, room: UploadRoom) -> None:
        super().__init__(files.uploads, room)
        self._files = files
        self._place = place
        self._began = 0.0
        self.content: str | None = None
        self.is_pointed_to = False

    @property
    def is_too_late(self) -> bool:
        """Whether its content may be taken for waste by now."""
        return is_too_late(self._began, self._files.settings.grace_s)

    def publish(self) -> str:
        """Copy the finished file to the bucket, once; return its place below the URL."""
        if self.content is None:
            content = name_content(self.finish())
            self._began = time.monotonic()
            self._files.bucket.upload(self.path, f"{self._place}/{content}")
            self.content = content
        return f"{self._place}/{self.content}"

    def discard(self) -> None:
        """Close the file and remove it; remove what has no name from the bucket."""
        super().discard()
        if self.content is not None and not self.is_pointed_to:
            with suppress(APIError):  # upkeep removes it
                self._files.bucket.remove(f"{self._place}/{self.content}")
            self.content = None


class BucketStore(Store[C]):
    """Contents of a kind at a place of a bucket, such as `keys/alice/vectors`."""

    def __init__(self, kind: Kind[C], files: SharedFiles, place: str, max_bytes: int) -> None:
        super().__init__(kind, max_bytes)
        self._files = files
        self._index = BucketIndex(files.bucket, place, kind)
        ages = files.settings.fresh_s, files.settings.stale_s
        self._names: Lookups[Pointer[C]] = Lookups(*ages)
        self._contents: Lookups[str] = Lookups(*ages)

    @property
    def place(self) -> str:
        """Where the store is below the URL."""
        return self._index.place

    def receive(self, name: str | None = None, announced: int = 0) -> Upload:
        """Open a file for an upload of at least `announced` bytes, which reserves their room."""
        with report_faults(self._files.uploads):
            self._files.uploads.mkdir(OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
        pointers = self._read_all()
        current = pointers.get(name) if name is not None else None
        room = self.room.enter(current.card.bytes if current else 0)
        room.grow_to(announced)
        try:
            with report_faults(self._files.uploads):
                return BucketUpload(self._files, self.place, room)
        except BaseException:
            room.release()
            raise

    def _read_all(self) -> dict[str, Pointer[C] | None]:
        pointers = self._index.read_all()
        self.room.stored = sum(own.card.bytes for own in pointers.values() if own)
        return pointers

    def publish(self, upload: Upload) -> str:
        """Return where engines read a finished upload, which has no name yet."""
        assert isinstance(upload, BucketUpload)
        return upload.publish()

    def put(self, upload: Upload, card: C) -> None:
        """Point the card's name to a finished upload, whatever it pointed to before."""
        assert isinstance(upload, BucketUpload)
        upload.publish()
        assert upload.content is not None
        pointers = self._read_all()
        current = pointers.get(card.name)
        stored = sum(own.card.bytes for own in pointers.values() if own and own is not current)
        stored += card.bytes
        self.check_room(pointers, stored, card)
        if upload.is_too_late:
            detail = "The upload took longer than half of store_grace_s: try again, or raise it."
            raise api_error("overloaded", detail, retry_after=1.0)
        pointer = Pointer(card, upload.content)
        upload.is_pointed_to = True
        self._names.forget(card.name)
        self._index.write(pointer)
        self._names.note(card.name, pointer)
        self.room.stored = stored
        if current is not None:
            self._drop(current)
        if upload.room is not None:
            upload.room.release()

    def _drop(self, pointer: Pointer[C]) -> None:
        """Remove a content that has no name any more. What cannot be removed is left to upkeep."""
        self._contents.forget(pointer.card.sha256)
        try:
            self._files.bucket.remove(f"{self.place}/{pointer.content}")
        except APIError:
            log.warning("%s/%s has no name and is left to upkeep", self.place, pointer.content)

    def _find_pointer(self, name: str) -> Pointer[C]:
        return self._names.find(name, lambda: self._read_pointer(name))

    def _read_pointer(self, name: str) -> Pointer[C]:
        try:
            pointer = self._index.read(name)
        except FileNotFoundError as error:
            self._names.forget(name)
            raise self.refuse_name(name, self._index.list_names()) from error
        if pointer is None:
            raise self.report_card(name, self._index.locate(name))
        return pointer

    def describe(self, name: str) -> C:
        """Return the card of a name."""
        return self._find_pointer(name).card

    def find(self, name: str) -> StoredContent:
        """Return the content of a name."""
        pointer = self._find_pointer(name)
        return StoredContent(name, pointer.card.sha256, f"{self.place}/{pointer.content}")

    def find_content(self, sha256: str) -> StoredContent:
        """Return the content with a SHA-256."""

        def ask() -> str:
            if places := self._index.find_contents(sha256):
                return places[0]
            raise self.refuse_content(sha256)

        return StoredContent(None, sha256, self._contents.find(sha256, ask))

    def read(self, found: StoredContent) -> bytes:
        """Return a content's bytes. Errors: FileNotFoundError where it is gone by now."""
        try:
            with self._files.fetched.open(found.sha256, found.source) as path:
                return path.read_bytes()
        except DamagedContentError as error:
            raise self.report_damage(found) from error
        except FileNotFoundError:
            if found.name is None:
                self._contents.forget(found.sha256)
                raise
            self._names.forget(found.name)
            if self.find(found.name).source == found.source:
                raise self.report_damage(found) from None
            raise

    def list_all(self) -> StoreListing[C]:
        """Return every name's card, and which names are damaged."""
        pointers, sizes = self._read_all(), self._index.measure_contents()
        listing: StoreListing[C] = StoreListing([], [], self.room.stored)
        for name, pointer in pointers.items():
            if pointer is not None and self._is_whole(pointer, sizes.get(pointer.content)):
                listing.cards.append(pointer.card)
            else:
                listing.damaged.append(name)
        return listing

    def _is_whole(self, pointer: Pointer[C], size: int | None) -> bool:
        if size is None:  # a listing may be late
            with suppress(FileNotFoundError):
                size = self._files.bucket.measure(f"{self.place}/{pointer.content}")
        return size == pointer.card.bytes

    def delete(self, name: str) -> str | None:
        """Remove a name and its content. Return its SHA-256, None where the card was damaged."""
        try:
            pointer = self._index.read(name)
        except FileNotFoundError as error:
            raise self.refuse_name(name, self._index.list_names()) from error
        self._index.remove(name)
        self._names.forget(name)
        if pointer is None:
            return None
        self._drop(pointer)
        return pointer.card.sha256
