"""The store behind a URL: several servers, none of which knows of another."""

import concurrent.futures
import hashlib
import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logsteer.errors import NotFoundError, OverloadedError, PayloadTooLargeError
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings
from logsteer_server.stores import bucket_index, bucket_store
from logsteer_server.stores.bucket import Bucket
from logsteer_server.stores.bucket_index import collect_bucket, count_bucket
from logsteer_server.stores.bucket_store import BucketStore, SharedFiles
from logsteer_server.stores.directory_store import check_store_directory
from logsteer_server.stores.store import KINDS, OVERRIDES, Kind, StoreListing
from tests.server.shared_store.bucket_cases import (
    MIB,
    find_card,
    open_at,
    read_state,
    shared_at,
)
from tests.server.shared_store.object_store import ObjectStore
from tests.server.store_cases import make_content, put_content

SIZE = len(make_content(1))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_what_one_machine_stores_another_has(url: str, kind: Kind[Any], tmp_path: Path) -> None:
    first, second = (open_at(shared_at(tmp_path / name, url), kind) for name in "ab")
    assert first.list_all() == second.list_all() == StoreListing([], [], 0)
    card = put_content(first, "step.1", make_content(1))
    found = second.find("step.1")
    assert (found.name, found.sha256) == ("step.1", hashlib.sha256(make_content(1)).hexdigest())
    assert second.read(found) == make_content(1)
    assert second.describe("step.1") == card
    assert second.read(second.find_content(card.sha256)) == make_content(1)
    assert second.list_all() == StoreListing([card], [], SIZE)
    other = put_content(second, "step.1", make_content(2))
    assert first.find("step.1").sha256 == other.sha256
    with pytest.raises(NotFoundError, match=card.sha256):
        first.find_content(card.sha256)
    with pytest.raises(NotFoundError, match=r"these are there: step\.1"):
        first.find("other")
    assert first.delete("step.1") == other.sha256
    for call in (second.find, second.describe, second.delete):
        with pytest.raises(NotFoundError, match="none is there yet"):
            call("step.1")
    bucket = Bucket(shared_at(tmp_path, url))
    (deleted,) = bucket.list_files()
    assert deleted.endswith(".gone")
    time.sleep(0.01)
    collect_bucket(bucket, 0.001)
    assert bucket.list_files() == {}


def test_namespaces_do_not_see_one_another(tmp_path: Path) -> None:
    files = SharedFiles.open(shared_at(tmp_path))
    mine = BucketStore(OVERRIDES, files, "keys/me/overrides", MIB)
    yours = BucketStore(OVERRIDES, files, "keys/you/overrides", MIB)
    card = put_content(mine, "a", make_content(1))
    for ask in (lambda: yours.find("a"), lambda: yours.find_content(card.sha256)):
        with pytest.raises(NotFoundError):
            ask()


def test_the_bound_counts_what_every_machine_stored(tmp_path: Path) -> None:
    first, second = (open_at(shared_at(tmp_path / n), max_bytes=2 * SIZE) for n in "ab")
    put_content(first, "a", make_content(1))
    put_content(second, "b", make_content(2))
    before = dict(ObjectStore.files)
    for store in (first, second):
        with pytest.raises(PayloadTooLargeError, match="override_store_bytes"):
            put_content(store, "c", make_content(3))
    assert ObjectStore.files == before
    put_content(first, "b", make_content(3))
    first.delete("a")
    put_content(second, "c", make_content(4))
    assert second.list_all().num_bytes == 2 * SIZE


@pytest.mark.parametrize("url", ["objects", "file"], indirect=True)
def test_of_uploads_at_once_the_last_wins_whole(url: str, tmp_path: Path) -> None:
    stores = [open_at(shared_at(tmp_path / name, url)) for name in "ab"]
    stop = threading.Event()
    read = []

    def look() -> None:
        while not stop.is_set():
            try:
                found = stores[0].find("a")
                read.append((found.sha256, hashlib.sha256(stores[0].read(found)).hexdigest()))
            except FileNotFoundError:
                pass  # replaced just now

    def put(number: int) -> None:
        while True:
            try:
                put_content(stores[number % 2], "a", make_content(number))
                return
            except OverloadedError as error:
                assert "replaced again and again" in error.detail

    put_content(stores[0], "a", make_content(99))
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        watching = pool.submit(look)
        try:
            list(pool.map(put, range(40)))
        finally:
            stop.set()
        watching.result()
    assert read
    assert all(told == found for told, found in read)
    assert stores[0].find("a") == stores[1].find("a")
    assert read_state(stores[1])["a"] in [make_content(n) for n in range(40)]
    # What lost the race is waste, of which upkeep leaves nothing.
    bucket = Bucket(shared_at(tmp_path, url))
    time.sleep(0.01)
    collect_bucket(bucket, 0.001)
    assert len(bucket.list_files()) == 2


def test_a_server_that_dies_at_any_call_leaves_old_or_new(tmp_path: Path) -> None:
    """What it leaves beside that goes with the next upkeep, and nothing else does."""

    class Died(BaseException):
        pass

    outcomes = []
    for step in range(30):
        ObjectStore.forget()
        dying, other = (open_at(shared_at(tmp_path / f"{name}{step}")) for name in "ab")
        put_content(dying, "a", make_content(1))
        put_content(dying, "b", make_content(2))
        left = step

        def count(call: str, path: str) -> None:
            nonlocal left
            if call in ("put", "delete"):
                if not left:
                    raise Died
                left -= 1

        ObjectStore.faults.before = count
        try:
            put_content(dying, "a", make_content(3))
            ended = True
        except Died:
            ended = False
        ObjectStore.faults.before = lambda call, path: None
        state = read_state(other)
        assert state["b"] == make_content(2)
        assert state["a"] in (make_content(1), make_content(3))
        outcomes.append(state["a"] == make_content(3))
        time.sleep(0.005)
        collect_bucket(other._files.bucket, 0.002)
        assert read_state(other) == state
        assert len(ObjectStore.files) == 4
        if ended:
            break
    assert outcomes[0] is False
    assert outcomes == sorted(outcomes)  # never back to the old
    assert len(outcomes) >= 4


def test_upkeep_leaves_what_is_young_or_may_be_needed(pair: tuple[Any, Any]) -> None:
    store, other = pair
    put_content(store, "a", make_content(1))
    upload = other.receive("b", SIZE)
    upload.write(make_content(2))
    other.publish(upload)
    bucket = store._files.bucket
    assert collect_bucket(bucket, 60) == []
    time.sleep(0.01)
    name = find_card("a")
    whole = ObjectStore.files[name]
    ObjectStore.files[name] = whole[:20]
    lines = collect_bucket(bucket, 0.001)
    assert [line.split()[0] for line in lines] == ["kept", "kept"]
    ObjectStore.files[name] = whole
    (line,) = collect_bucket(bucket, 0.001)
    assert "no name points to it" in line
    assert read_state(other) == {"a": make_content(1)}
    upload.discard()
    assert collect_bucket(bucket, 0.001, damaged=True) == []


def test_an_upload_that_takes_too_long_gets_no_name(tmp_path: Path) -> None:
    shared = replace(shared_at(tmp_path), grace_s=0.01)
    store = open_at(shared)
    upload = store.receive("a", SIZE)
    upload.write(make_content(1))
    store.publish(upload)
    time.sleep(0.02)
    card = OVERRIDES.card(
        name="a", sha256=upload.finish(), bytes=SIZE, created="now", model="m",
        weights_digest="d", tensors=1, moved=1, total=1, norm=1.0,
    )  # fmt: skip
    with pytest.raises(OverloadedError, match="store_grace_s"):
        store.put(upload, card)
    upload.discard()
    assert ObjectStore.files == {}


class CallClock:
    """A clock that each call of the store moves on: while the machine stands still, nothing ages.

    It takes the place of the time of day and of the time that passes, both in seconds.
    """

    CALL_S = 2e-4

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls = itertools.count()
        self.now = 1e9
        ObjectStore.faults.before = self._move
        monkeypatch.setattr(bucket_index, "stamp_ms", lambda: int(1000 * self.now))
        for module in (bucket_index, bucket_store):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _move(self, _call: str, _path: str) -> None:
        self.now = 1e9 + self.CALL_S * next(self._calls)


def test_upkeep_of_many_servers_beside_uploads_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, grace_s = CallClock(monkeypatch), 1.0
    stores = [open_at(replace(shared_at(tmp_path / n), grace_s=grace_s)) for n in "abcd"]
    stop = threading.Event()

    def collect(store: Any) -> None:
        while not stop.is_set():
            collect_bucket(store._files.bucket, grace_s)

    def use(number: int) -> None:
        while True:
            try:
                put_content(stores[number % 4], f"n{number % 5}", make_content(number))
            except OverloadedError:  # while it had no turn, others made many calls
                continue
            return

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        collecting = [pool.submit(collect, store) for store in stores[:2]]
        end = clock.now + 2 * grace_s
        number = 0
        try:
            while clock.now < end:
                list(pool.map(use, range(number, number + 4)))
                number += 4
        finally:
            stop.set()
        for own in collecting:
            own.result()
    assert sorted(read_state(stores[3])) == [f"n{n}" for n in range(5)]
    assert stores[0].list_all().damaged == []


def test_a_late_listing_shows_names_later_and_loses_none(pair: tuple[Any, Any]) -> None:
    store, other = pair
    put_content(store, "a", make_content(1))
    ObjectStore.faults.hides = 2
    with pytest.raises(NotFoundError):
        other.find("a")
    put_content(other, "b", make_content(2))
    put_content(other, "a", make_content(3))
    ObjectStore.faults.hides = 0
    assert read_state(store) == {"a": make_content(3), "b": make_content(2)}
    time.sleep(0.01)
    collect_bucket(other._files.bucket, 0.001)
    assert len(ObjectStore.files) == 4
    assert read_state(other) == {"a": make_content(3), "b": make_content(2)}


def test_a_name_that_is_replaced_while_it_is_read_is_looked_up_again(
    pair: tuple[Any, Any],
) -> None:
    store, other = pair
    put_content(store, "a", make_content(0))
    changes, is_replacing = 1, False

    def replace_name(call: str, path: str) -> None:
        nonlocal changes, is_replacing
        if call == "get" and "/names/" in path and changes and not is_replacing:
            changes, is_replacing = changes - 1, True
            put_content(store, "a", make_content(1 + changes))
            is_replacing = False

    ObjectStore.faults.before = replace_name
    assert other.read(other.find("a")) == make_content(1)
    changes = 1
    put_content(store, "b", make_content(5))
    fresh = open_at(shared_at(store._files.settings.directory.parent / "c"))
    assert read_state(fresh) == {"a": make_content(1), "b": make_content(5)}
    changes = 99
    with pytest.raises(OverloadedError, match="replaced again and again"):
        open_at(shared_at(store._files.settings.directory.parent / "d")).find("a")


# ------------------------------------------------------------------ what may be set


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("s3://bucket/logsteer", r"s3:// takes a package that is not installed.*[Ii]nstall s3fs"),
        ("gs://bucket", "gcsfs"),
        ("nosuch://bucket", "store_url: nosuch://bucket cannot be used"),
    ],
)
def test_a_url_that_cannot_be_used_is_said_at_the_start(
    tmp_path: Path, url: str, match: str
) -> None:
    settings = Settings(models=[ModelSettings(id="a", path="p")], directory=tmp_path, store_url=url)
    with pytest.raises(ConfigurationError, match=match):
        check_store_directory(settings)
    with pytest.raises(ConfigurationError, match=match):
        SharedFiles.open(shared_at(tmp_path, url))


def test_options_are_kept_out_of_sight(tmp_path: Path) -> None:
    shared = shared_at(tmp_path, store_options={"secret": "hunter2"})
    assert shared.options == {"secret": "hunter2"}
    assert "hunter2" not in repr(shared)


def test_pointers_are_read_once(pair: tuple[Any, Any]) -> None:
    store, other = pair
    for number in range(5):
        put_content(store, f"n{number}", make_content(number))
    other.list_all()
    ObjectStore.faults.calls.clear()
    put_content(store, "n1", make_content(9))
    ObjectStore.faults.calls.clear()
    assert len(other.list_all().cards) == 5
    read = [path for call, path in ObjectStore.faults.calls if call == "get"]
    assert read == [find_card("n1")]


def test_what_is_stored_is_counted_for_the_metrics(tmp_path: Path) -> None:
    files = SharedFiles.open(shared_at(tmp_path))
    for place, seed in (("overrides", 1), ("keys/me/overrides", 2), ("keys/you/overrides", 3)):
        put_content(BucketStore(OVERRIDES, files, place, MIB), "a", make_content(seed))
    own, keys = count_bucket(files.bucket)
    assert own == {"vectors": 0, "overrides": SIZE, "adapters": 0}
    assert keys == {"vectors": 0, "overrides": 2 * SIZE, "adapters": 0}
