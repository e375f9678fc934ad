"""A store in a directory of this machine, or of a volume that several machines mount.

Content and card are on the disk before one rename gives the name its new card, so that a server
killed at any moment leaves each name with its old content or its new one. A content that was left
without a name is removed when a store next reads the directory. Threads and server processes may
share a directory; `layout` says what lies where.

A damaged card or content concerns its own name alone, which can be given another content or
deleted. While a card is damaged, a content without a name may be its own: it is kept, and counts
for nothing.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from logsteer.errors import APIError
from logsteer_server.settings import ConfigurationError, Settings
from logsteer_server.stores.bucket import open_file_system
from logsteer_server.stores.layout import C, StoreDirectory, StoreIndex
from logsteer_server.stores.store import KINDS, Kind, Store, StoredContent, StoreListing
from logsteer_server.stores.upload import Upload, report_faults, sync_directory

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 5.0


class DirectoryStore(Store[C]):
    """Contents of a kind in a directory of their own below `root`, of at most `max_bytes`.

    The directory is made when the first content comes. Changes get `overloaded` where another
    process holds the lock for longer than `lock_timeout_s`. Errors here: ConfigurationError where
    the directory cannot be used.
    """

    def __init__(
        self, kind: Kind[C], root: Path, max_bytes: int, lock_timeout_s: float = LOCK_TIMEOUT_S
    ) -> None:
        super().__init__(kind, max_bytes)
        self.files = StoreDirectory(root / kind.plural, kind.card, lock_timeout_s)
        self.directory = self.files.path
        self._index: StoreIndex | None = None
        self._mark = 0
        if self.directory.exists():
            try:
                self.files.make()
                with self.files.exclude() as lock:
                    self.files.remove_left_overs()
                    self._read_index(lock)
            except OSError as error:
                raise ConfigurationError(
                    f"store_directory: {self.directory} cannot be used ({error}); name another one"
                ) from error
            except APIError as error:
                raise ConfigurationError(
                    f"store_directory: {self.directory}: {error.detail}"
                ) from error

    def _read_index(self, lock: int) -> StoreIndex:
        """Return what the directory holds, read anew where another process has changed it."""
        mark = self.files.read_mark(lock)
        if self._index is None or mark != self._mark:
            index = self.files.read()
            self._index, self._mark = index, mark
            if index.damaged:
                unclaimed = len(index.unclaimed)
                if unclaimed:
                    text = "%s: %d contents without a name are kept while the cards of %s are lost"
                    log.warning(text, self.directory, unclaimed, ", ".join(index.damaged[:5]))
            else:
                for sha256 in index.unclaimed:
                    self._drop(index, sha256)
        self.room.stored = self._index.num_bytes
        return self._index

    @contextmanager
    def _change(self, lock: int) -> Iterator[None]:
        """Have other servers read the directory anew, and this one too where the change fails."""
        index, self._index = self._index, None
        self._mark = self.files.change_mark(lock)  # before the change: it may be cut short
        yield
        self._index = index

    def _drop(self, index: StoreIndex, sha256: str) -> None:
        """Remove a content. One that cannot be removed is left to `gc`, and said."""
        path = self.files.locate(sha256)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108
        except OSError as error:
            log.error("%s has no name and cannot be removed: %s", path, error)
            return
        index.sizes.pop(sha256, None)

    def receive(self, name: str | None = None, announced: int = 0) -> Upload:
        """Open a file for an upload of at least `announced` bytes, which reserves their room.

        `name` is what it is for, whose content it may take the place of. Errors: APIError
        `payload_too_large` and `overloaded` where there is no room.
        """
        with report_faults(self.directory):
            self.files.make()
            with self.files.exclude() as lock:
                index = self._read_index(lock)
                freed = index.frees(name) if name is not None else None
                room = self.room.enter(index.sizes.get(freed, 0) if freed else 0)
                room.grow_to(announced)
                try:
                    return Upload(self.files.uploads, room)
                except BaseException:
                    room.release()
                    raise

    def put(self, upload: Upload, card: C) -> None:
        """Point the card's name to a finished upload, whatever it pointed to before.

        Errors: APIError `payload_too_large` where the store is full.
        """
        with report_faults(self.directory), self.files.exclude() as lock:
            index = self._read_index(lock)
            self._check_room(index, card)
            draft = Upload(self.files.uploads)
            try:
                draft.write(card.model_dump_json().encode())
                draft.finish()
                freed = index.frees(card.name)
                with self._change(lock):
                    os.replace(upload.path, self.files.locate(card.sha256))  # noqa: PTH105
                    sync_directory(self.files.contents)
                    os.replace(draft.path, self.files.locate_card(card.name))  # noqa: PTH105
                    sync_directory(self.files.names)
                    index.names[card.name] = card.sha256
                    index.sizes[card.sha256] = card.bytes
                    self._clean_up(index, freed if freed != card.sha256 else None)
            finally:
                draft.discard()
            if upload.room is not None:
                upload.room.release()

    def _clean_up(self, index: StoreIndex, freed: str | None) -> None:
        """Remove the content that a change has left without a name, and count what is left."""
        gone = set() if freed is None else {freed}
        for sha256 in gone if index.damaged else gone | index.unclaimed:
            self._drop(index, sha256)
        self.room.stored = index.num_bytes

    def _check_room(self, index: StoreIndex, card: C) -> None:
        """Refuse a card with which the store would hold more than it may."""
        after = StoreIndex(
            index.names | {card.name: card.sha256}, index.sizes | {card.sha256: card.bytes}
        )
        self.check_room(index.names, after.num_bytes, card)

    def publish(self, upload: Upload) -> str:
        """Return where engines read a finished upload, which has no name yet."""
        return str(upload.path)

    def describe(self, name: str) -> C:
        """Return the card of a name."""
        with report_faults(self.directory):
            try:
                card = self.files.read_card(name)
            except FileNotFoundError as error:
                raise self._refuse_name(name) from error
        if card is None:
            raise self.report_card(name, str(self.files.locate_card(name)))
        return card

    def find(self, name: str) -> StoredContent:
        """Return the content of a name."""
        card = self.describe(name)
        while not self.is_whole(card):
            missing, card = card, self.describe(name)
            if card.sha256 == missing.sha256:  # it was not just given another content
                raise self.report_damage(self._locate(name, card.sha256))
        return self._locate(name, card.sha256)

    def _locate(self, name: str | None, sha256: str) -> StoredContent:
        return StoredContent(name, sha256, str(self.files.locate(sha256)))

    def is_whole(self, card: C) -> bool:
        """Return whether a card's content is there, and of the size that the card says."""
        try:
            return self.files.locate(card.sha256).stat().st_size == card.bytes
        except OSError:
            return False

    def find_content(self, sha256: str) -> StoredContent:
        """Return the content with a SHA-256."""
        if not self.files.locate(sha256).exists():
            raise self.refuse_content(sha256)
        return self._locate(None, sha256)

    def read(self, found: StoredContent) -> bytes:
        """Return a content's bytes. Errors: FileNotFoundError where it is gone by now."""
        try:
            return found.path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            with report_faults(found.path):
                raise error

    def _refuse_name(self, name: str) -> APIError:
        return self.refuse_name(name, [path.stem for path in self.files.names.glob("*.json")])

    def list_all(self) -> StoreListing[C]:
        """Return every name's card, and which names are damaged."""
        listing: StoreListing[C] = StoreListing([], [], 0)
        if not self.directory.exists():
            return listing
        with report_faults(self.directory):
            with self.files.exclude() as lock:
                index = self._read_index(lock)
                names, sizes, num_bytes = sorted(index.names), dict(index.sizes), index.num_bytes
            for name in names:
                with suppress(FileNotFoundError):  # deleted since
                    card = self.files.read_card(name)
                    if card is not None and (
                        sizes.get(card.sha256) == card.bytes or self.is_whole(card)
                    ):
                        listing.cards.append(card)
                    else:
                        listing.damaged.append(name)
        return StoreListing(listing.cards, listing.damaged, num_bytes)

    def delete(self, name: str) -> str | None:
        """Remove a name, and its content where it had no other name.

        Return its SHA-256, None where the card was damaged. No room on the disk is needed.
        """
        card = self.files.locate_card(name)
        if not card.exists():  # where nothing was ever stored, there is no lock to hold
            raise self._refuse_name(name)
        with report_faults(self.directory), self.files.exclude() as lock:
            index = self._read_index(lock)
            freed = index.frees(name)
            try:
                found = self.files.read_card(name)
                with self._change(lock):
                    os.unlink(card)  # noqa: PTH108
                    sync_directory(self.files.names)
                    index.names.pop(name, None)
                    self._clean_up(index, freed)
            except FileNotFoundError as error:
                raise self._refuse_name(name) from error
        return found.sha256 if found else None


def check_store_directory(settings: Settings) -> None:
    """Make sure that the stores can be used, without making them. Errors: ConfigurationError."""
    shared = settings.shared_store
    if shared is not None:
        open_file_system(shared)
    # What a URL gives is kept in the directory, too.
    for kind in (kind.plural for kind in KINDS) if shared is None else ("fetched", "uploads"):
        directory = settings.store_path / kind
        there = next(path for path in (directory, *directory.parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.R_OK | os.W_OK | os.X_OK)):
            raise ConfigurationError(
                f"store_directory: {there} is not a directory that can be written to; name another"
            )
