"""Stores under faults: a full disk, failing calls, lost power, damage, locks, half uploads."""

import asyncio
import errno
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from logsteer.errors import APIError, NotFoundError
from logsteer_server.stores.directory_store import DirectoryStore
from logsteer_server.stores.store import KINDS, OVERRIDES, Kind
from logsteer_server.stores.threads import StoreThreads
from tests.faults.disk import CallCounter, Files, Recorder, fail_calls, list_states, record_calls
from tests.server.store_cases import list_files, make_content, put_content

MIB = 2**20
SIZE = len(make_content(1))


@pytest.fixture(params=KINDS, ids=lambda kind: kind.noun)
def kind(request: pytest.FixtureRequest) -> Kind[Any]:
    found: Kind[Any] = request.param
    return found


@pytest.fixture
def store(kind: Kind[Any], tmp_path: Path) -> DirectoryStore[Any]:
    return DirectoryStore(kind, tmp_path, MIB)


def read_state(store: DirectoryStore[Any]) -> dict[str, bytes]:
    """Each name's content, as the store gives it."""
    return {card.name: store.find(card.name).path.read_bytes() for card in store.list_all().cards}


def check_invariants(store: DirectoryStore[Any]) -> dict[str, bytes]:
    """Nothing is damaged, sizes are right, nothing is there that has no name."""
    listing = store.list_all()
    state = read_state(store)
    assert listing.damaged == []
    assert listing.num_bytes == sum({hash(data): len(data) for data in state.values()}.values())
    for card in listing.cards:
        assert hashlib.sha256(state[card.name]).hexdigest() == card.sha256
    contents = {hashlib.sha256(data).hexdigest() for data in state.values()}
    expected = [f"contents/{sha256}.safetensors" for sha256 in contents]
    assert list_files(store) == sorted(expected + [f"names/{name}.json" for name in state])
    return state


BEFORE = {"a": make_content(1), "b": make_content(2)}
CHANGES: dict[str, tuple[str, bytes | None]] = {
    "put new": ("c", make_content(3)),
    "put over": ("a", make_content(3)),
    "put shared": ("a", make_content(2)),
    "put again": ("a", make_content(1)),
    "delete": ("a", None),
}


def prepare(root: Path) -> DirectoryStore[Any]:
    store = DirectoryStore(OVERRIDES, root, MIB)
    for name, data in BEFORE.items():
        put_content(store, name, data)
    return store


def apply_change(store: DirectoryStore[Any], change: str) -> None:
    name, data = CHANGES[change]
    if data is None:
        store.delete(name)
    else:
        put_content(store, name, data)


def outcome_of(change: str) -> dict[str, bytes]:
    name, data = CHANGES[change]
    others = {n: d for n, d in BEFORE.items() if n != name}
    return others if data is None else {**others, name: data}


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("change", CHANGES)
def test_any_call_may_fail(tmp_path: Path, change: str, error: int, lasting: bool) -> None:
    reached = 0
    for failing in range(1, 100):
        store = prepare(tmp_path / str(failing))
        counter = CallCounter(failing, error, lasting)
        with fail_calls(counter), suppress(APIError):
            apply_change(store, change)
        for used in (store, DirectoryStore(OVERRIDES, tmp_path / str(failing), MIB)):
            state = check_invariants(used)
            assert state in (BEFORE, outcome_of(change)), failing
        apply_change(store, change) if change != "delete" or "a" in state else None
        assert check_invariants(store) == outcome_of(change)
        reached = failing
        if counter.count < failing:
            break
    assert reached >= (4 if change == "delete" else 8)


def read_files(root: Path) -> Files:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("change", CHANGES)
def test_power_may_go_at_any_step(tmp_path: Path, change: str) -> None:
    store = prepare(tmp_path / "first")
    before = read_files(store.directory)
    recorder = Recorder(store.directory)
    with record_calls(recorder):
        apply_change(store, change)
    seen: set[int] = set()
    for count, files in list_states(before, recorder.steps):
        key = hash(frozenset(files.items()))
        if key in seen:
            continue
        seen.add(key)
        root = tmp_path / f"{count}-{len(seen)}"
        for name, data in files.items():
            path = root / store.directory.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        assert check_invariants(DirectoryStore(OVERRIDES, root, MIB)) in (
            BEFORE,
            outcome_of(change),
        ), count
    assert len(seen) >= (3 if change == "delete" else 6)


@contextmanager
def full_disk() -> Iterator[None]:
    """Have every call that takes room fail, from the first on."""
    with fail_calls(CallCounter(1, errno.ENOSPC, lasting=True)):
        pwrite = os.pwrite
        os.pwrite = lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))  # type: ignore[assignment]
        try:
            yield
        finally:
            os.pwrite = pwrite


def test_a_name_is_deleted_on_a_full_disk(store: DirectoryStore[Any], tmp_path: Path) -> None:
    put_content(store, "a", make_content(1))
    put_content(store, "b", make_content(2))
    other = DirectoryStore(store.kind, tmp_path, MIB)
    with full_disk():
        store.delete("a")
        with pytest.raises(APIError, match="make room"):
            put_content(store, "b", make_content(3))
    for used in (store, other):
        assert check_invariants(used) == {"b": make_content(2)}


def test_a_damaged_name_is_replaced_and_deleted(store: DirectoryStore[Any]) -> None:
    for number, name in enumerate("abcd"):
        put_content(store, name, make_content(number))
    names = store.directory / "names"
    (names / "a.json").write_bytes((names / "a.json").read_bytes()[:40])
    (names / "b.json").write_bytes(b"")
    (names / "c.json").write_bytes((names / "d.json").read_bytes())  # another name's card
    for used in (store, DirectoryStore(store.kind, store.directory.parent, MIB)):
        listing = used.list_all()
        assert [card.name for card in listing.cards] == ["d"]
        assert listing.damaged == ["a", "b", "c"]
    assert used.delete("a") is None
    with pytest.raises(NotFoundError):
        used.describe("a")
    put_content(used, "b", make_content(7))
    used.delete("c")
    assert check_invariants(used) == {"b": make_content(7), "d": make_content(3)}


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_damaged_content_is_told_and_replaced(store: DirectoryStore[Any], damage: str) -> None:
    for name in "ab":
        put_content(store, name, make_content(1))
    put_content(store, "c", make_content(2))
    path = store.find("a").path
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:9])
    again = DirectoryStore(store.kind, store.directory.parent, MIB)
    assert again.list_all().damaged == ["a", "b"]
    with pytest.raises(APIError, match=r"content of .*'a' is damaged: PUT") as caught:
        again.find("a")
    assert str(store.directory) not in str(caught.value)
    put_content(again, "a", make_content(1))
    assert check_invariants(again) == {
        "a": make_content(1), "b": make_content(1), "c": make_content(2)
    }  # fmt: skip


def test_a_crash_beside_a_damaged_card_leaves_nothing_that_counts(
    store: DirectoryStore[Any],
) -> None:
    put_content(store, "a", make_content(1))
    put_content(store, "b", make_content(2))
    (store.directory / "names" / "a.json").write_text("{")
    # A server was killed between content and card.
    data = make_content(3)
    orphan = store.directory / "contents" / f"{hashlib.sha256(data).hexdigest()}.safetensors"
    orphan.write_bytes(data)
    again = DirectoryStore(store.kind, store.directory.parent, 2 * SIZE)
    assert again.list_all().num_bytes == SIZE
    put_content(again, "c", make_content(4))  # there is room for it
    again.delete("a")  # whose content goes, and the orphan
    assert check_invariants(again) == {"b": make_content(2), "c": make_content(4)}


HOLD = """
import fcntl, sys, time
with open(sys.argv[1], "a") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def held_elsewhere(path: Path) -> Iterator[None]:
    """Have another process hold a lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    try:
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_lock_that_is_held_elsewhere_is_waited_for_no_longer_than_allowed(
    kind: Kind[Any], tmp_path: Path
) -> None:
    put_content(DirectoryStore(kind, tmp_path, MIB), "a", make_content(1))
    store = DirectoryStore(kind, tmp_path, MIB, lock_timeout_s=0.2)
    with held_elsewhere(store.directory / "lock"):
        calls = [
            lambda: put_content(store, "b", make_content(2)), lambda: store.delete("a"),
            store.list_all,
        ]  # fmt: skip
        for call in calls:
            started = time.monotonic()
            with pytest.raises(APIError, match="locked by others") as caught:
                call()
            assert time.monotonic() - started < 60
            assert (caught.value.code, caught.value.retryable) == ("overloaded", True)
            assert caught.value.retry_after
        assert store.find("a").path.exists()  # reading takes no lock
    assert check_invariants(store) == {"a": make_content(1)}


def test_unfinished_uploads_reserve_their_room(kind: Kind[Any], tmp_path: Path) -> None:
    store = DirectoryStore(kind, tmp_path, 4 * SIZE)
    put_content(store, "a", make_content(1))
    first = store.receive("b", SIZE)
    second = store.receive("c")  # of a size not said
    second.write(bytes(SIZE))
    assert store.room.reserved == 2 * SIZE
    with pytest.raises(APIError, match="uploads at work") as caught:
        store.receive("d", SIZE + 1)
    assert (caught.value.code, caught.value.retryable) == ("overloaded", True)
    with pytest.raises(APIError, match="uploads at work"):
        second.write(bytes(SIZE + 1))
    assert second.path.stat().st_size == SIZE
    with pytest.raises(APIError) as caught:
        store.receive("d", 3 * SIZE + 1)  # more than there is, whoever else is at work
    assert caught.value.code == "payload_too_large"
    second.discard()
    store.receive("d", 2 * SIZE).discard()
    over = store.receive("a", 3 * SIZE)  # in the place of what a has now
    over.discard()
    first.discard()
    assert store.room.reserved == 0
    put_content(store, "b", make_content(2))
    assert store.room.reserved == 0
    assert list_files(store) == sorted(list_files(store))
    assert len(list((store.directory / "uploads").iterdir())) == 0


def test_files_are_their_owners_alone(store: DirectoryStore[Any]) -> None:
    previous = os.umask(0)
    try:
        put_content(store, "a", make_content(1))
        directories = [store.directory, *(p for p in store.directory.iterdir() if p.is_dir())]
        for path in store.directory.rglob("*"):
            allowed = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == allowed, path
        for path in directories:
            path.chmod(0o755)  # as an earlier version made them
        DirectoryStore(store.kind, store.directory.parent, MIB)
        assert {stat.S_IMODE(path.stat().st_mode) for path in directories} == {0o700}
    finally:
        os.umask(previous)


def test_a_lock_file_takes_no_room(store: DirectoryStore[Any]) -> None:
    put_content(store, "a", make_content(1))
    with (store.directory / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert lock.read() == b""


def test_store_calls_are_bounded_and_stop_nothing_else() -> None:
    release = threading.Event()
    ended: list[int] = []

    def work(number: int) -> None:
        release.wait(60)
        ended.append(number)

    async def run() -> None:
        threads = StoreThreads(2, 4)
        calls = [asyncio.create_task(threads.run(work, number)) for number in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(APIError, match="stores are busy") as caught:
            await threads.run(work, 9)
        assert (caught.value.code, caught.value.retryable) == ("overloaded", True)
        assert await asyncio.to_thread(lambda: "done") == "done"  # the pool of everybody else
        calls[3].cancel()  # it waits still, and never runs
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*calls[:3])
        await threads.run(work, 5)
        threads.close()

    asyncio.run(run())
    assert sorted(ended) == [0, 1, 2, 5]


def test_an_upload_that_is_given_up_is_written_no_more(store: DirectoryStore[Any]) -> None:
    """A thread may still write when its caller is gone: not into what has the handle by then."""
    upload = store.receive("a", 100)
    upload.write(b"abc")
    upload.discard()
    with pytest.raises(APIError, match="given up"):
        upload.write(b"def")
    with pytest.raises(APIError, match="given up"):
        upload.finish()
    upload.discard()
    assert store.room.reserved == 0
