"""`logsteer-server store`: verify, gc, backup and restore, beside servers that go on writing."""

import hashlib
import io
import json
import stat
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logsteer_server.stores.directory_store import DirectoryStore

from logsteer_server.__main__ import main
from logsteer_server.stores.layer_vectors import LayerVectors
from logsteer_server.stores.store import ADAPTERS, OVERRIDES, VECTORS
from logsteer_server.stores.vectors import VectorStore
from tests.server.store_cases import ABOUT, list_files, make_content, put_content

MIB = 2**20
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with two overrides of one content, an adapter, and a vector."""
    root = tmp_path / "root"
    overrides = DirectoryStore(OVERRIDES, root, MIB)
    put_content(overrides, "a", make_content(1))
    put_content(overrides, "b", make_content(1))
    put_content(DirectoryStore(ADAPTERS, root, MIB), "c", make_content(2))
    vectors = LayerVectors({1: np.arange(1, 4)})
    VectorStore(DirectoryStore(VECTORS, root, MIB)).put("happy", vectors, ABOUT)
    return root


@pytest.fixture
def run(root: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command on the directory; give its status and all that it printed."""

    def call(command: str, *arguments: Any, directory: Path = root) -> tuple[int, str]:
        capsys.readouterr()
        given = [str(argument) for argument in arguments]
        status = main(["store", command, "--directory", str(directory), *given])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return call


def read_files(root: Path) -> dict[str, bytes]:
    files = {p.relative_to(root): p for p in root.rglob("*") if p.is_file() and p.name != "lock"}
    return {str(name): path.read_bytes() for name, path in files.items()}


def test_sound_stores_are_found_sound(run: Run) -> None:
    status, printed = run("verify")
    assert status == 0
    assert "overrides: 2 names, 1 contents" in printed
    assert "vectors: 1 names" in printed
    assert printed.count("0 problems") == 3


def turn_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a turned bit": (lambda card, content: turn_a_bit(content), "not what its SHA-256 says"),
    "a short content": (lambda card, content: content.write_bytes(b"x"), "has 1 bytes"),
    "no content": (lambda card, content: content.unlink(), "is gone"),
    "no card": (lambda card, content: card.unlink(), "no card points to it"),
    "a short card": (lambda card, content: card.write_bytes(card.read_bytes()[:9]), "card is dam"),
    "another's card": (
        lambda card, content: card.write_text(card.read_text().replace('"happy"', '"sad"')),
        "card is dam",
    ),
    "a card that lies": (
        lambda card, content: card.write_text(card.read_text().replace('"width":3', '"width":4')),
        "another vector",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_found(run: Run, root: Path, damage: str) -> None:
    card, content = root / "vectors/names/happy.json", *(root / "vectors/contents").iterdir()
    break_it, reason = DAMAGES[damage]
    break_it(card, content)
    status, printed = run("verify")
    assert status == 1
    assert reason in printed


def test_waste_goes_and_what_may_be_needed_stays(run: Run, root: Path) -> None:
    before = read_files(root)
    orphan = root / "overrides/contents" / f"{'0' * 64}.safetensors"
    left_over = root / "adapters/uploads/x.part"
    for path in (orphan, left_over):
        path.write_bytes(b"waste")
    status, printed = run("gc")
    assert (status, printed.count("removed")) == (0, 2)
    assert read_files(root) == before

    (root / "overrides/names/b.json").write_text("{")
    orphan.write_bytes(b"perhaps that of b")
    status, printed = run("gc")
    assert (status, printed.count("kept")) == (0, 1)
    assert orphan.exists()
    status, printed = run("gc", "--damaged")
    assert (status, printed.count("removed")) == (0, 2)
    assert read_files(root) == {n: d for n, d in before.items() if n != "overrides/names/b.json"}
    assert run("verify")[0] == 0


def test_a_backup_is_restored(run: Run, root: Path, tmp_path: Path) -> None:
    before = read_files(root)
    tar = tmp_path / "all.tar"
    assert run("backup", tar)[0] == 0
    assert stat.S_IMODE(tar.stat().st_mode) == 0o600
    status, printed = run("backup", tar)
    assert status == 1
    assert "--force" in printed
    assert run("backup", tar, "--force")[0] == 0

    empty = tmp_path / "empty"
    status, printed = run("restore", tar, directory=empty)
    assert (status, printed.count("restored")) == (0, 4)
    assert read_files(empty) == before
    assert run("verify", directory=empty)[0] == 0
    status, printed = run("restore", tar, directory=empty)
    assert (status, printed) == (0, ""), "all is there already"

    overrides = DirectoryStore(OVERRIDES, root, MIB)
    put_content(overrides, "a", make_content(5))
    overrides.delete("b")
    put_content(overrides, "later", make_content(6))
    changed = read_files(root)
    status, printed = run("restore", tar)
    assert status == 1
    assert "overrides/a; nothing was changed. --force" in printed
    assert read_files(root) == changed
    status, printed = run("restore", tar, "--force")
    assert (status, printed.count("restored")) == (0, 2)
    names = [card.name for card in DirectoryStore(OVERRIDES, root, MIB).list_all().cards]
    assert names == ["a", "b", "later"]
    assert {n: d for n, d in read_files(root).items() if n in before} == before


def test_a_backup_is_one_moment_of_a_store_at_work(run: Run, root: Path, tmp_path: Path) -> None:
    """Contents come and go while they are copied, and no name of the copy is without its own."""
    stop = threading.Event()

    def write() -> None:
        store, number = DirectoryStore(OVERRIDES, root, 64 * MIB), 0
        while not stop.is_set():
            number += 1
            for name in ("x", "y"):  # always the same content as the other's, or the one before
                put_content(store, name, make_content(number, 50_000))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for attempt in range(5):
            tar = tmp_path / f"{attempt}.tar"
            assert run("backup", tar)[0] == 0
            copy = tmp_path / f"copy{attempt}"
            assert run("restore", tar, directory=copy)[0] == 0
            assert run("verify", directory=copy)[0] == 0
            assert run("verify")[0] == 0
    finally:
        stop.set()
        writer.join()


def rewrite(tar: Path, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> None:
    with tarfile.open(tar) as old:
        members = [(m.name, old.extractfile(m).read()) for m in old.getmembers()]  # type: ignore[union-attr]
    pairs = [pair for member in members[:-1] if (pair := change(*member)) is not None]
    end = json.dumps({"version": 1, "files": len(pairs)}).encode()
    with tarfile.open(tar, "w") as new:
        for name, data in [*pairs, (members[-1][0], end)]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            new.addfile(info, io.BytesIO(data))


EVIL: dict[str, Callable[[str, bytes], tuple[str, bytes] | None]] = {
    "climbs out": lambda name, data: (f"../{name}", data),
    "absolute": lambda name, data: (f"/{name}", data),
    "of no kind": lambda name, data: (name.replace("vectors", "shells"), data),
    "a turned bit": lambda name, data: (name, data[:-1] + bytes([data[-1] ^ 1])),
    "no contents": lambda name, data: None if "contents" in name else (name, data),
    "renamed": lambda name, data: (name.replace("happy", "sad"), data),
}


@pytest.mark.parametrize("case", EVIL)
def test_a_backup_that_is_not_whole_restores_nothing(run: Run, tmp_path: Path, case: str) -> None:
    tar, target = tmp_path / "all.tar", tmp_path / "target"
    assert run("backup", tar)[0] == 0
    rewrite(tar, EVIL[case])
    status, printed = run("restore", tar, "--force", directory=target)
    assert status == 1
    assert printed.startswith("error: ")
    assert not list(target.rglob("*.json"))


def test_a_backup_that_was_cut_restores_nothing(run: Run, tmp_path: Path) -> None:
    tar, target = tmp_path / "all.tar", tmp_path / "target"
    assert run("backup", tar)[0] == 0
    whole = tar.read_bytes()
    with tarfile.open(tar) as opened:
        last = opened.getmembers()[-1]
    for size in range(0, last.offset_data + last.size, 256):  # between two files, too
        tar.write_bytes(whole[:size])
        assert run("restore", tar, directory=target)[0] == 1
        assert not list(target.rglob("*.json"))


def test_damage_stops_a_backup_and_leaves_no_half(run: Run, root: Path, tmp_path: Path) -> None:
    (content,) = (root / "vectors/contents").iterdir()
    turn_a_bit(content)
    status, printed = run("backup", tmp_path / "all.tar")
    assert status == 1
    assert "is damaged" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]


def test_the_configuration_says_where_and_how_much(
    run: Run, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("backup", tmp_path / "all.tar")[0] == 0
    config = tmp_path / "models.yaml"
    config.write_text("models:\n  - {id: a, path: here}\nstore_directory: root\n")
    assert main(["store", "verify", "--config", str(config)]) == 0
    assert "overrides: 2 names" in capsys.readouterr().out
    size = 1024
    config.write_text(
        "models:\n  - {id: a, path: here}\nstore_directory: other\n"
        f"override_store_bytes: {size}\n"
    )
    sha256 = hashlib.sha256(make_content(1)).hexdigest()
    assert list_files(DirectoryStore(OVERRIDES, root, MIB))[0] == f"contents/{sha256}.safetensors"
    big = DirectoryStore(OVERRIDES, root, MIB)
    put_content(big, "big", make_content(9, 1000))
    assert run("backup", tmp_path / "big.tar")[0] == 0
    assert main(["store", "restore", "--config", str(config), str(tmp_path / "big.tar")]) == 1
    assert f"at most {size} are kept" in capsys.readouterr().err
    assert main(["store", "verify"]) == 2


# ------------------------------------------------------------------ stores behind a URL


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The configuration of a server whose stores are behind a URL."""
    config = tmp_path / "models.yaml"
    url = f"file://{tmp_path}/shared"
    document = {"models": [{"id": "a", "path": "p"}], "store_url": url, "store_directory": "own"}
    config.write_text(json.dumps(document | {"store_grace_s": 1}))
    return config


def ask(config: Path, command: str, *arguments: Any) -> int:
    return main(["store", command, "--config", str(config), *map(str, arguments)])


def test_a_directory_moves_behind_a_url_and_back(
    run: Run, root: Path, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("backup", tmp_path / "one.tar")[0] == 0
    assert ask(shared, "restore", tmp_path / "one.tar") == 0
    assert ask(shared, "restore", tmp_path / "one.tar") == 0  # changes nothing
    capsys.readouterr()
    assert ask(shared, "verify") == 0
    printed = capsys.readouterr().out
    assert "/overrides: 2 names, 2 contents" in printed
    assert printed.count("0 problems") == 3
    assert ask(shared, "backup", tmp_path / "two.tar") == 0
    again = tmp_path / "again"
    assert run("restore", tmp_path / "two.tar", directory=again)[0] == 0
    assert read_files(again) == read_files(root)


def test_damage_and_waste_behind_a_url_are_found(
    run: Run, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("backup", tmp_path / "one.tar")
    ask(shared, "restore", tmp_path / "one.tar")
    (content,) = (tmp_path / "shared/vectors/contents").rglob("*.safetensors")
    waste = content.with_name("0" * 28 + ".safetensors")
    waste.write_bytes(b"of a server that was killed")
    draft = content.with_name(".abc.1.part")
    draft.write_bytes(b"half of it")
    capsys.readouterr()
    assert ask(shared, "verify") == 0
    assert "1 contents have no name now" in capsys.readouterr().out
    assert ask(shared, "gc") == 0
    assert capsys.readouterr().out.count("removed") == 2
    assert not waste.exists()
    assert not draft.exists()
    turn_a_bit(content)
    assert ask(shared, "verify") == 1
    assert "name happy: its content is not what its SHA-256 says" in capsys.readouterr().out
    assert not (tmp_path / "own/fetched").exists()
    assert ask(shared, "backup", tmp_path / "two.tar") == 1
    assert "is damaged: PUT its name again" in capsys.readouterr().err
    assert not (tmp_path / "two.tar").exists()
    (card,) = (tmp_path / "shared/vectors/names/happy").iterdir()
    card.write_text("{")
    assert ask(shared, "verify") == 1
    assert "name happy: its card is damaged" in capsys.readouterr().out


def test_a_url_that_cannot_be_used_is_said(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared.write_text(shared.read_text().replace("file://", "s3://bucket"))
    assert ask(shared, "verify") == 1
    assert "install s3fs" in capsys.readouterr().err.lower()
