"""The vector store: what is put in comes back, whatever happens to the server or the file."""

import asyncio
import itertools
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from logsteer.errors import APIError, NotFoundError, PayloadTooLargeError
from logsteer.schemas import VectorAbout
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings
from logsteer_server.stores.layer_vectors import LayerVectors, parse_content
from logsteer_server.stores.vectors import VectorStore, check_vector_file

ABOUT = VectorAbout(source="upload", format="safetensors")
MIB = 2**20


def make(seed: int, width: int = 8, layers: tuple[int, ...] = (2, 10)) -> LayerVectors:
    random = np.random.default_rng(seed)
    return LayerVectors({layer: random.standard_normal(width) for layer in layers})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "vectors.sqlite"


def test_what_is_put_comes_back_after_a_restart(path: Path) -> None:
    store = VectorStore(path, MIB)
    card = store.put("happy", make(1), ABOUT)
    store.close()
    store = VectorStore(path, MIB)
    found = store.find("happy")
    assert (found.name, found.sha256, found.vectors) == ("happy", make(1).sha256, make(1))
    assert store.read(card.sha256).vectors == make(1)
    assert store.read(card.sha256).name is None
    assert store.describe("happy") == card
    assert store.list_all() == ([card], card.bytes)
    assert card.layers == [2, 10]
    assert card.norms["2"] == pytest.approx(np.linalg.norm(make(1).layers[2]))
    store.close()


def test_the_content_address_is_pinned() -> None:
    """These bytes are an address that clients keep; a new safetensors must not move it."""
    vectors = LayerVectors({10: np.array([1.0, -0.0]), 2: np.array([0.5, 2.0])})
    assert vectors.sha256 == "923dab9d6485730d36e5c72fa59d0e9cc3bd7e314cbb9662624f286d003efb00"
    assert parse_content(vectors.content) == vectors


def test_the_address_depends_on_hook_and_numbers_alone() -> None:
    one = make(1)
    assert one == LayerVectors({10: one.layers[10], 2: one.layers[2].astype(np.float64)})
    assert one.sha256 != LayerVectors(one.layers, "attn_out").sha256
    assert one.sha256 != LayerVectors({2: one.layers[2]}).sha256
    zero = LayerVectors({0: np.array([0.0, 1.0])})
    assert zero.sha256 == LayerVectors({0: np.array([-0.0, 1.0])}).sha256


def test_vectors_are_copies_that_nobody_changes() -> None:
    numbers = np.ones(4, dtype=np.float32)
    vectors = LayerVectors({1: numbers})
    numbers[0] = 5
    assert vectors.layers[1][0] == 1
    with pytest.raises(ValueError, match="read-only"):
        vectors.layers[1][0] = 2
    with pytest.raises(TypeError):
        vectors.layers[2] = numbers  # type: ignore[index]


@pytest.mark.parametrize(
    ("layers", "hook", "reason"),
    [
        ({}, "resid_post", "no layers"),
        ({0: np.ones(3), 1: np.ones(4)}, "resid_post", "layer 0 has 3 numbers and layer 1 has 4"),
        ({0: np.array([1.0, np.nan])}, "resid_post", "layer 0 has 1 numbers that are NaN"),
        ({0: np.array([1.0, 1e39])}, "resid_post", "beyond float32; the first is number 1"),
        ({0: np.array([np.inf])}, "resid_post", "infinite"),
        ({0: np.zeros(3), 1: np.zeros(3)}, "resid_post", "every number is 0"),
        ({-1: np.ones(3)}, "resid_post", "layer -1 is outside"),
        ({4096: np.ones(3)}, "resid_post", "layer 4096 is outside"),
        ({0: np.ones((2, 3))}, "resid_post", r"shape \[2, 3\]"),
        ({0: np.ones(0)}, "resid_post", "0 numbers"),
        ({0: np.ones(2**20 + 1)}, "resid_post", "1048577 numbers"),
        ({0: np.ones(3)}, "../up", "no name of an activation"),
    ],
)
def test_vectors_that_cannot_be_used_are_refused(layers: object, hook: str, reason: str) -> None:
    with pytest.raises(APIError, match=reason) as caught:
        LayerVectors(layers, hook)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_vector"


def test_a_content_stays_as_long_as_a_name_points_to_it(path: Path) -> None:
    store = VectorStore(path, MIB)
    first = store.put("a", make(1), ABOUT)
    store.put("b", make(1), ABOUT)
    assert store.list_all()[1] == first.bytes  # kept once
    assert store.delete("a") == first.sha256
    assert store.read(first.sha256).vectors == make(1)
    store.put("b", make(2), ABOUT)
    with pytest.raises(NotFoundError, match=first.sha256):
        store.read(first.sha256)
    store.delete("b")
    assert store.list_all() == ([], 0)
    store.close()


def test_an_unknown_name_lists_those_that_are_there(path: Path) -> None:
    store = VectorStore(path, MIB)
    with pytest.raises(NotFoundError, match="none is there yet"):
        store.find("happy")
    for name in ("b", "a"):
        store.put(name, make(1), ABOUT)
    for use in (store.find, store.describe, store.delete):
        with pytest.raises(NotFoundError, match=r"'happy'; these are there: a, b\.") as caught:
            use("happy")
        assert caught.value.code == "unknown_vector"
    store.close()


def test_the_store_is_bounded_and_what_does_not_fit_changes_nothing(path: Path) -> None:
    room = len(make(1, width=64).content)
    store = VectorStore(path, room)
    store.put("a", make(1, width=64), ABOUT)
    with pytest.raises(PayloadTooLargeError, match="vector_store_bytes"):
        store.put("b", make(2, width=64), ABOUT)
    with pytest.raises(PayloadTooLargeError):
        store.put("a", make(3, width=128), ABOUT)
    assert store.find("a").vectors == make(1, width=64)
    store.put("a", make(2, width=64), ABOUT)  # takes the place of the old content
    assert [card.name for card in store.list_all()[0]] == ["a"]
    store.close()


def test_many_threads_and_two_servers_share_a_file(path: Path) -> None:
    stores = [VectorStore(path, MIB), VectorStore(path, MIB)]

    async def use() -> None:
        async def one(index: int) -> None:
            mine, other = stores[index % 2], stores[1 - index % 2]
            await asyncio.to_thread(mine.put, f"v{index}", make(index), ABOUT)
            found = await asyncio.to_thread(other.find, f"v{index}")
            assert found.vectors == make(index)

        await asyncio.gather(*(one(index) for index in range(24)))

    asyncio.run(use())
    assert stores[0].list_all() == stores[1].list_all()
    assert len(stores[0].list_all()[0]) == 24
    stores[1].delete("v3")
    with pytest.raises(NotFoundError):  # whatever this one had cached
        stores[0].read(make(3).sha256)
    for store in stores:
        store.close()


def list_changes(start: int) -> Iterator[tuple[str, int | None]]:
    """Endless changes: a name and the seed of its vectors, None where it is deleted."""
    for count in itertools.count():
        yield f"v{count % 5}", start + count
        if count % 7 == 6:
            yield f"v{count % 5}", None


def make_large(seed: int) -> LayerVectors:
    return make(seed, width=4096, layers=tuple(range(8)))


WRITER = """
import sys
from pathlib import Path
from tests.server.test_vector_store import ABOUT, MIB, list_changes, make_large
from logsteer_server.stores.vectors import VectorStore

store = VectorStore(Path(sys.argv[1]), 64 * MIB)
for name, seed in list_changes(int(sys.argv[2])):
    if seed is None:
        store.delete(name)
    else:
        store.put(name, make_large(seed), ABOUT)
    print("done", flush=True)
"""


def test_a_server_killed_at_any_moment_has_all_that_it_reported(path: Path) -> None:
    state: dict[str, int] = {}
    changes_seen = 0
    for attempt in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(1000 * attempt)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert writer.stdout is not None
        reported = writer.stdout.readline()  # it is at work now
        time.sleep(0.05 + 0.03 * attempt)
        writer.kill()
        reported += writer.stdout.read()
        writer.wait()
        writer.stdout.close()
        count = reported.count("done\n")
        changes_seen += count
        # The change that was at work may be there or not, but not in part.
        changes = list(itertools.islice(list_changes(1000 * attempt), count + 1))
        states = [apply_changes(state, changes[:count]), apply_changes(state, changes)]
        store = VectorStore(path, 64 * MIB)  # checks the file's integrity
        found = {card.name: store.find(card.name).vectors for card in store.list_all()[0]}
        (state, *_) = [s for s in states if {n: make_large(v) for n, v in s.items()} == found]
        assert store.list_all()[1] == sum(len(vectors.content) for vectors in found.values())
        store.close()
    assert changes_seen > 16


def apply_changes(
    state: dict[str, int], changes: Sequence[tuple[str, int | None]]
) -> dict[str, int]:
    after: dict[str, int | None] = {**state, **dict(changes)}
    return {name: seed for name, seed in after.items() if seed is not None}


def test_a_damaged_file_is_refused_and_left_as_it_is(path: Path) -> None:
    store = VectorStore(path, MIB)
    for index in range(8):
        store.put(f"v{index}", make(index, width=1024), ABOUT)
    store.close()
    whole = path.read_bytes()
    for broken in (
        b"not a database at all, but long enough to look like some file" * 99,
        whole[:100] + os.urandom(len(whole) - 100),
        whole[: len(whole) // 2],
    ):
        path.write_bytes(broken)
        with pytest.raises(ConfigurationError, match=r"vectors\.sqlite cannot hold vectors"):
            VectorStore(path, MIB)
        assert path.read_bytes() == broken


def test_a_turned_bit_is_noticed(path: Path) -> None:
    store = VectorStore(path, MIB)
    vectors = make(1, width=1024)
    store.put("a", vectors, ABOUT)
    store.close()
    whole = bytearray(path.read_bytes())
    whole[whole.index(vectors.layers[10].tobytes()[:64]) + 5] ^= 4
    path.write_bytes(whole)
    store = VectorStore(path, MIB)
    with pytest.raises(APIError, match="is damaged") as caught:
        store.find("a")
    assert caught.value.code == "internal"
    store.close()


def test_another_programs_database_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    with pytest.raises(ConfigurationError, match="another program"):
        VectorStore(path, MIB)


def test_a_full_disk_is_told_and_nothing_is_lost(path: Path) -> None:
    store = VectorStore(path, MIB)
    store.put("a", make(1), ABOUT)
    store._db.execute("PRAGMA max_page_count = 1")  # at least what there is
    with pytest.raises(APIError, match="full") as caught:
        store.put("b", make(2, width=8192), ABOUT)
    assert caught.value.code == "internal"
    assert store.find("a").vectors == make(1)
    store.close()


def settings_of(tmp_path: Path, **fields: object) -> Settings:
    return Settings(models=[ModelSettings(id="a", path="p")], directory=tmp_path, **fields)  # type: ignore[arg-type]


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    of_home = tmp_path / "home/.local/share/logsteer/vectors.sqlite"
    assert settings_of(tmp_path).vector_path == of_home
    monkeypatch.setenv("XDG_DATA_HOME", "not/absolute")
    assert settings_of(tmp_path).vector_path == of_home
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert settings_of(tmp_path).vector_path == tmp_path / "data/logsteer/vectors.sqlite"
    named = settings_of(tmp_path, vector_file=Path("here.sqlite"))
    assert named.vector_path == tmp_path / "here.sqlite"


def test_checking_the_settings_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    check_vector_file(settings_of(tmp_path))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigurationError, match="not a directory"):
        check_vector_file(settings_of(tmp_path, vector_file=Path("none/here.sqlite")))
    VectorStore.open(settings_of(tmp_path)).close()
    assert (tmp_path / "data/logsteer/vectors.sqlite").exists()
    (tmp_path / "text").write_text("this is text, not a database" * 99)
    with pytest.raises(ConfigurationError, match="cannot hold vectors"):
        check_vector_file(settings_of(tmp_path, vector_file=Path("text")))
