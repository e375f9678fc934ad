"""The store on a directory and on a bucket: one table of cases for both.

And contents as whole files: of a directory; and of a bucket, fetched, held and bounded.
"""

import asyncio
import concurrent.futures
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logsteer.errors import (
    APIError,
    ConflictError,
    NotFoundError,
    OverloadedError,
    PayloadTooLargeError,
)
from logsteer_server.contract.batches import ScoreJobs
from logsteer_server.contract.jobs import Job, ScoreJob
from logsteer_server.contract.plan import Adapter, Direction, Override
from logsteer_server.settings import (
    ConfigurationError,
    ModelSettings,
    Settings,
    parse_settings,
)
from logsteer_server.stores import objects as objects_module
from logsteer_server.stores import store as store_module
from logsteer_server.stores.contents import ContentFiles, DamagedContentError, JobContents
from logsteer_server.stores.objects import Objects, check_store_directory
from logsteer_server.stores.store import KINDS, OVERRIDES, Kind, Store, StoredContent, StoreListing
from logsteer_server.stores.threads import StoreThreads
from logsteer_server.stores.upkeep import read_disk, sweep
from tests.buckets import Bucket, open_bucket
from tests.conftest import ROOT
from tests.refusals import refused
from tests.server.store_cases import make_content, put_content, read_content, read_state

MIB = 2**20
SIZE = len(make_content(1))
GRACE_S = 3600.0
Open = Callable[..., Store[Any]]


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with open_bucket() as bucket:
        yield bucket


@pytest.fixture(params=["directory", "bucket"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Where the stores are."""
    fields: dict[str, Any] = {"store_directory": tmp_path / "store"}
    if request.param == "bucket":
        own = request.getfixturevalue("bucket").settings
        fields |= own | {"store_url": f"{own['store_url']}/{tmp_path.name}"}
    return Settings(models=[ModelSettings(id="a", path="p")], **fields)


@pytest.fixture
def open_store(settings: Settings) -> Open:
    """Opens a store there, as one more server does."""

    def open_store(kind: Kind[Any] = OVERRIDES, max_bytes: int = MIB, **options: Any) -> Store[Any]:
        return Store(kind, Objects.open(settings), max_bytes, **options)

    return open_store


@pytest.fixture
def store(open_store: Open) -> Store[Any]:
    return open_store()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Has time be what is said, in graces."""
    monkeypatch.setattr(store_module.time, "time", lambda: 1000 * GRACE_S)
    return lambda graces: monkeypatch.setattr(
        store_module.time, "time", lambda: (1000 + graces) * GRACE_S
    )


def list_places(store: Store[Any]) -> list[str]:
    return [e.place for e in store.objects.list("") if not e.place.startswith("uploads/")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_what_is_put_comes_back_on_another_server(open_store: Open, kind: Kind[Any]) -> None:
    store = open_store(kind)
    assert store.list_all() == StoreListing([], [], 0)
    card = put_content(store, "step.1", make_content(1))
    again = open_store(kind)
    found = again.look_up("step.1")[1]
    assert (found.name, found.sha256) == ("step.1", card.sha256)
    assert read_content(again, "step.1") == make_content(1)
    by_content = again.look_up_content(card.sha256)[1]
    assert (by_content.name, by_content.source) == (None, found.source)
    assert Path(found.source).is_absolute() == store.objects.is_local
    assert again.look_up("step.1")[0] == card
    assert again.list_all() == StoreListing([card], [], SIZE)
    assert not open_store(kind, prefix="keys/ann/").list_all().cards


def test_an_unknown_name_lists_those_that_are_there(store: Store[Any]) -> None:
    for call in (store.look_up, store.delete):
        with pytest.raises(NotFoundError, match="none is there yet; PUT"):
            call("a")
    for name in ("c", "b"):
        put_content(store, name, make_content(1))
    for call in (store.look_up, store.delete):
        with refused(store.kind.unknown, r"'a'; these are there: b, c\."):
            call("a")
    for number in range(20):
        put_content(store, f"n{number}", make_content(1))
    with pytest.raises(NotFoundError, match=r"b, c, n0, .*, n6, n7, and more"):
        store.look_up("a")[1]


def test_cards_are_listed_by_name(store: Store[Any]) -> None:
    names = ["a.b", "a", "a-b", "B", "0"]
    for name in names:
        put_content(store, name, make_content(1))
    assert [card.name for card in store.list_all().cards] == sorted(names)
    assert store.list_all().num_bytes == SIZE


def test_servers_see_what_others_changed(store: Store[Any], open_store: Open) -> None:
    other = open_store()
    put_content(store, "a", make_content(1))
    put_content(other, "c", make_content(2))
    put_content(store, "a", make_content(2))
    assert other.look_up("a")[1].sha256 == store.look_up("c")[1].sha256
    other.delete("c")
    assert read_content(store, "a") == make_content(2)
    assert other.list_all() == store.list_all()
    assert read_state(other) == {"a": make_content(2)}
    with pytest.raises(NotFoundError):
        store.look_up_content(hashlib.sha256(make_content(1)).hexdigest())


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_last_of_many_writers_has_the_name_whole(open_store: Open, overwrite: bool) -> None:
    stores = [open_store() for _ in range(4)]

    def put(seed: int) -> str:
        try:
            card = put_content(
                stores[seed % 4], "a", make_content(seed), f"r{seed}", overwrite=overwrite
            )
        except ConflictError:
            return "refused"
        assert card.sha256 == hashlib.sha256(make_content(seed)).hexdigest()
        return "stored"

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(put, range(12)))
    assert outcomes.count("stored") == (12 if overwrite else 1)
    (content,) = read_state(open_store()).values()
    assert content in [make_content(seed) for seed in range(12)]


def test_an_equal_request_gets_the_first_answer_and_another_is_refused(
    store: Store[Any], open_store: Open
) -> None:
    first = put_content(store, "a", make_content(1), "one", overwrite=False)
    places = list_places(store)
    other = open_store()
    assert other.find_repeat("a", "one") == first
    assert put_content(other, "a", make_content(1), "one", overwrite=False) == first
    with pytest.raises(ConflictError, match=f"stored at now with the SHA-256 {first.sha256}"):
        other.find_repeat("a", "two")
    with pytest.raises(ConflictError, match="overwrite=true") as caught:
        put_content(other, "a", make_content(2), "two", overwrite=False)
    assert (caught.value.status, caught.value.retryable) == (409, False)
    assert list_places(store) == places
    assert other.find_repeat("a", "two", overwrite=True) is None
    put_content(other, "a", make_content(2), "two")
    assert store.find_repeat("a", "two") == store.look_up("a")[0]
    assert store.find_repeat("b", "one") is None


def test_a_full_store_takes_what_replaces_and_nothing_more(open_store: Open) -> None:
    store = open_store(max_bytes=2 * SIZE)
    for name, seed in (("b", 2), ("b", 3), ("c", 3), ("a", 1)):
        put_content(store, name, make_content(seed))
    for name in ("d", "b"):  # c has b's content, so that replacing b frees nothing
        with pytest.raises(PayloadTooLargeError, match=f"{3 * SIZE} .* max_key_bytes"):
            put_content(store, name, make_content(4))
    put_content(store, "a", make_content(4))
    assert list(read_state(store)) == ["a", "b", "c"]
    # What was replaced lies there still, until it is swept.
    with refused("overloaded", "when they are swept"):
        put_content(store, "a", make_content(5))


def test_names_are_bounded(store: Store[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_NAMES", 2)
    for name in ("a", "b", "b"):
        put_content(store, name, make_content(1))
    with pytest.raises(PayloadTooLargeError, match="There are 2"):
        put_content(store, "c", make_content(1))
    assert len(store.list_all().cards) == 2


def test_an_upload_is_refused_once_it_has_no_room(open_store: Open) -> None:
    store = open_store(max_bytes=4 * SIZE)
    put_content(store, "a", make_content(1))
    with refused("payload_too_large"):
        store.receive("b", 3 * SIZE + 1)
    store.receive("a", 4 * SIZE).discard()  # in the place of what a has now
    upload = store.receive("b")  # of a size not said
    upload.write(bytes(3 * SIZE))
    with refused("payload_too_large"):
        upload.write(bytes(1))
    assert upload.path.stat().st_size == 3 * SIZE
    upload.discard()
    assert list(store.objects.uploads.iterdir()) == []


def test_what_is_old_and_has_no_name_is_swept(
    store: Store[Any], settings: Settings, clock: Callable[[float], None]
) -> None:
    put_content(store, "a", make_content(1))
    put_content(store, "b", make_content(2))
    put_content(store, "a", make_content(3))
    clock(1.9)
    assert sweep(store.objects, GRACE_S) == []
    clock(2.0)
    (gone,) = sweep(store.objects, GRACE_S)
    assert hashlib.sha256(make_content(1)).hexdigest() in gone
    assert read_state(store) == {"a": make_content(3), "b": make_content(2)}
    assert read_disk(store.objects).held["overrides"]["shared"] == 2 * SIZE
    put_content(store, "c", make_content(4))
    assert store.delete("b") and store.delete("c")  # b's goes at once, c's is new
    assert read_disk(store.objects).held["overrides"]["shared"] == 2 * SIZE


def test_a_content_that_is_swept_is_never_one_that_gets_a_name(
    store: Store[Any], clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes are put again while another server sweeps the old ones."""
    put_content(store, "a", make_content(1))
    store.objects.remove("overrides/names/a.json")
    clock(2.5)
    remove = store.objects.remove

    def put_first(place: str) -> None:
        monkeypatch.setattr(store.objects, "remove", remove)
        put_content(store, "b", make_content(1))
        remove(place)

    monkeypatch.setattr(store.objects, "remove", put_first)
    assert len(store.sweep()) == 1
    assert read_state(store) == {"b": make_content(1)}


def test_a_damaged_name_concerns_nobody_else(
    store: Store[Any], open_store: Open, clock: Callable[[float], None]
) -> None:
    for number, name in enumerate("abcd"):
        put_content(store, name, make_content(number))
    places = {name: f"overrides/names/{name}.json" for name in "abcd"}
    half = store.objects.read(places["a"])[:40]
    for name, data in (("a", half), ("b", b""), ("c", store.objects.read(places["d"]))):
        store.objects.write(data, places[name], create=False)
    put_content(store, "e", make_content(5))
    put_content(store, "e", make_content(6))
    clock(3)
    for used in (store, open_store()):
        assert used.list_all().damaged == ["a", "b", "c"]
        assert [card.name for card in used.list_all().cards] == ["d", "e"]
        assert used.sweep() == []  # it may be the content of a damaged one
        with pytest.raises(APIError, match=r"card of .*'a' is damaged: PUT the") as caught:
            used.look_up("a")[1]
        assert caught.value.code == "internal"
        assert str(store.objects.root) not in str(caught.value)
    assert store.delete("a") is None
    put_content(store, "b", make_content(7), "r", overwrite=False)
    store.delete("c")
    assert list(read_state(store)) == ["b", "d", "e"]


@pytest.mark.parametrize("damage", ["gone", "short", "turned"])
def test_a_damaged_content_is_told_and_replaced(
    store: Store[Any], open_store: Open, damage: str
) -> None:
    for name in "ab":
        put_content(store, name, make_content(1), "r")
    (place,) = (p for p in list_places(store) if "contents" in p)
    if damage == "gone":
        store.objects.remove(place)
    else:
        data = bytearray(make_content(1))
        data[-5] ^= 4
        data = data[:9] if damage == "short" else data
        store.objects.write(bytes(data), place, create=False)
    again = open_store()
    assert again.list_all().damaged == ([] if damage == "turned" else ["a", "b"])
    with pytest.raises(APIError, match=r"content of .*'a' is damaged: PUT") as caught:
        read_content(again, "a")
    assert str(again.objects.root) not in str(caught.value)
    put_content(again, "a", make_content(1), "r")
    assert read_state(again) == {"a": make_content(1), "b": make_content(1)}


def test_large_contents_go_in_parts(store: Store[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "PIECE", 150)
    put_content(store, "a", make_content(1))
    put_content(store, "b", make_content(1), "r", overwrite=False)
    assert read_state(store) == dict.fromkeys("ab", make_content(1))


def test_a_bucket_that_does_not_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(objects_module, "REST_S", 0.0)
    with open_bucket() as bucket:
        settings = Settings(
            models=[ModelSettings(id="a", path="p")], store_directory=tmp_path, **bucket.settings
        )
        store = Store(OVERRIDES, Objects.open(settings), MIB)
        put_content(store, "a", make_content(1))
        bucket.stop()
        for call in (store.list_all, lambda: store.look_up("a")[1], lambda: store.delete("a")):
            with refused("overloaded", "does not answer", retryable=True):
                call()
        assert store.objects.trouble
        bucket.start()
        assert read_state(store) == {"a": make_content(1)}
        assert store.objects.trouble is None
        assert "answers again" in caplog.text
        missing = settings.model_copy(update={"store_url": "s3://none/x"})
        with pytest.raises(APIError) as caught:
            put_content(Store(OVERRIDES, Objects.open(missing), MIB), "a", make_content(1))
        assert caught.value.code in ("internal", "overloaded")


def test_a_url_that_cannot_be_used_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    for url, options in (("s4://x", {}), ("s3://x", {"nonsense": "1"})):
        with pytest.raises(ConfigurationError, match=f"store_url, store_options: {url}"):
            Objects(tmp_path, url, options)


def settings_of(tmp_path: Path, **fields: Any) -> Settings:
    return parse_settings({"models": [{"id": "a", "path": "p"}], **fields}, tmp_path)


def test_where_the_stores_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    of_home = tmp_path / "home/.local/share/logsteer"
    assert settings_of(tmp_path).store_path == of_home
    monkeypatch.setenv("XDG_DATA_HOME", "not/absolute")
    assert settings_of(tmp_path).store_path == of_home
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert settings_of(tmp_path).store_path == tmp_path / "data/logsteer"
    named = settings_of(tmp_path, store_directory=Path("here"))
    assert named.store_path == tmp_path / "here"


def test_checking_the_settings_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    check_store_directory(settings_of(tmp_path))
    check_store_directory(settings_of(tmp_path, store_directory=Path("none/here")))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "text").write_text("this is text")
    for name in ("text", "text/below"):
        with pytest.raises(ConfigurationError, match=r"store_directory: \S*text is not a dir"):
            check_store_directory(settings_of(tmp_path, store_directory=Path(name)))


# ------------------------------------------------------------------ contents as files


CONTENT_BYTES = 1000


def open_objects(bucket: Bucket, directory: Path) -> Objects:
    return Objects(directory, bucket.settings["store_url"], bucket.settings["store_options"])


def open_in(bucket: Bucket, directory: Path, max_bytes: int = 3 * CONTENT_BYTES) -> ContentFiles:
    return ContentFiles(open_objects(bucket, directory), max_bytes)


def add(objects: Objects, seed: int) -> tuple[str, str]:
    """Put a content; return its SHA-256 and source."""
    data = bytes([seed]) * CONTENT_BYTES
    sha256 = hashlib.sha256(data).hexdigest()
    place = f"overrides/contents/{sha256}-7.safetensors"
    objects.write(data, place, create=False)
    return sha256, objects.locate(place)


@pytest.fixture
def own_bucket() -> Iterator[Bucket]:
    with open_bucket() as bucket:
        yield bucket


def list_kept(files: ContentFiles) -> set[str]:
    return set(files._fetched)


def count_users(files: ContentFiles) -> list[int]:
    return [file.users for file in files._fetched.values()]


def test_a_content_is_fetched_once(own_bucket: Bucket, tmp_path: Path) -> None:
    files = open_in(own_bucket, tmp_path)
    own = add(files._objects, 1)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        (path,) = set(pool.map(lambda _: files.hold(*own), range(8)))
    assert path.read_bytes() == bytes([1]) * CONTENT_BYTES
    assert path.stat().st_mode & 0o077 == 0
    assert list(files._objects.uploads.iterdir()) == [path]
    assert count_users(files) == [8]
    for _ in range(8):
        files.release(own[0])
    assert count_users(files) == [0]
    files._objects.remove_left_overs(0.0)
    assert path.exists()
    own_bucket.stop()
    with files.open(OVERRIDES, StoredContent(None, *own)):
        pass
    files.close()
    assert list(files._objects.uploads.iterdir()) == []


def test_the_one_unused_for_longest_goes_and_what_is_in_use_stays(
    own_bucket: Bucket, tmp_path: Path
) -> None:
    files = open_in(own_bucket, tmp_path)
    added = [add(files._objects, seed) for seed in range(4)]
    for own in (*added[:3], added[0]):
        with files.open(OVERRIDES, StoredContent(None, *own)):
            pass
    with files.open(OVERRIDES, StoredContent(None, *added[3])):
        assert list_kept(files) == {added[n][0] for n in (0, 2, 3)}
    held = [files.hold(*own) for own in added[:3]]
    with pytest.raises(OverloadedError, match="store_cache_bytes"):
        files.hold(*added[3])
    assert all(path.exists() for path in held)
    files.release(added[1][0])
    with files.open(OVERRIDES, StoredContent(None, *added[3])):
        assert list_kept(files) == {added[n][0] for n in (0, 2, 3)}
    with pytest.raises(PayloadTooLargeError, match="raise store_cache_bytes"):
        open_in(own_bucket, tmp_path / "small", CONTENT_BYTES - 1).hold(*added[0])


HOLDER = """
import sys, time
from pathlib import Path
from tests.buckets import Bucket
from tests.server.test_store import open_in
files = open_in(Bucket(int(sys.argv[2]), sys.argv[3]), Path(sys.argv[1]), 1000)
files.hold(sys.argv[4], sys.argv[5])
print("held", flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_had_fetched_is_removed(own_bucket: Bucket, tmp_path: Path) -> None:
    objects = open_objects(own_bucket, tmp_path)
    own = add(objects, 1)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), str(own_bucket.port), own_bucket.name, *own],
        stdout=subprocess.PIPE, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == b"held\n"
        objects.remove_left_overs(0.0)
        assert len(list(objects.uploads.iterdir())) == 1
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    objects.remove_left_overs(0.0)
    assert not list(objects.uploads.iterdir())


@pytest.mark.parametrize("is_local", [True, False])
def test_what_is_damaged_is_refused(own_bucket: Bucket, tmp_path: Path, is_local: bool) -> None:
    objects = Objects(tmp_path) if is_local else open_objects(own_bucket, tmp_path)
    files = ContentFiles(objects, 3 * CONTENT_BYTES)
    sha256, source = add(objects, 1)
    place = f"overrides/contents/{sha256}-7.safetensors"
    with files.open(OVERRIDES, StoredContent(None, sha256, source)) as path:
        assert path.read_bytes() == bytes([1]) * CONTENT_BYTES
    objects.write(bytes([1]) * (CONTENT_BYTES - 1) + b"x", place, create=False)
    files.close()
    for _ in range(2):
        with pytest.raises(DamagedContentError):
            files.hold(sha256, source)
    objects.write(bytes([1]) * CONTENT_BYTES, place, create=False)
    with files.open(OVERRIDES, StoredContent(None, sha256, source)) as path:
        assert path.read_bytes() == bytes([1]) * CONTENT_BYTES
    objects.remove(place)
    fresh = ContentFiles(
        Objects(tmp_path) if is_local else open_objects(own_bucket, tmp_path / "b"), CONTENT_BYTES
    )
    with pytest.raises(FileNotFoundError):
        fresh.hold(sha256, source)


JOB = ScoreJob(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32))


def change(job: Any, adapter: tuple[str, str], direction: tuple[str, str]) -> Any:
    override = Override(Direction(direction[1], direction[0]), 0.5)
    return replace(job, adapter=Adapter(adapter[1], adapter[0]), override=override)


@pytest.mark.parametrize("batched", [False, True])
async def test_jobs_get_files_of_this_machine(
    own_bucket: Bucket, tmp_path: Path, batched: bool
) -> None:
    files = open_in(own_bucket, tmp_path)
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
    contents = JobContents(ContentFiles(objects, CONTENT_BYTES), StoreThreads())
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
    own_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_in(own_bucket, tmp_path)
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
