"""Upkeep of stores while servers run or do not: `verify` finds damage, `collect` removes waste."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from logsteer.schemas import AdapterCard, OverrideCard, VectorCard
from logsteer_server.stores.directory_store import LOCK_TIMEOUT_S
from logsteer_server.stores.layer_vectors import parse_content
from logsteer_server.stores.layout import C, StoreDirectory
from logsteer_server.stores.store import KINDS

PIECE = 2**22
"""Bytes of a content that are read at once."""
PLURALS = {kind.plural: kind for kind in KINDS}


@dataclass
class StoreReport:
    """What was found in one store: how much there is, and every problem in a line."""

    place: str
    names: int = 0
    contents: int = 0
    num_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is no problem, and good to know."""


def find_stores(root: Path) -> Iterator[StoreDirectory[Any]]:
    """Yield every store at or below a directory, in the order of their paths."""
    found = {path.parent for path in root.rglob("names") if path.parent.name in PLURALS}
    for path in sorted(found):
        yield StoreDirectory(path, PLURALS[path.name].card, LOCK_TIMEOUT_S)


def verify(store: StoreDirectory[C]) -> StoreReport:
    """Read every content against its SHA-256 and its card. Errors: OSError, APIError."""
    report = StoreReport(str(store.path))
    with store.exclude():
        index = store.read()
    report.names, report.contents = len(index.names), len(index.sizes)
    report.num_bytes = index.num_bytes
    report.problems += [f"name {name}: its card is damaged" for name in index.damaged]
    checked: dict[str, str | None] = {}
    for name in sorted(index.names.keys() - set(index.damaged)):
        if problem := _verify_name(store, name, checked):
            report.problems.append(f"name {name}: {problem}")
    for sha256 in sorted(index.unclaimed):
        with store.exclude():  # a server may have given it a name by now, or removed it
            if sha256 in store.read().unclaimed:
                report.problems.append(f"content {sha256}: no card points to it")
    return report


def _verify_name(store: StoreDirectory[C], name: str, checked: dict[str, str | None]) -> str | None:
    """Return what is wrong with a name; None for nothing, and for one that is gone by now."""
    card = _read_card(store, name)
    while card is not None:
        if card.sha256 not in checked:
            checked[card.sha256] = _verify_content(store, card)
        problem = checked[card.sha256]
        seen, card = card, _read_card(store, name)
        if card is not None and card.sha256 == seen.sha256:
            return problem
    return None


def _read_card(store: StoreDirectory[C], name: str) -> C | None:
    try:
        return store.read_card(name)
    except FileNotFoundError:
        return None


def _verify_content(store: StoreDirectory[C], card: C) -> str | None:
    path = store.locate(card.sha256)
    try:
        size = path.stat().st_size
        if size != card.bytes:
            return f"its content has {size} bytes, its card says {card.bytes}"
    except FileNotFoundError:
        return "its content is gone"
    except OSError as error:
        return f"its content cannot be read: {error}"
    return check_content(path, card)


def check_content(path: Path, card: VectorCard | OverrideCard | AdapterCard) -> str | None:
    """Return what is wrong with a content's file by its SHA-256 and card; None for nothing."""
    try:
        if digest_file(path) != card.sha256:
            return "its content is not what its SHA-256 says"
        if isinstance(card, VectorCard):
            vectors = parse_content(path.read_bytes())
            facts = vectors.hook, list(vectors.layers), vectors.width
            if facts != (card.hook, card.layers, card.width):
                return "its card describes another vector than its content is"
    except FileNotFoundError:
        return "its content is gone"
    except (OSError, ValueError) as error:
        return f"its content cannot be read: {error}"
    return None


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file. Errors: OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def collect(store: StoreDirectory[C], *, damaged: bool = False) -> list[str]:
    """Remove what no name points to and what killed servers left; return a line for each.

    While a card is damaged, a content without a name may be its own: both stay, unless `damaged`
    says that they go. Errors: OSError, APIError.
    """
    lines = []
    with store.exclude() as lock:
        lines += [f"removed {path}: a left-over" for path in store.remove_left_overs()]
        index = store.read()
        if index.damaged and not damaged:
            lines += [
                f"kept {store.locate(sha256)}: it may be that of a damaged card"
                for sha256 in sorted(index.unclaimed)
            ]
            return lines
        if index.damaged or index.unclaimed:
            store.change_mark(lock)
        for name in index.damaged:
            store.locate_card(name).unlink(missing_ok=True)
            lines.append(f"removed {store.locate_card(name)}: a damaged card")
        for sha256 in sorted(index.unclaimed):
            store.locate(sha256).unlink(missing_ok=True)
            lines.append(f"removed {store.locate(sha256)}: no name points to it")
    return lines
