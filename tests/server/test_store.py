"""The store: what is put in is there, whatever happens to the server, the disk or a file."""

import concurrent.futures
import hashlib
import json
import logging
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from logsteer.errors import APIError, NotFoundError, PayloadTooLargeError
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings
from logsteer_server.stores import directory_store
from logsteer_server.stores import store as store_module
from logsteer_server.stores.directory_store import DirectoryStore, check_store_directory
from logsteer_server.stores.store import KINDS, OVERRIDES, Kind, StoreListing
from tests.server.store_cases import list_files, make_content, put_content

MIB = 2**20
ROOT = Path(__file__).parents[2]
SIZE = len(make_content(1))


@pytest.fixture(params=KINDS, ids=lambda kind: kind.noun)
def kind(request: pytest.FixtureRequest) -> Kind[Any]:
    found: Kind[Any] = request.param
    return found


@pytest.fixture
def store(kind: Kind[Any], tmp_path: Path) -> DirectoryStore[Any]:
    return DirectoryStore(kind, tmp_path, MIB)


def open_again(store: DirectoryStore[Any]) -> DirectoryStore[Any]:
    """Another server's store on the same directory."""
    return DirectoryStore(store.kind, store.directory.parent, store.max_bytes)


def test_what_is_put_comes_back_after_a_restart(store: DirectoryStore[Any], tmp_path: Path) -> None:
    assert not list(tmp_path.iterdir())
    assert store.list_all() == StoreListing([], [], 0)
    card = put_content(store, "step.1", make_content(1))
    assert card.sha256 == hashlib.sha256(make_content(1)).hexdigest()
    again = open_again(store)
    assert again.directory == tmp_path / f"{store.kind.noun}s"
    found = again.find("step.1")
    assert (found.name, found.sha256) == ("step.1", card.sha256)
    assert found.path.is_absolute()
    assert found.path.read_bytes() == make_content(1)
    assert again.find_content(card.sha256).path == found.path
    assert again.find_content(card.sha256).name is None
    assert again.describe("step.1") == card
    assert again.list_all() == StoreListing([card], [], SIZE)


def test_a_relative_directory_gives_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = DirectoryStore(OVERRIDES, Path("here"), MIB)
    put_content(store, "a", make_content(1))
    assert store.find("a").path.is_relative_to(tmp_path / "here")


def test_a_content_goes_with_its_last_name(store: DirectoryStore[Any]) -> None:
    first, second = (put_content(store, name, make_content(1)) for name in "ab")
    assert first.sha256 == second.sha256
    assert len(list_files(store)) == 3
    assert store.list_all().num_bytes == SIZE
    other = put_content(store, "a", make_content(2))
    assert store.find("b").sha256 == first.sha256
    assert store.delete("b") == first.sha256
    assert list_files(store) == [f"contents/{other.sha256}.safetensors", "names/a.json"]
    with pytest.raises(NotFoundError, match=first.sha256) as caught:
        store.find_content(first.sha256)
    assert caught.value.code == store.kind.unknown
    third = put_content(store, "a", make_content(3))
    assert list_files(store) == [f"contents/{third.sha256}.safetensors", "names/a.json"]
    assert put_content(store, "a", make_content(3)).sha256 == third.sha256
    assert store.find("a").path.read_bytes() == make_content(3)
    store.delete("a")
    assert list_files(store) == []


def test_an_unknown_name_lists_those_that_are_there(store: DirectoryStore[Any]) -> None:
    for call in (store.find, store.describe, store.delete):
        with pytest.raises(NotFoundError, match="none is there yet; PUT"):
            call("a")
    for name in ("c", "b"):
        put_content(store, name, make_content(1))
    for call in (store.find, store.describe, store.delete):
        with pytest.raises(NotFoundError, match=r"'a'; these are there: b, c\.") as caught:
            call("a")
        assert caught.value.code == store.kind.unknown
    for number in range(20):
        put_content(store, f"n{number}", make_content(1))
    with pytest.raises(NotFoundError, match=r"b, c, n0, .*, n6, n7, and more"):
        store.find("a")


def test_cards_are_listed_by_name(store: DirectoryStore[Any]) -> None:
    names = ["a.b", "a", "a-b", "B", "0"]
    for name in names:
        put_content(store, name, make_content(1))
    assert [card.name for card in store.list_all().cards] == sorted(names)


def test_a_full_store_takes_what_replaces_and_nothing_more(kind: Kind[Any], tmp_path: Path) -> None:
    store = DirectoryStore(kind, tmp_path, 2 * SIZE)
    put_content(store, "b", make_content(2))
    put_content(store, "b", make_content(3))
    put_content(store, "c", make_content(3))
    put_content(store, "a", make_content(1))
    before = list_files(store)
    for name in ("d", "b"):  # c has b's content, so that replacing b frees nothing
        with pytest.raises(PayloadTooLargeError, match=f"{3 * SIZE} .* {kind.noun}_store_bytes"):
            put_content(store, name, make_content(4))
    assert list_files(store) == before
    put_content(store, "a", make_content(4))
    assert [card.name for card in store.list_all().cards] == ["a", "b", "c"]


def test_names_are_bounded(store: DirectoryStore[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_NAMES", 2)
    for name in ("a", "b", "b"):
        put_content(store, name, make_content(1))
    with pytest.raises(PayloadTooLargeError, match="There are 2"):
        put_content(store, "c", make_content(1))
    assert len(store.list_all().cards) == 2
    monkeypatch.setattr(store_module, "MAX_NAMES", 1)
    put_content(store, "b", make_content(2))


def test_a_damaged_card_concerns_nobody_else(
    store: DirectoryStore[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for number, name in enumerate("abc"):
        put_content(store, name, make_content(number))
    (store.directory / "names" / "a.json").write_text("{")
    for used in (store, open_again(store)):
        for call in (used.describe, used.find):
            with pytest.raises(APIError, match=r"card of .*'a' is damaged: PUT the") as caught:
                call("a")
            assert caught.value.code == "internal"
            assert str(store.directory) not in str(caught.value)
        assert used.find("b").path.exists()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            listing = used.list_all()
        assert [card.name for card in listing.cards] == ["b", "c"]
        assert listing.damaged == ["a"]
        assert "a.json cannot be read" in caplog.text
    assert used.list_all().num_bytes == 2 * SIZE  # nobody knows whose the third is
    used.delete("b")
    assert used.list_all().num_bytes == SIZE
    assert len(list((store.directory / "contents").iterdir())) == 2  # it may be that of a
    put_content(used, "a", make_content(0))  # with that, every content's names are known
    assert [card.name for card in used.list_all().cards] == ["a", "c"]
    assert used.list_all().num_bytes == 2 * SIZE


def test_a_content_that_is_gone_is_told(store: DirectoryStore[Any]) -> None:
    put_content(store, "a", make_content(1))
    store.find("a").path.unlink()
    with pytest.raises(APIError, match=r"content of .* is damaged") as caught:
        store.find("a")
    assert caught.value.code == "internal"
    put_content(store, "a", make_content(1))
    assert store.find("a").path.exists()


def test_contents_without_a_name_go_when_a_store_is_opened(store: DirectoryStore[Any]) -> None:
    card = put_content(store, "a", make_content(1))
    contents = store.directory / "contents"
    (contents / f"{'0' * 64}.safetensors").write_bytes(make_content(2))
    (contents / "mine.safetensors").write_bytes(b"put here by hand")
    again = open_again(store)
    assert again.list_all() == StoreListing([card], [], SIZE)
    assert sorted(path.stem for path in contents.iterdir()) == [card.sha256, "mine"]


def test_uploads_of_killed_servers_go_and_those_at_work_stay(store: DirectoryStore[Any]) -> None:
    upload = store.receive()
    upload.write(make_content(1))
    left_over = store.directory / "uploads" / "x.part"
    left_over.write_bytes(b"half a file")
    open_again(store)
    assert upload.path.exists()
    assert not left_over.exists()
    upload.discard()
    assert list_files(store) == []


def test_servers_see_what_others_changed(store: DirectoryStore[Any]) -> None:
    """What a store remembers of the directory must never cost a content that has a name."""
    other = open_again(store)
    put_content(store, "a", make_content(1))
    put_content(other, "c", make_content(2))  # reads the directory
    put_content(store, "a", make_content(2))
    assert other.find("a").sha256 == store.find("c").sha256
    other.delete("c")  # what a now points to, too
    assert store.find("a").path.read_bytes() == make_content(2)
    assert other.list_all() == store.list_all()
    assert other.list_all().num_bytes == SIZE


def test_threads_of_two_servers_share_a_directory(kind: Kind[Any], tmp_path: Path) -> None:
    # On a slow disk all of them together take longer than a server waits for one change.
    stores = [DirectoryStore(kind, tmp_path, MIB, lock_timeout_s=120) for _ in range(2)]

    def use(number: int) -> None:
        mine, other = stores[number % 2], stores[1 - number % 2]
        put_content(mine, f"n{number}", make_content(number % 7))
        assert other.find(f"n{number}").path.read_bytes() == make_content(number % 7)
        if number % 3 == 0:
            other.delete(f"n{number}")

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(24)))
    assert stores[0].list_all() == stores[1].list_all() == open_again(stores[0]).list_all()
    left = [number for number in range(24) if number % 3]
    assert len(stores[0].list_all().cards) == len(left)
    assert stores[0].list_all().num_bytes == SIZE * len({number % 7 for number in left})


@pytest.mark.parametrize("limit", [SIZE - 10, 40], ids=["content", "card"])
def test_a_full_disk_is_told_and_nothing_changes(store: DirectoryStore[Any], limit: int) -> None:
    content = make_content(2) if limit > 40 else b"short"
    put_content(store, "a", make_content(1))
    before = store.list_all(), list_files(store)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        for name in ("a", "b"):
            with pytest.raises(APIError, match="make room on it") as caught:
                put_content(store, name, content)
            assert caught.value.code == "internal"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (store.list_all(), list_files(store)) == before
    put_content(store, "b", make_content(2))
    assert store.list_all().num_bytes == 2 * SIZE


def test_a_change_that_fails_is_mended_by_the_next(
    store: DirectoryStore[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_content(store, "a", make_content(1))

    def fail(directory: Path) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(directory_store, "sync_directory", fail)  # the content is there, its card not
        with pytest.raises(APIError, match="OSError"):
            put_content(store, "b", make_content(2))
    assert len(list_files(store)) == 3
    assert store.list_all().num_bytes == SIZE
    assert len(list_files(store)) == 2


KILLED = """
import json, os, sys
from pathlib import Path
from logsteer_server.stores.directory_store import DirectoryStore
from logsteer_server.stores.store import OVERRIDES
from tests.server.store_cases import list_files, make_content, put_content

root = Path(sys.argv[1])
calls = os.fsync, os.replace, os.unlink
before, after = ({"a": 1, "b": 2}, {"a": 3, "b": 2}) if sys.argv[2] == "put" else ({"a": 1}, {})
for step in range(100):
    store = DirectoryStore(OVERRIDES, root / str(step), 2**20)
    for name, seed in before.items():
        put_content(store, name, make_content(seed))
    child = os.fork()
    if not child:
        left = step
        def count(call):
            def counted(*arguments, **options):
                global left
                if not left:
                    os._exit(9)
                left -= 1
                return call(*arguments, **options)
            return counted
        os.fsync, os.replace, os.unlink = map(count, calls)
        put_content(store, "a", make_content(3)) if after else store.delete("a")
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    again = DirectoryStore(OVERRIDES, root / str(step), 2**20)
    for used in store, again:  # of a server that has seen it before, and of one that starts
        listing = used.list_all()
        found = {card.name: used.find(card.name).path.read_bytes() for card in listing.cards}
        states = [{n: make_content(s) for n, s in state.items()} for state in (before, after)]
        assert found in states, step
        assert listing.num_bytes == sum(map(len, found.values())), step
        assert not listing.damaged, step
        assert len(list_files(used)) == 2 * len(found), (step, list_files(used))
    print(json.dumps([status, found == states[1]]), flush=True)
    if status == 0:
        break
"""


@pytest.mark.parametrize("change", ["put", "delete"])
def test_a_server_killed_at_any_step_leaves_old_or_new(tmp_path: Path, change: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), change],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert steps[0] == (9, False)
    assert steps[-1] == (0, True)
    assert len(steps) > (6 if change == "put" else 2)
    assert (9, True) in steps
    assert [new for _, new in steps] == sorted(new for _, new in steps)  # never back to the old


WRITER = """
import sys
from pathlib import Path
from logsteer_server.stores.directory_store import DirectoryStore
from logsteer_server.stores.store import OVERRIDES
from tests.server.store_cases import make_content, put_content
store = DirectoryStore(OVERRIDES, Path(sys.argv[1]), 2**30)
for number in range(100_000):
    put_content(store, "a", make_content(number % 2, 20_000))
    if not number:
        print("ready", flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_server_leaves_a_whole_content(tmp_path: Path, seed: int) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    busy = DirectoryStore(OVERRIDES, tmp_path, MIB)
    time.sleep(0.15 + 0.013 * seed)
    process.kill()
    process.wait()
    process.stdout.close()
    store = DirectoryStore(OVERRIDES, tmp_path, MIB)
    found = store.find("a")
    assert hashlib.sha256(found.path.read_bytes()).hexdigest() == found.sha256
    assert len(list_files(store)) == 2
    put_content(store, "a", make_content(9))
    assert busy.find("a") == store.find("a")


def test_a_directory_that_cannot_serve_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = DirectoryStore(OVERRIDES, tmp_path / "file" / "below", MIB)
    with pytest.raises(APIError, match="disk failed") as caught:
        store.receive()
    assert caught.value.code == "internal"
    (tmp_path / "overrides" / "uploads" / "x.part").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="store_directory"):
        DirectoryStore(OVERRIDES, tmp_path, MIB)


def settings_of(tmp_path: Path, **fields: Any) -> Settings:
    return Settings(models=[ModelSettings(id="a", path="p")], directory=tmp_path, **fields)


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
    (tmp_path / "overrides").write_text("")
    with pytest.raises(ConfigurationError, match=r"overrides is not a dir"):
        check_store_directory(settings_of(tmp_path, store_directory=tmp_path))
