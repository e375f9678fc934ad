"""Contents that were fetched: checked, held while they are in use, bounded, shared by processes."""

import asyncio
import concurrent.futures
import functools
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logsteer.errors import APIError, NotFoundError, OverloadedError, PayloadTooLargeError
from logsteer_server.contract.batches import ScoreJobs
from logsteer_server.contract.jobs import Job, ScoreJob
from logsteer_server.contract.parameters import Adapter, Direction, Override
from logsteer_server.stores import bucket as bucket_module
from logsteer_server.stores import fetched as fetched_module
from logsteer_server.stores.bucket import Bucket
from logsteer_server.stores.fetched import DamagedContentError, FetchedContents
from logsteer_server.stores.job_contents import JobContents, MachineContents
from logsteer_server.stores.upkeep import digest_file
from tests.conftest import ROOT
from tests.server.shared_store.bucket_cases import shared_at
from tests.server.shared_store.object_store import ObjectStore

SIZE = 1000


def add(seed: int) -> tuple[str, str]:
    """Put a content behind the URL; return its SHA-256 and place."""
    data = bytes([seed]) * SIZE
    sha256 = hashlib.sha256(data).hexdigest()
    place = f"overrides/contents/{sha256}/x.safetensors"
    ObjectStore.files = {**ObjectStore.files, f"bucket/logsteer/{place}": data}
    return sha256, place


def open_in(directory: Path, max_bytes: int = 3 * SIZE) -> FetchedContents:
    return FetchedContents(Bucket(shared_at(directory)), directory, max_bytes)


def list_kept(contents: FetchedContents) -> set[str]:
    return {path.stem for path in contents.directory.glob("*.safetensors")}


def count_gets() -> int:
    return sum(call == "get" for call, _ in ObjectStore.faults.calls)


def test_a_content_is_fetched_once_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "PIECE", 300)
    contents, (sha256, place) = open_in(tmp_path), add(1)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: contents.hold(sha256, place), range(8)))
    assert count_gets() == 4
    (path,) = paths
    assert path.read_bytes() == bytes([1]) * SIZE
    assert path.stat().st_mode & 0o077 == 0
    assert sorted(own.name for own in contents.directory.iterdir()) == [
        f"{sha256}.safetensors",
        "lock",
    ]
    for _ in range(8):
        contents.release(sha256)
    with open_in(tmp_path).open(sha256, place):  # another process of the machine
        assert count_gets() == 4


def test_the_one_unused_for_longest_goes(tmp_path: Path) -> None:
    contents = open_in(tmp_path)
    added = [add(seed) for seed in range(4)]
    for sha256, place in (*added[:3], added[0]):
        with contents.open(sha256, place):
            pass
    with contents.open(*added[3]):
        assert list_kept(contents) == {added[n][0] for n in (0, 2, 3)}


def test_what_is_in_use_stays_and_what_never_fits_is_told(tmp_path: Path) -> None:
    contents, other = open_in(tmp_path), open_in(tmp_path)
    added = [add(seed) for seed in range(4)]
    held = [contents.hold(*own) for own in added[:2]] + [other.hold(*added[2])]
    for asked in (contents, other):
        with pytest.raises(OverloadedError, match="store_cache_bytes"):
            asked.hold(*added[3])
    assert all(path.exists() for path in held)
    contents.release(added[1][0])
    with other.open(*added[3]):
        assert list_kept(contents) == {added[n][0] for n in (0, 2, 3)}
    with pytest.raises(PayloadTooLargeError, match="raise store_cache_bytes"):
        open_in(tmp_path / "small", SIZE - 1).hold(*added[0])


HOLDER = """
import sys, time
from pathlib import Path
from tests.server.shared_store.object_store import ObjectStore
from tests.server.shared_store.test_fetched import add, open_in
contents = open_in(Path(sys.argv[1]))
contents.hold(*add(1))
print("held", flush=True)
time.sleep(60)
"""


def test_a_process_holds_what_it_uses_until_it_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        contents = open_in(tmp_path, SIZE)
        (contents.directory / "tmpx.part").write_bytes(b"half of a fetch that was killed")
        with pytest.raises(OverloadedError):
            contents.hold(*add(2))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with contents.open(*add(2)):
        assert list_kept(contents) == {add(2)[0]}
    assert not list(contents.directory.glob("*.part"))


def test_what_rots_on_this_machine_is_fetched_again(tmp_path: Path) -> None:
    sha256, place = add(1)
    with open_in(tmp_path).open(sha256, place) as path:
        path.write_bytes(b"x" * SIZE)
    with open_in(tmp_path).open(sha256, place) as path:
        assert path.read_bytes() == bytes([1]) * SIZE


def test_what_another_process_has_fetched_again_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found the damage; the other one is the quicker to mend it, and uses the file."""
    sha256, place = add(1)
    with open_in(tmp_path).open(sha256, place) as path:
        path.write_bytes(b"x" * SIZE)
    other = open_in(tmp_path)
    monkeypatch.setattr(
        fetched_module, "digest_file", digest := Digest(lambda: other.hold(*add(1)))
    )
    contents = open_in(tmp_path)
    contents.hold(sha256, place)
    assert digest.seen[0] != sha256, "the damage was found"
    assert path.stat().st_ino == os.fstat(other._held[sha256].handle).st_ino
    for own in (contents, other):
        own.release(sha256)


class Digest:
    """Digests files; something happens once the first one is read."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.seen: list[str] = []
        self._then = then

    def __call__(self, path: Path) -> str:
        self.seen.append(found := digest_file(path))
        if len(self.seen) == 1:
            self._then()
        return found


def test_what_cannot_be_fetched_leaves_nothing(tmp_path: Path) -> None:
    contents, (sha256, place) = open_in(tmp_path), add(1)
    ObjectStore.faults.turns = 9
    with pytest.raises(DamagedContentError):
        contents.hold(sha256, place)
    assert ObjectStore.faults.turns == 9 - fetched_module.FETCHES
    ObjectStore.faults.turns, ObjectStore.faults.away = 0, True
    with pytest.raises(OverloadedError):
        contents.hold(sha256, place)
    ObjectStore.faults.away = False
    with pytest.raises(FileNotFoundError):
        contents.hold("0" * 64, f"overrides/contents/{'0' * 64}/x.safetensors")
    assert [path.name for path in contents.directory.iterdir()] == ["lock"]
    with contents.open(sha256, place) as path:
        assert path.exists()


def test_threads_that_hold_and_make_room_get_whole_files(tmp_path: Path) -> None:
    machines = [open_in(tmp_path, 6 * SIZE) for _ in range(2)]
    added = [add(seed) for seed in range(12)]

    def use(number: int) -> None:
        sha256, place = added[number * 7 % 12]
        with machines[number % 2].open(sha256, place) as path:
            assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(200)))
    assert sum(own.stat().st_size for own in machines[0].directory.iterdir()) <= 6 * SIZE


# ------------------------------------------------------------------ jobs


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        asyncio.run(test(*arguments, **options))

    return run


async def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


JOB = ScoreJob(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32))


def change(job: Any, adapter: tuple[str, str] | None, direction: tuple[str, str] | None) -> Any:
    given = adapter and Adapter(adapter[1], adapter[0])
    override = direction and Override(Direction(direction[1], direction[0]), 0.5)
    return replace(job, adapter=given, override=override)


def machines(directory: Path, count: int = 1) -> tuple[JobContents, list[FetchedContents]]:
    """What jobs get of an engine on so many machines, and what each of those keeps."""
    keepers = [MachineContents(shared_at(directory / str(number))) for number in range(count)]
    return JobContents(*keepers), [own._fetched for own in keepers]


@pytest.mark.parametrize("batched", [False, True])
@in_a_loop
async def test_jobs_get_files_of_this_machine(tmp_path: Path, batched: bool) -> None:
    contents, (kept,) = machines(tmp_path)
    adapter, direction = add(1), add(2)
    jobs: Any = [change(JOB, adapter, direction)] * 2
    async with contents.open(ScoreJobs.of(jobs) if batched else jobs) as own:
        for job in own:
            for stored, expected in ((job.adapter, adapter), (job.override.direction, direction)):
                assert stored.sha256 == expected[0]
                assert hashlib.sha256(Path(stored.path).read_bytes()).hexdigest() == expected[0]
            assert job.override.eta == 0.5
            assert job.fingerprint == jobs[0].fingerprint
        assert len(kept._held) == 2
    assert not kept._held


@in_a_loop
async def test_an_engine_on_several_machines_has_a_path_on_each(tmp_path: Path) -> None:
    contents, kept = machines(tmp_path, 3)
    sha256, place = add(1)
    async with contents.open([change(JOB, (sha256, place), None)]) as (job,):
        assert job.adapter is not None
        paths = [Path(path) for path in job.adapter.paths]
        assert [path.parent for path in paths] == [own.directory for own in kept]
        for path in paths:
            assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
        assert [len(own._held) for own in kept] == [1, 1, 1]
    assert count_gets() == 3
    assert [len(own._held) for own in kept] == [0, 0, 0]


@in_a_loop
async def test_a_machine_that_cannot_have_it_leaves_nothing_held_on_the_others(
    tmp_path: Path,
) -> None:
    contents, kept = machines(tmp_path, 3)
    kept[1]._max_bytes, slow = 1, threading.Event()

    def wait(call: str, path: str) -> None:
        if call == "get":
            slow.wait(30)

    ObjectStore.faults.before = wait
    with pytest.raises(PayloadTooLargeError, match="store_cache_bytes"):
        async with contents.open([change(JOB, add(1), None)]):
            pass
    slow.set()
    await until(lambda: all(list_kept(own) and not own._held for own in (kept[0], kept[2])))
    assert [len(own._held) for own in kept] == [0, 0, 0]
    assert [bool(list_kept(own)) for own in kept] == [True, False, True]


@in_a_loop
async def test_jobs_without_contents_are_passed_on_as_they_are(tmp_path: Path) -> None:
    contents, _ = machines(tmp_path)
    jobs: list[Job] = [JOB, change(JOB, ("a" * 64, "/on/this/machine"), None)]
    async with contents.open(jobs) as own:
        assert own is jobs
    assert ObjectStore.faults.calls == []


@in_a_loop
async def test_what_was_deleted_or_damaged_meanwhile_is_told(tmp_path: Path) -> None:
    contents, (kept,) = machines(tmp_path)
    gone = "0" * 64, f"adapters/contents/{'0' * 64}/x.safetensors"
    with pytest.raises(NotFoundError, match="adapter was deleted") as caught:
        async with contents.open([change(JOB, gone, None)]):
            pass
    assert caught.value.code == "unknown_adapter"
    ObjectStore.faults.turns = 9
    with pytest.raises(APIError, match="override and upload it again") as damaged:
        async with contents.open([change(JOB, None, add(1))]):
            pass
    assert damaged.value.code == "internal"
    assert not kept._held


@in_a_loop
async def test_nothing_blocks_the_loop_and_who_leaves_holds_nothing(tmp_path: Path) -> None:
    (contents, (kept,)), fetches = machines(tmp_path), threading.Event()

    def wait(call: str, path: str) -> None:
        if call == "get":
            fetches.wait(30)

    ObjectStore.faults.before = wait
    own = add(1)

    async def use() -> None:
        async with contents.open([change(JOB, own, None)]):
            pytest.fail("it was cancelled before")

    task = asyncio.create_task(use())
    turns = 0
    while not count_gets() or turns < 20:
        turns += 1
        await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    fetches.set()
    await until(lambda: list_kept(kept) and not kept._held)
    assert list_kept(kept) == {own[0]}
