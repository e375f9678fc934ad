"""A store behind a URL that does not answer, refuses, or gives other bytes than it took."""

import time
from pathlib import Path
from typing import Any

import pytest

from logsteer.errors import APIError, NotFoundError, OverloadedError
from logsteer_server.stores import bucket as bucket_module
from logsteer_server.stores.bucket_index import collect_bucket
from tests.server.shared_store.bucket_cases import (
    find_card,
    open_at,
    read_state,
    shared_at,
)
from tests.server.shared_store.object_store import ObjectStore
from tests.server.store_cases import make_content, put_content

SIZE = len(make_content(1))


# ------------------------------------------------------------------ a store that does not answer


def test_a_call_that_fails_is_tried_again(pair: tuple[Any, Any]) -> None:
    store, other = pair
    for failing in (1, 2):
        ObjectStore.faults.failing = failing
        put_content(store, "a", make_content(failing))
        ObjectStore.faults.failing = failing
        assert other.read(other.find("a")) == make_content(failing)
    assert store._files.bucket.trouble is None


def test_a_store_that_is_away_is_said_and_what_is_known_works(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    store, _ = pair
    put_content(store, "a", make_content(1))
    put_content(store, "b", make_content(2))
    found = store.find("a")
    store.read(found)
    ObjectStore.faults.away = True
    assert store.read(store.find("a")) == make_content(1)
    with pytest.raises(OverloadedError, match="does not answer") as caught:
        store.read(store.find("b"))  # the name is known, its content is not here
    assert caught.value.retry_after is not None
    assert "ConnectionError" in store._files.bucket.trouble
    fresh = open_at(shared_at(tmp_path / "c"))
    for ask in (
        lambda: fresh.find("a"), fresh.list_all, lambda: fresh.delete("a"),
        lambda: put_content(store, "c", make_content(3)),
    ):  # fmt: skip
        with pytest.raises(OverloadedError):
            ask()
    ObjectStore.faults.away = False
    assert fresh.read(fresh.find("b")) == make_content(2)
    assert fresh._files.bucket.trouble is None


def test_how_old_a_name_may_be(tmp_path: Path) -> None:
    writer = open_at(shared_at(tmp_path / "w"))
    strict = open_at(shared_at(tmp_path / "s", store_stale_s=0.0))
    easy = open_at(shared_at(tmp_path / "e", store_fresh_s=60.0))
    put_content(writer, "a", make_content(1))
    before = [store.find("a").sha256 for store in (writer, strict, easy)]
    assert len(set(before)) == 1
    card = put_content(writer, "a", make_content(2))
    assert strict.find("a").sha256 == card.sha256
    assert easy.find("a").sha256 == before[0]  # and says so
    own = put_content(easy, "a", make_content(3))
    assert easy.find("a").sha256 == strict.find("a").sha256 == own.sha256
    ObjectStore.faults.away = True
    with pytest.raises(OverloadedError):
        strict.find("a")


def test_a_name_that_is_known_too_long_finds_its_new_content(tmp_path: Path) -> None:
    writer = open_at(shared_at(tmp_path / "w"))
    easy = open_at(shared_at(tmp_path / "e", store_fresh_s=60.0))
    put_content(writer, "a", make_content(1))
    found = easy.find("a")
    put_content(writer, "a", make_content(2))  # the first is gone, and was never fetched
    with pytest.raises(FileNotFoundError):
        easy.read(found)
    assert easy.read(easy.find("a")) == make_content(2)


def test_a_store_that_hangs_is_given_up_in_time(tmp_path: Path) -> None:
    store = open_at(shared_at(tmp_path, store_timeout_s=0.1, store_retries=1))
    ObjectStore.faults.hanging_s = 60.0
    began = time.monotonic()
    with pytest.raises(OverloadedError):
        store.find("a")
    assert time.monotonic() - began < 30
    assert "no answer within 0.1 s" in store._files.bucket.trouble


def test_after_a_failure_nobody_waits_in_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "REST_S", 600.0)
    store = open_at(shared_at(tmp_path))
    ObjectStore.faults.away = True
    with pytest.raises(OverloadedError):
        store.find("a")
    made = len(ObjectStore.faults.calls)
    with pytest.raises(OverloadedError):
        store.find("a")
    assert len(ObjectStore.faults.calls) == made
    monkeypatch.setattr(bucket_module, "REST_S", 0.01)
    rested = open_at(shared_at(tmp_path))
    with pytest.raises(OverloadedError):
        rested.find("a")
    ObjectStore.faults.away = False
    time.sleep(0.02)
    with pytest.raises(NotFoundError):
        rested.find("a")


def test_a_refusal_is_no_outage(tmp_path: Path) -> None:
    store = open_at(shared_at(tmp_path))

    def refuse(call: str, path: str) -> None:
        raise PermissionError("AccessDenied")

    ObjectStore.faults.before = refuse
    with pytest.raises(APIError, match="refuses this server") as caught:
        store.find("a")
    assert caught.value.code == "internal"
    assert len(ObjectStore.faults.calls) == 1


def test_a_bucket_that_is_not_there_takes_nothing(tmp_path: Path) -> None:
    """S3 says of it what it says of a file that is not there."""
    store = open_at(shared_at(tmp_path))

    def lack(call: str, path: str) -> None:
        raise FileNotFoundError("The specified bucket does not exist")

    ObjectStore.faults.before = lack
    with pytest.raises(APIError, match="refuses this server") as caught:
        put_content(store, "a", make_content(1))
    assert caught.value.code == "internal"


# ------------------------------------------------------------------ damage


def test_a_damaged_pointer_concerns_its_own_name(pair: tuple[Any, Any]) -> None:
    store, other = pair
    put_content(store, "a", make_content(1))
    put_content(store, "b", make_content(2))
    ObjectStore.files[find_card("a")] = b'{"content": "con'
    with pytest.raises(APIError, match=r"card of override 'a' is damaged: PUT") as caught:
        other.find("a")
    assert caught.value.code == "internal"
    assert other.list_all().damaged == ["a"]
    assert other.read(other.find("b")) == make_content(2)
    put_content(other, "a", make_content(3))
    assert read_state(store) == {"a": make_content(3), "b": make_content(2)}


def test_damaged_pointers_go_on_request_and_nothing_that_was_put_since(
    pair: tuple[Any, Any],
) -> None:
    store, other = pair
    for name in "ab":
        put_content(store, name, make_content(1))
        ObjectStore.files[find_card(name)] = b'{"content": "con'
    has_read = is_put = False

    def put_amid(call: str, path: str) -> None:
        nonlocal has_read, is_put
        has_read |= call == "get"
        if call == "list" and has_read and not is_put:  # upkeep has found them to be damaged
            is_put = True
            put_content(other, "b", make_content(2))

    ObjectStore.faults.before = put_amid
    collect_bucket(store._files.bucket, 60, damaged=True)
    assert is_put
    assert read_state(store) == {"b": make_content(2)}
    assert not [own for own in ObjectStore.files if "/names/a/" in own]


def test_a_content_that_is_gone_is_told(pair: tuple[Any, Any]) -> None:
    store, other = pair
    put_content(store, "a", make_content(1))
    ObjectStore.files = {n: own for n, own in ObjectStore.files.items() if "/contents/" not in n}
    with pytest.raises(APIError, match="content of override 'a' is damaged"):
        other.read(other.find("a"))
    assert other.list_all().damaged == ["a"]


@pytest.mark.parametrize(("turns", "is_read"), [(1, True), (9, False)])
def test_a_turned_bit_is_fetched_again_and_then_told(
    pair: tuple[Any, Any], turns: int, is_read: bool
) -> None:
    store, other = pair
    put_content(store, "a", make_content(1))
    ObjectStore.faults.turns = turns
    if is_read:
        assert other.read(other.find("a")) == make_content(1)
        return
    with pytest.raises(APIError, match="content of override 'a' is damaged: PUT") as caught:
        other.read(other.find("a"))
    assert caught.value.code == "internal"
    assert list(other._files.fetched.directory.glob("*.safetensors")) == []
