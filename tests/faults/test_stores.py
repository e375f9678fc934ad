"""Stores under faults: a full disk, failing calls, lost power, kills, half uploads.

And directories that processes leave behind when they are killed.
"""

import asyncio
import errno
import os
import resource
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from logsteer.errors import APIError
from logsteer_server.engines.lifetime import PREFIX, ScratchDirectory, sweep
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import OVERRIDES, Store
from logsteer_server.stores.threads import FairTurns, StoreThreads
from tests.conftest import fake_model
from tests.faults.disk import CallCounter, Files, Recorder, fail_calls, list_states, record_calls
from tests.faults.processes import running
from tests.refusals import refused
from tests.server.store_cases import make_content, put_content, read_state

MIB = 2**20

BEFORE = {"a": make_content(1), "b": make_content(2)}
CHANGES: dict[str, tuple[str, bytes | None, bool]] = {
    "put new": ("c", make_content(3), False),
    "put over": ("a", make_content(3), True),
    "put shared": ("a", make_content(2), True),
    "put again": ("a", make_content(1), True),
    "delete": ("a", None, False),
}
"""Name, content (None: it is deleted), and whether it overwrites."""


def open_store(root: Path) -> Store[Any]:
    return Store(OVERRIDES, Objects(root), MIB)


def prepare(root: Path) -> Store[Any]:
    store = open_store(root)
    for name, data in BEFORE.items():
        put_content(store, name, data)
    return store


def apply_change(store: Store[Any], change: str) -> None:
    name, data, overwrite = CHANGES[change]
    if data is None:
        store.delete(name)
    else:
        put_content(store, name, data, "request", overwrite=overwrite)


def outcome_of(change: str) -> dict[str, bytes]:
    name, data, _ = CHANGES[change]
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
        with fail_calls(counter):
            try:
                apply_change(store, change)
            except APIError as caught:
                told = caught.code, caught.status
                assert told == ("internal", 507 if error == errno.ENOSPC else 500), failing
        for used in (store, open_store(tmp_path / str(failing))):
            state = read_state(used)
            assert state in (BEFORE, outcome_of(change)), failing
        apply_change(store, change) if change != "delete" or "a" in state else None
        assert read_state(store) == outcome_of(change)
        reached = failing
        if counter.count < failing:
            break
    assert reached >= (2 if change == "delete" else 8)


def read_files(root: Path) -> Files:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("change", CHANGES)
def test_power_may_go_at_any_step(tmp_path: Path, change: str) -> None:
    store = prepare(tmp_path / "first")
    root = store.objects.root
    before = read_files(root)
    recorder = Recorder(root)
    with record_calls(recorder):
        apply_change(store, change)
    seen: set[int] = set()
    for count, files in list_states(before, recorder.steps):
        key = hash(frozenset(files.items()))
        if key in seen:
            continue
        seen.add(key)
        place = tmp_path / f"{count}-{len(seen)}"
        for name, data in files.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        states = (BEFORE, outcome_of(change))
        if count == len(recorder.steps):  # it was acknowledged
            states = (outcome_of(change),)
        assert read_state(open_store(place)) in states, count
    assert len(seen) >= (2 if change == "delete" else 6)


@pytest.mark.parametrize("limit", [300, 40], ids=["content", "name"])
def test_a_full_disk_is_told_and_nothing_changes(tmp_path: Path, limit: int) -> None:
    content = make_content(4) if limit > 40 else b"short"
    store = prepare(tmp_path)
    before = read_files(store.objects.root)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        for name in ("a", "c"):
            with refused("internal", "make room on it", status=507):
                put_content(store, name, content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_state(store) == BEFORE
    assert {n: d for n, d in read_files(store.objects.root).items() if d != content} == before


def test_a_name_is_deleted_on_a_full_disk(tmp_path: Path) -> None:
    store = prepare(tmp_path)
    with fail_calls(CallCounter(1, errno.ENOSPC, lasting=True)):
        store.delete("a")
        with pytest.raises(APIError, match="make room"):
            put_content(store, "b", make_content(3))
    assert read_state(store) == {"b": make_content(2)}


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        store = prepare(tmp_path / "store")
        for path in (store.objects.root, *store.objects.root.rglob("*")):
            allowed = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == allowed, path
    finally:
        os.umask(previous)


def test_uploads_of_killed_servers_go_and_those_at_work_stay(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    upload = store.receive("a")
    upload.write(make_content(1))
    left_over, young = (store.objects.uploads / name for name in ("x.part", "y.part"))
    for path in (left_over, young):
        path.write_bytes(b"half a file")
    for path in (left_over, upload.path):
        os.utime(path, (0, 0))
    store.objects.remove_left_overs()
    assert [left_over.exists(), young.exists(), upload.path.exists()] == [False, True, True]
    upload.discard()


def test_an_upload_that_is_given_up_is_written_no_more(tmp_path: Path) -> None:
    """A thread may still write when its caller is gone: not into what has the handle by then."""
    store = open_store(tmp_path)
    upload = store.receive("a", 100)
    upload.write(b"abc")
    upload.discard()
    for call in (lambda: upload.write(b"def"), upload.finish):
        with pytest.raises(APIError, match="given up"):
            call()
    upload.discard()


async def test_store_calls_are_bounded_and_stop_nothing_else() -> None:
    release = threading.Event()
    ended: list[int] = []

    def work(number: int) -> None:
        release.wait(60)
        ended.append(number)

    threads = StoreThreads(2, 4)
    calls = [asyncio.create_task(threads.run(work, number)) for number in range(4)]
    await asyncio.sleep(0)
    with refused("overloaded", "stores are busy", retryable=True):
        await threads.run(work, 9)
    assert await asyncio.to_thread(lambda: "done") == "done"  # the pool of everybody else
    calls[3].cancel()  # it waits still, and never runs
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*calls[:3])
    await threads.run(work, 5)
    threads.close()
    assert sorted(ended) == [0, 1, 2, 5]


def test_tenants_take_turns_and_who_leaves_gives_its_turn_on() -> None:
    async def run(leave: Callable[[dict[str, asyncio.Task[None]]], None]) -> list[str]:
        turns, order, tasks = FairTurns(1), [], {}
        release = asyncio.Event()

        async def work(name: str) -> None:
            async with turns.take(name[0]):
                order.append(name)
                await release.wait()

        for name in ("a1", "a2", "a3", "a4", "b1", "c1"):
            tasks[name] = asyncio.create_task(work(name))
            await asyncio.sleep(0)
        leave(tasks)
        await asyncio.sleep(0)
        release.set()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 60)
        async with asyncio.timeout(60), turns.take("d"):  # nobody keeps the turn
            return order

    assert asyncio.run(run(lambda tasks: None)) == ["a1", "a2", "b1", "c1", "a3", "a4"]
    left = asyncio.run(run(lambda tasks: (tasks["a2"].cancel(), tasks["b1"].cancel())))  # type: ignore[arg-type,return-value]
    assert left == ["a1", "c1", "a3", "a4"] or left == ["a1", "a3", "c1", "a4"]
    assert asyncio.run(run(lambda tasks: tasks["a1"].cancel()))[:3] == ["a1", "a2", "b1"]


# ------------------------------------------------------------------ directories of killed processes


OWNER = """
import time
from logsteer_server.engines.lifetime import ScratchDirectory
scratch = ScratchDirectory()
(scratch.path / "file").write_text("x")
(scratch.path / "below").mkdir()
print(scratch.path, flush=True)
time.sleep(600)
"""


def leave(parent: Path) -> tuple[Path, subprocess.Popen[str]]:
    """A directory of a process that runs."""
    command, environment = [sys.executable, "-c", OWNER], os.environ | {"TMPDIR": str(parent)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    return Path(process.stdout.readline().strip()), process


def test_what_nobody_owns_is_swept_and_what_somebody_does_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, process = leave(tmp_path)
    with process:
        try:
            with ScratchDirectory() as own:
                assert sweep() == []
                process.kill()
                process.wait()
                assert sweep() == [left]
                assert (own.exists(), left.exists()) == (True, False)
            assert not own.exists()
        finally:
            process.kill()


def test_only_directories_of_ours_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / "other").mkdir()
    assert sweep() == []
    assert (target / "precious").exists()


def test_a_server_sweeps_at_its_start(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    left, process = leave(scratch)
    with process:
        process.kill()
    assert left.exists()
    with running({"models": [fake_model()]}, tmp_path, TMPDIR=str(scratch)) as server:
        server.wait_until_ready()
        assert not left.exists()
