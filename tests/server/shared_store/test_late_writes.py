"""Writes to a store behind a URL that arrive after they were given up, or by a slow clock."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from logsteer.errors import NotFoundError, OverloadedError
from logsteer_server.stores import bucket_index
from logsteer_server.stores.bucket_index import collect_bucket
from tests.server.shared_store.bucket_cases import (
    open_at,
    read_state,
    shared_at,
)
from tests.server.shared_store.object_store import ObjectStore
from tests.server.store_cases import make_content, put_content

SIZE = len(make_content(1))


class HeldWrites:
    """Puts of names that stand still until they are let go, while others pass."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self.holds = True
        ObjectStore.faults.before = self._wait

    def _wait(self, call: str, path: str) -> None:
        if call == "put" and "/names/" in path and self.holds:
            with self._lock:
                self._held.add(path)
            self._open.wait(60)

    def let_go(self) -> None:
        """Have them arrive."""
        self._open.set()
        assert self._held
        end = time.monotonic() + 60
        while not self._held <= ObjectStore.files.keys():
            assert time.monotonic() < end
            time.sleep(0.001)


@pytest.fixture
def hasty(tmp_path: Path) -> tuple[Any, Any]:
    """The stores of two machines, of which the first soon gives a call up."""
    given: list[dict[str, Any]] = [{"store_timeout_s": 0.5, "store_retries": 1}, {}]
    first, second = (
        open_at(shared_at(tmp_path / name, **own)) for name, own in zip("ab", given, strict=True)
    )
    return first, second


@pytest.mark.parametrize("given", [None, 1], ids=["a new name", "a name that is there"])
def test_a_write_that_arrives_late_changes_nothing(
    hasty: tuple[Any, Any], given: int | None
) -> None:
    store, other = hasty
    if given is not None:
        put_content(store, "a", make_content(given))
    held = HeldWrites()
    with pytest.raises(OverloadedError):
        put_content(store, "a", make_content(2))
    held.holds = False
    put_content(other, "a", make_content(3))
    held.let_go()
    assert len([own for own in ObjectStore.files if "/names/a/" in own]) > 1, "nothing was late"
    assert read_state(store) == read_state(other) == {"a": make_content(3)}
    time.sleep(0.01)
    collect_bucket(other._files.bucket, 0.001)
    assert len(ObjectStore.files) == 2
    assert read_state(store) == {"a": make_content(3)}


def test_a_write_that_arrives_after_its_name_was_deleted_is_not_seen(
    hasty: tuple[Any, Any],
) -> None:
    store, other = hasty
    put_content(store, "a", make_content(1))
    held = HeldWrites()
    with pytest.raises(OverloadedError):
        put_content(store, "a", make_content(2))
    held.holds = False
    other.delete("a")
    held.let_go()
    for own in hasty:
        with pytest.raises(NotFoundError):
            own.find("a")
        assert own.list_all().cards == []
    bucket = other._files.bucket
    collect_bucket(bucket, 60)
    (left,) = [own for own in ObjectStore.files if "/names/" in own]
    assert left.endswith(".gone"), "what was late is removed before what says that it is deleted"
    time.sleep(0.01)
    collect_bucket(bucket, 0.001)
    assert ObjectStore.files == {}


def test_a_deletion_that_arrives_late_deletes_nothing_newer(hasty: tuple[Any, Any]) -> None:
    store, other = hasty
    put_content(store, "a", make_content(1))
    held = HeldWrites()
    with pytest.raises(OverloadedError):
        store.delete("a")
    held.holds = False
    put_content(other, "a", make_content(2))
    held.let_go()
    assert read_state(store) == read_state(other) == {"a": make_content(2)}


def test_a_clock_that_is_slow_does_not_lose_what_it_writes(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = pair
    put_content(store, "a", make_content(1))
    monkeypatch.setattr(bucket_index, "stamp_ms", lambda: 1000)
    put_content(other, "a", make_content(2))
    assert read_state(store) == {"a": make_content(2)}
    other.delete("a")
    assert read_state(store) == {}
    put_content(other, "a", make_content(3))
    assert read_state(store) == {"a": make_content(3)}
