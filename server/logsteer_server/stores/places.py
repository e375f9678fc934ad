"""All stores below a directory or behind a URL, as commands look after them."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from logsteer_server.settings import SharedStore
from logsteer_server.stores.backup import BackupError, add_file, add_store
from logsteer_server.stores.bucket_index import (
    PLURALS,
    BucketIndex,
    Pointer,
    collect_bucket,
    find_indexes,
)
from logsteer_server.stores.bucket_store import BucketStore, SharedFiles
from logsteer_server.stores.directory_store import DirectoryStore
from logsteer_server.stores.fetched import DamagedContentError
from logsteer_server.stores.layout import OWNER_ONLY_DIRECTORY
from logsteer_server.stores.store import Store
from logsteer_server.stores.upkeep import (
    StoreReport,
    check_content,
    collect,
    find_stores,
    verify,
)

TRIES = 3
"""At a name that is given another content while it is read."""


class StorePlace(Protocol):
    """What commands do with all stores of one place. Errors: APIError, OSError."""

    def verify(self) -> Iterator[StoreReport]:
        """Yield what is found in each store, every content read against its SHA-256 and card."""
        ...

    def collect(self, *, damaged: bool) -> Iterator[str]:
        """Remove what no name points to; yield a line for each. `damaged`: as `upkeep.collect`."""
        ...

    def back_up(self, tar: tarfile.TarFile) -> Iterator[str]:
        """Add every store to a tar file; yield a line for each. Errors: BackupError, too."""
        ...

    def open_store(self, place: str, max_bytes: int) -> Store[Any]:
        """Return the store at a path below the place, such as `keys/alice/vectors`."""
        ...


class DirectoryPlace:
    """The stores below a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def verify(self) -> Iterator[StoreReport]:
        """Yield what is found in each store."""
        return map(verify, find_stores(self._root))

    def collect(self, *, damaged: bool) -> Iterator[str]:
        """Remove what no name points to, and what killed servers left; yield a line for each."""
        for store in find_stores(self._root):
            yield from collect(store, damaged=damaged)

    def back_up(self, tar: tarfile.TarFile) -> Iterator[str]:
        """Add every store to a tar file, each as of one moment; yield a line for each."""
        return (add_store(tar, self._root, store) for store in find_stores(self._root))

    def open_store(self, place: str, max_bytes: int) -> DirectoryStore[Any]:
        """Return the store at a path below the directory, which is made."""
        path = self._root / place
        path.parent.mkdir(OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
        return DirectoryStore(PLURALS[path.name], path.parent, max_bytes)


class BucketPlace:
    """The stores behind a URL. Errors here: ConfigurationError."""

    def __init__(self, shared: SharedStore) -> None:
        self._files = SharedFiles.open(shared)
        self._shared = shared

    def verify(self) -> Iterator[StoreReport]:
        """Yield what is found in each store."""
        for place, index in find_indexes(self._files.bucket).items():
            yield self._verify(place, index)

    def _verify(self, place: str, index: BucketIndex[Any]) -> StoreReport:
        sizes = index.measure_contents()
        pointers = index.read_all()
        report = StoreReport(f"{self._shared.url}/{place}", len(pointers), len(sizes))
        report.num_bytes = sum(pointer.card.bytes for pointer in pointers.values() if pointer)
        for name, pointer in pointers.items():
            problem = "its card is damaged" if pointer is None else self._check(index, pointer)
            if problem:
                report.problems.append(f"name {name}: {problem}")
        used = {pointer.content for pointer in pointers.values() if pointer}
        waste = sum(content not in used for content in sizes)
        if waste:  # what is being uploaded has no name yet either
            report.notes.append(f"{waste} contents have no name now: gc removes the old of them")
        return report

    def _check(self, index: BucketIndex[Any], pointer: Pointer[Any]) -> str | None:
        """Return what is wrong with a content; None for nothing, and for one that is replaced."""
        card, place = pointer.card, f"{index.place}/{pointer.content}"
        bucket = self._files.bucket
        try:
            size = bucket.measure(place)
            if size != card.bytes:
                return f"its content has {size} bytes, its card says {card.bytes}"
            # What this machine keeps of it says nothing about what is behind the URL.
            with NamedTemporaryFile() as file:
                bucket.download(place, file.write, size)
                file.flush()
                return check_content(Path(file.name), card)
        except FileNotFoundError:
            return None if self._is_replaced(index, pointer) else "its content is gone"

    def _is_replaced(self, index: BucketIndex[Any], pointer: Pointer[Any]) -> bool:
        try:
            return index.read(pointer.card.name) != pointer
        except FileNotFoundError:
            return True

    def collect(self, *, damaged: bool) -> Iterator[str]:
        """Remove what no name points to and is older than `store_grace_s`."""
        yield from collect_bucket(self._files.bucket, self._shared.grace_s, damaged=damaged)

    def back_up(self, tar: tarfile.TarFile) -> Iterator[str]:
        """Add every store to a tar file, each name as of one moment; yield a line for each."""
        for place, index in find_indexes(self._files.bucket).items():
            yield self._add(tar, place, index)

    def _add(self, tar: tarfile.TarFile, place: str, index: BucketIndex[Any]) -> str:
        added: dict[str, int] = {}
        cards = {}
        for name in sorted(index.list_names()):
            card = self._add_content(tar, index, name, added)
            if card is not None:
                cards[name] = card.model_dump_json().encode()
        for name, data in cards.items():
            add_file(tar, f"{place}/names/{name}.json", len(data), io.BytesIO(data))
        counts = f"{len(cards)} names, {len(added)} contents, {sum(added.values())} bytes"
        return f"{self._shared.url}/{place}: {counts}"

    def _add_content(
        self, tar: tarfile.TarFile, index: BucketIndex[Any], name: str, added: dict[str, int]
    ) -> Any:
        """Add what a name points to; return its card, None where the name is gone by now."""
        for _ in range(TRIES):
            try:
                pointer = index.read(name)
            except FileNotFoundError:
                return None
            if pointer is None:
                raise BackupError(
                    f"{index.locate(name)}: the card is damaged; PUT or DELETE it first, or "
                    "run gc --damaged"
                )
            card = pointer.card
            if card.sha256 in added:
                return card
            place = f"{index.place}/{pointer.content}"
            try:
                with (
                    self._files.fetched.open(card.sha256, place) as path,
                    path.open("rb") as file,
                ):
                    stored = f"{index.place}/contents/{card.sha256}.safetensors"
                    add_file(tar, stored, card.bytes, file)
            except FileNotFoundError:
                continue
            except DamagedContentError as error:
                raise BackupError(f"{place} is damaged: PUT its name again; see verify") from error
            added[card.sha256] = card.bytes
            return card
        raise BackupError(f"{index.locate(name)}: its content is gone; see verify")

    def open_store(self, place: str, max_bytes: int) -> BucketStore[Any]:
        """Return the store at a path below the URL."""
        return BucketStore(PLURALS[Path(place).name], self._files, place, max_bytes)
