"""The store on a directory and on a bucket: one table of cases for both."""

import concurrent.futures
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from logsteer.errors import APIError, ConflictError, NotFoundError, PayloadTooLargeError
from logsteer_server.settings import (
    ConfigurationError,
    ModelSettings,
    Settings,
    parse_settings,
)
from logsteer_server.stores import objects as objects_module
from logsteer_server.stores import store as store_module
from logsteer_server.stores.objects import Objects, check_store_directory
from logsteer_server.stores.store import KINDS, OVERRIDES, Kind, Store, StoreListing
from logsteer_server.stores.upkeep import read_disk, sweep
from tests.buckets import Bucket, open_bucket
from tests.refusals import refused
from tests.server.store_cases import make_content, put_content, read_state

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
    assert again.read(found) == make_content(1)
    by_content = again.find_content(card.sha256)
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
    assert store.read(store.look_up("a")[1]) == make_content(2)
    assert other.list_all() == store.list_all()
    assert read_state(other) == {"a": make_content(2)}
    with pytest.raises(NotFoundError):
        store.find_content(hashlib.sha256(make_content(1)).hexdigest())


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


def test_unfinished_uploads_reserve_their_room(open_store: Open) -> None:
    store = open_store(max_bytes=4 * SIZE)
    put_content(store, "a", make_content(1))
    first = store.receive("b", SIZE)
    second = store.receive("c")  # of a size not said
    second.write(bytes(SIZE))
    assert store.room.reserved == 2 * SIZE
    with refused("overloaded", "running uploads", retryable=True):
        store.receive("d", SIZE + 1)
    with pytest.raises(APIError, match="running uploads"):
        second.write(bytes(SIZE + 1))
    assert second.path.stat().st_size == SIZE
    with refused("payload_too_large"):
        store.receive("d", 3 * SIZE + 1)  # more than there is, whoever else is at work
    second.discard()
    store.receive("d", 2 * SIZE).discard()
    store.receive("a", 3 * SIZE).discard()  # in the place of what a has now
    first.discard()
    put_content(store, "b", make_content(2))
    assert store.room.reserved == 0
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
        again.read(again.look_up("a")[1])
    assert str(again.objects.root) not in str(caught.value)
    put_content(again, "a", make_content(1), "r", overwrite=damage == "turned")
    assert read_state(again) == {"a": make_content(1), "b": make_content(1)}


def test_large_contents_go_in_parts(store: Store[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "MULTIPART_BYTES", 100)
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
    old = tmp_path / "old" / "keys" / "ann" / "vectors"
    old.mkdir(parents=True)
    (old / "lock").write_text("")
    with pytest.raises(ConfigurationError, match="written by an earlier version"):
        check_store_directory(settings_of(tmp_path, store_directory=Path("old")))
