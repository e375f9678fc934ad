"""Contents as whole files: of a directory; and of a bucket, fetched, held and bounded."""

import asyncio
import concurrent.futures
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logsteer.errors import OverloadedError, PayloadTooLargeError
from logsteer_server.contract.batches import ScoreJobs
from logsteer_server.contract.jobs import Job, ScoreJob
from logsteer_server.contract.plan import Adapter, Direction, Override
from logsteer_server.stores.contents import ContentFiles, DamagedContentError, JobContents
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.stores.upload import remove_left_overs
from tests.buckets import Bucket, open_bucket
from tests.conftest import ROOT
from tests.refusals import refused

SIZE = 1000


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with open_bucket() as bucket:
        yield bucket


def open_objects(bucket: Bucket, directory: Path) -> Objects:
    return Objects(directory, bucket.settings["store_url"], bucket.settings["store_options"])


def open_in(bucket: Bucket, directory: Path, max_bytes: int = 3 * SIZE) -> ContentFiles:
    return ContentFiles(open_objects(bucket, directory), max_bytes)


def add(objects: Objects, seed: int) -> tuple[str, str]:
    """Put a content; return its SHA-256 and source."""
    data = bytes([seed]) * SIZE
    sha256 = hashlib.sha256(data).hexdigest()
    place = f"overrides/contents/{sha256}-7.safetensors"
    objects.write(data, place, create=False)
    return sha256, objects.locate(place)


def list_kept(files: ContentFiles) -> set[str]:
    return set(files._fetched)


def count_users(files: ContentFiles) -> list[int]:
    return [file.users for file in files._fetched.values()]


def test_a_content_is_fetched_once(bucket: Bucket, tmp_path: Path) -> None:
    files = open_in(bucket, tmp_path)
    own = add(files._objects, 1)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        (path,) = set(pool.map(lambda _: files.hold(*own), range(8)))
    assert path.read_bytes() == bytes([1]) * SIZE
    assert path.stat().st_mode & 0o077 == 0
    assert list(files._objects.uploads.iterdir()) == [path]
    assert count_users(files) == [8]
    for _ in range(8):
        files.release(own[0])
    assert count_users(files) == [0]
    assert remove_left_overs(files._objects.uploads, 0.0) == []
    bucket.stop()
    with files.open(*own):
        pass
    files.close()
    assert list(files._objects.uploads.iterdir()) == []


def test_the_one_unused_for_longest_goes_and_what_is_in_use_stays(
    bucket: Bucket, tmp_path: Path
) -> None:
    files = open_in(bucket, tmp_path)
    added = [add(files._objects, seed) for seed in range(4)]
    for own in (*added[:3], added[0]):
        with files.open(*own):
            pass
    with files.open(*added[3]):
        assert list_kept(files) == {added[n][0] for n in (0, 2, 3)}
    held = [files.hold(*own) for own in added[:3]]
    with pytest.raises(OverloadedError, match="store_cache_bytes"):
        files.hold(*added[3])
    assert all(path.exists() for path in held)
    files.release(added[1][0])
    with files.open(*added[3]):
        assert list_kept(files) == {added[n][0] for n in (0, 2, 3)}
    with pytest.raises(PayloadTooLargeError, match="raise store_cache_bytes"):
        open_in(bucket, tmp_path / "small", SIZE - 1).hold(*added[0])


HOLDER = """
import sys, time
from pathlib import Path
from tests.buckets import Bucket
from tests.server.test_content_files import open_in
files = open_in(Bucket(int(sys.argv[2]), sys.argv[3]), Path(sys.argv[1]), 1000)
files.hold(sys.argv[4], sys.argv[5])
print("held", flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_had_fetched_is_removed(bucket: Bucket, tmp_path: Path) -> None:
    objects = open_objects(bucket, tmp_path)
    own = add(objects, 1)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), str(bucket.port), bucket.name, *own],
        stdout=subprocess.PIPE, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == b"held\n"
        assert remove_left_overs(objects.uploads, 0.0) == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert len(remove_left_overs(objects.uploads, 0.0)) == 1


@pytest.mark.parametrize("is_local", [True, False])
def test_what_is_damaged_is_refused(bucket: Bucket, tmp_path: Path, is_local: bool) -> None:
    objects = Objects(tmp_path) if is_local else open_objects(bucket, tmp_path)
    files = ContentFiles(objects, 3 * SIZE)
    sha256, source = add(objects, 1)
    place = f"overrides/contents/{sha256}-7.safetensors"
    with files.open(sha256, source) as path:
        assert path.read_bytes() == bytes([1]) * SIZE
    objects.write(bytes([1]) * (SIZE - 1) + b"x", place, create=False)
    files.close()
    for _ in range(2):
        with pytest.raises(DamagedContentError):
            files.hold(sha256, source)
    objects.write(bytes([1]) * SIZE, place, create=False)
    with files.open(sha256, source) as path:
        assert path.read_bytes() == bytes([1]) * SIZE
    objects.remove(place)
    fresh = ContentFiles(
        Objects(tmp_path) if is_local else open_objects(bucket, tmp_path / "b"), SIZE
    )
    with pytest.raises(FileNotFoundError):
        fresh.hold(sha256, source)


JOB = ScoreJob(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32))


def change(job: Any, adapter: tuple[str, str], direction: tuple[str, str]) -> Any:
    override = Override(Direction(direction[1], direction[0]), 0.5)
    return replace(job, adapter=Adapter(adapter[1], adapter[0]), override=override)


@pytest.mark.parametrize("batched", [False, True])
async def test_jobs_get_files_of_this_machine(
    bucket: Bucket, tmp_path: Path, batched: bool
) -> None:
    files = open_in(bucket, tmp_path)
    contents = JobContents(files, StoreThreads())
    adapter, direction = add(files._objects, 1), add(files._objects, 2)
    jobs: Any = [change(JOB, adapter, direction)] * 2

    async with contents.open(ScoreJobs.of(jobs) if batched else jobs) as own:
        for job in own:
            for stored, expected in (
                (job.adapter, adapter), (job.override.direction, direction),
            ):  # fmt: skip
                assert stored.sha256 == expected[0]
                data = Path(stored.path).read_bytes()
                assert hashlib.sha256(data).hexdigest() == expected[0]
            assert job.override.eta == 0.5
            assert job.fingerprint == jobs[0].fingerprint
        assert count_users(files) == [1, 1]
    assert count_users(files) == [0, 0]


def test_jobs_of_a_directory_keep_their_paths_and_damage_is_told(tmp_path: Path) -> None:
    objects = Objects(tmp_path)
    contents = JobContents(ContentFiles(objects, SIZE), StoreThreads())
    own, damaged = add(objects, 1), add(objects, 2)
    gone = "0" * 64, objects.locate("adapters/contents/gone")
    Path(damaged[1]).write_bytes(b"x")

    async def use(adapter: tuple[str, str], direction: tuple[str, str]) -> None:
        jobs: list[Job] = [change(JOB, adapter, direction), JOB]
        async with contents.open(jobs) as given:
            assert given is jobs

    asyncio.run(use(own, own))
    with refused("unknown_adapter", "adapter was deleted"):
        asyncio.run(use(gone, own))
    with refused("internal", r"is damaged: PUT the override again"):
        asyncio.run(use(own, damaged))


async def test_who_leaves_while_a_content_is_fetched_holds_nothing(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_in(bucket, tmp_path)
    own = add(files._objects, 1)
    download = files._objects.download

    loop, begun, release = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def wait(*arguments: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(60)
        download(*arguments)

    monkeypatch.setattr(files._objects, "download", wait)

    async def use() -> None:
        async with JobContents(files, StoreThreads()).open([change(JOB, own, own)]):
            pytest.fail("it was cancelled before")

    task = asyncio.create_task(use())
    await asyncio.wait_for(begun.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    async with asyncio.timeout(60):
        while count_users(files) != [0]:
            await asyncio.sleep(0.005)
