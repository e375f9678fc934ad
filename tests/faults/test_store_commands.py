"""`logsteer-server store`: verify and gc, beside servers that go on writing."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from logsteer_server.__main__ import main
from logsteer_server.stores.layer_vectors import LayerVectors
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.store import ADAPTERS, OVERRIDES, VECTORS, Kind, Store
from logsteer_server.stores.vectors import VectorStore
from tests.buckets import open_bucket
from tests.conftest import fake_model
from tests.server.store_cases import ABOUT, make_content, put_content, read_state

MIB = 2**20
Run = Callable[..., tuple[int, str]]


def open_store(root: Path, kind: Kind[Any] = OVERRIDES, prefix: str = "") -> Store[Any]:
    return Store(kind, Objects(root), MIB, prefix)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with two overrides of one content, a key's adapter, and a vector."""
    root = tmp_path / "root"
    for name in "ab":
        put_content(open_store(root), name, make_content(1))
    put_content(open_store(root, ADAPTERS, "keys/ann/"), "c", make_content(2))
    vectors = LayerVectors({1: np.arange(1, 4)})
    VectorStore(open_store(root, VECTORS)).put("happy", vectors, ABOUT)
    return root


@pytest.fixture
def run(root: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command on the directory; give its status and all that it printed."""

    def call(command: str, *arguments: Any) -> tuple[int, str]:
        capsys.readouterr()
        given = [str(argument) for argument in arguments or ("--directory", root)]
        status = main(["store", command, *given])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return call


def test_sound_stores_are_found_sound(run: Run) -> None:
    status, printed = run("verify")
    assert status == 0
    size = len(make_content(1))
    assert f"overrides: 2 names, {size} bytes, 0 problems" in printed
    assert "keys/ann/adapters: 1 names" in printed
    assert "vectors: 1 names" in printed
    assert run("gc") == (0, "")


def test_damage_is_named(run: Run, root: Path) -> None:
    place = open_store(root).look_up("a")[1].path
    place.write_bytes(place.read_bytes()[:-1] + b"!")
    (root / "vectors" / "names" / "happy.json").write_text("{")
    status, printed = run("verify")
    assert status == 1
    for line in ("content of override 'a' is damaged", "'b' is damaged", "happy: its card is dam"):
        assert line in printed


def test_gc_removes_what_is_old_and_has_no_name(run: Run, root: Path) -> None:
    contents = root / "overrides" / "contents"
    old, mine = contents / f"{'0' * 64}-7.safetensors", contents / "mine.safetensors"
    left = root / "uploads" / "x.part"
    for path in (old, mine, left):
        path.write_bytes(b"left over")
    os.utime(left, (0, 0))
    before = read_state(open_store(root))
    status, printed = run("gc")
    assert (status, f"removed overrides/contents/{old.name}" in printed) == (0, True)
    assert [path.exists() for path in (old, mine, left)] == [False, True, False]
    assert read_state(open_store(root)) == before


def test_commands_run_beside_a_server_that_writes(run: Run, root: Path) -> None:
    ended = threading.Event()

    def write() -> None:
        store = open_store(root)
        for number in range(1000):
            if ended.is_set():
                return
            put_content(store, f"n{number % 3}", make_content(number % 5))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            assert run("verify")[0] == 0
            assert run("gc") == (0, "")
    finally:
        ended.set()
        writer.join()


def test_a_bucket_is_looked_after_by_its_servers_file(run: Run, tmp_path: Path) -> None:
    with open_bucket() as bucket:
        config = tmp_path / "models.yaml"
        fields = {"models": [fake_model()], "store_directory": "own", **bucket.settings}
        config.write_text(yaml.safe_dump(fields))
        status, printed = run("verify", "--config", config)
        assert (status, "vectors: 0 names" in printed) == (0, True), printed
        bucket.stop()
        status, printed = run("gc", "--config", config)
        assert (status, "does not answer" in printed) == (1, True)


def test_arguments_that_do_not_fit(
    run: Run, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "verify"]) == 2
    assert "--config or --directory" in capsys.readouterr().err
    assert run("verify", "--config", tmp_path / "none.yaml")[0] == 2
    (root / "overrides" / "lock").write_text("")
    status, printed = run("gc")
    assert (status, "written by an earlier version" in printed) == (2, True)
