"""Stores as one tar file, and back.

    vectors/names/happy.json               cards and contents as they lie in a store, below the
    vectors/contents/<sha256>.safetensors  path of the store within the directory
    backup.json                            at the end: how many files stand before it

A store is copied as it was at one moment, while servers go on changing it: its contents are opened
under its lock, and an open file keeps its bytes whatever becomes of its name.
"""

import hashlib
import io
import json
import os
import re
import resource
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pydantic import ValidationError

from logsteer.schemas import AdapterCard, OverrideCard, VectorCard
from logsteer_server.stores.layout import OWNER_ONLY_FILE, StoreDirectory
from logsteer_server.stores.store import Store
from logsteer_server.stores.upkeep import PIECE, PLURALS
from logsteer_server.stores.upload import sync_directory

NO_BOUND = 2**63
VERSION = 1
END = "backup.json"
MAX_END_BYTES = 1024
_MEMBER = re.compile(
    r"(?P<store>(?:[A-Za-z0-9][A-Za-z0-9._-]*/)*(?P<plural>[a-z]+))/"
    r"(?:names/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,127})\.json"
    r"|contents/(?P<sha256>[0-9a-f]{64})\.safetensors)"
)


class BackupError(ValueError):
    """A backup that cannot be written or restored; the message says why and what to do."""


def back_up(add_stores: Callable[[tarfile.TarFile], Iterable[str]], target: Path) -> list[str]:
    """Write stores to a tar file, to which `add_stores` adds them; return its line for each store.

    Errors: BackupError for a damaged content, and where not all files can be opened; APIError;
    OSError.
    """
    part = target.with_name(f"{target.name}.part")
    lines: list[str] = []
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWNER_ONLY_FILE)
    try:
        with os.fdopen(handle, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                lines += add_stores(tar)
                end = json.dumps({"version": VERSION, "files": len(tar.getmembers())}).encode()
                add_file(tar, END, len(end), io.BytesIO(end))
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
        sync_directory(target.absolute().parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return lines


def add_store(tar: tarfile.TarFile, root: Path, store: StoreDirectory[Any]) -> str:
    """Add a store below a directory to a tar file, as of one moment; return a line that says so."""
    place = store.path.relative_to(root.absolute()).as_posix()
    if place == ".":
        place = store.path.name
    _allow_open_files()
    with ExitStack() as opened:
        with store.exclude():
            index = store.read()
            if index.damaged:
                raise BackupError(
                    f"{store.path}: the cards of {', '.join(index.damaged)} are damaged; PUT or "
                    "DELETE them first, or run gc --damaged"
                )
            cards = {name: store.locate_card(name).read_bytes() for name in sorted(index.names)}
            used = sorted({sha256 for sha256 in index.names.values() if sha256})
            try:
                files = [
                    (sha256, opened.enter_context(store.locate(sha256).open("rb")))
                    for sha256 in used
                ]
            except OSError as error:
                raise BackupError(
                    f"{store.path}: {error.strerror}: {error.filename}; run verify, and where too "
                    "many files are open, raise `ulimit -n`"
                ) from error
        for sha256, file in files:
            _add_content(tar, f"{place}/contents/{sha256}.safetensors", sha256, file)
    for name, card in cards.items():
        add_file(tar, f"{place}/names/{name}.json", len(card), io.BytesIO(card))
    return f"{store.path}: {len(cards)} names, {len(files)} contents, {index.num_bytes} bytes"


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _add_content(tar: tarfile.TarFile, place: str, sha256: str, file: IO[bytes]) -> None:
    reader = _DigestReader(file)
    add_file(tar, place, os.fstat(file.fileno()).st_size, reader)
    if reader.digest.hexdigest() != sha256:
        raise BackupError(f"{place} is damaged: PUT its names again or DELETE them; see verify")


def add_file(tar: tarfile.TarFile, place: str, size: int, file: Any) -> None:
    """Add so many bytes of a file to a tar file."""
    info = tarfile.TarInfo(place)
    info.size, info.mode = size, OWNER_ONLY_FILE
    tar.addfile(info, file)


class _DigestReader:
    """A file that is read once, and the SHA-256 of what was read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes."""
        data = self._file.read(size)
        self.digest.update(data)
        return data


@dataclass(frozen=True, slots=True)
class _Entry:
    """A name in a backup: its store's path, its card, and where its content is."""

    store: PurePosixPath
    card: VectorCard | OverrideCard | AdapterCard
    content: tarfile.TarInfo


def restore(
    source: Path,
    open_store: Callable[[str, int], Store[Any]],
    bounds: Mapping[str, int],
    *,
    force: bool = False,
) -> list[str]:
    """Give the names of a backup their contents; return a line for each that has changed.

    Everything is checked before anything is changed. Names that the backup lacks stay as they are.
    `open_store` opens the store at a path for at most so many bytes; `bounds` are those of each
    kind, no bound where it is not there. Errors: BackupError for a file that is no
    whole backup, and without `force` where a name has another content now; APIError; OSError.
    """
    with _open_tar(source) as tar:
        entries = _read_entries(tar)
        places = {entry.store for entry in entries}
        targets = {
            place: open_store(str(place), bounds.get(place.name, NO_BOUND)) for place in places
        }
        known = {place: _find_names(store) for place, store in targets.items()}
        current = [known[entry.store].get(entry.card.name) for entry in entries]
        changed = [
            (entry, own)
            for entry, own in zip(entries, current, strict=True)
            if own != entry.card.sha256
        ]
        taken = [f"{entry.store}/{entry.card.name}" for entry, own in changed if own is not None]
        if taken and not force:
            raise BackupError(
                f"{len(taken)} names have another content now: {', '.join(taken[:10])}"
                f"{', …' if taken[10:] else ''}; nothing was changed. --force overwrites them"
            )
        for entry, _ in changed:
            _put(tar, entry, targets[entry.store])
    return [f"restored {entry.store}/{entry.card.name}" for entry, _ in changed]


@contextmanager
def _open_tar(source: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(source, "r:") as tar:
            yield tar
    except (tarfile.TarError, EOFError) as error:
        raise BackupError(f"{source} is no backup that can be read: {error}") from error


def _read_entries(tar: tarfile.TarFile) -> list[_Entry]:
    """Return the names in a backup, with contents that are whole. Errors: BackupError."""
    cards: dict[tuple[str, str], bytes] = {}
    contents: dict[tuple[str, str], tarfile.TarInfo] = {}
    members = tar.getmembers()
    _check_end(tar, members)
    for member in members[:-1]:
        found = _MEMBER.fullmatch(member.name)
        if found is None or not member.isreg() or found["plural"] not in PLURALS:
            raise BackupError(f"{member.name[:200]!r} belongs to no backup of stores")
        if found["name"]:
            cards[found["store"], found["name"]] = _read_member(tar, member).read()
        else:
            contents[found["store"], found["sha256"]] = member
    for (_, sha256), member in contents.items():
        digest, file = hashlib.sha256(), _read_member(tar, member)
        while piece := file.read(PIECE):
            digest.update(piece)
        if digest.hexdigest() != sha256:
            raise BackupError(f"{member.name} is damaged in the backup")
    entries = []
    for (place, name), data in cards.items():
        path = PurePosixPath(place)
        try:
            card = PLURALS[path.name].card.model_validate_json(data)
            content = contents[place, card.sha256]
        except (ValidationError, KeyError) as error:
            raise BackupError(f"{place}/{name} is damaged in the backup") from error
        if card.name != name or content.size != card.bytes:
            raise BackupError(f"{place}/{name} is damaged in the backup")
        entries.append(_Entry(path, card, content))
    return entries


def _check_end(tar: tarfile.TarFile, members: list[tarfile.TarInfo]) -> None:
    """Make sure that nothing was cut off, between two files either. Errors: BackupError."""
    last = members[-1] if members else None
    if last is None or last.name != END or not last.isreg() or last.size > MAX_END_BYTES:
        raise BackupError("its end is missing, so that it is no whole backup of stores")
    try:
        end = json.loads(_read_member(tar, last).read())
    except ValueError as error:
        raise BackupError(f"{END} is damaged in the backup") from error
    if end != {"version": VERSION, "files": len(members) - 1}:
        raise BackupError(f"{END} is of another version, or counts other files than are there")


def _read_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(member)
    assert file is not None, "only regular files are asked for"
    return file


def _find_names(store: Store[Any]) -> dict[str, str]:
    """Return the SHA-256 of each name's content, "" for what is damaged."""
    listing = store.list_all()
    return {card.name: card.sha256 for card in listing.cards} | dict.fromkeys(listing.damaged, "")


def _put(tar: tarfile.TarFile, entry: _Entry, store: Store[Any]) -> None:
    upload = store.receive(entry.card.name, entry.card.bytes)
    try:
        file = _read_member(tar, entry.content)
        while piece := file.read(PIECE):
            upload.write(piece)
        if upload.finish() != entry.card.sha256:
            raise BackupError(f"{entry.content.name} has changed while it was restored")
        store.put(upload, entry.card)
    finally:
        upload.discard()
