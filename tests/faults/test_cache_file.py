"""The file of the result cache under faults: damage sets it aside, and the server starts."""

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from logsteer_server.__main__ import main
from logsteer_server.models.cachefile import CacheFile
from tests.server.test_cache_stores import break_pages, rows_of


def write_damaged(path: Path, damage: str) -> None:
    file = CacheFile(path, 2**20)
    file.write(rows_of(range(500), 100))
    file.close()
    content = path.read_bytes()
    match damage:
        case "text":
            path.write_text("this is no database " * 500)
        case "torn":
            break_pages(path)
        case "no first page":
            path.write_bytes(bytes(4096) + content[4096:])
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "no table":
            with sqlite3.connect(path) as other:
                other.execute("ALTER TABLE results RENAME TO others")
            other.close()


@pytest.mark.parametrize("damage", ["text", "torn", "no first page", "cut", "no table"])
def test_a_damaged_file_is_set_aside_at_start(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "results.db"
    write_damaged(path, damage)
    before = path.read_bytes()
    config = tmp_path / "models.yaml"
    config.write_text(f"models:\n  - {{id: a, path: here, engine: fake}}\ncache_file: {path}\n")
    assert main(["--config", str(config), "--check"]) == 0
    assert [p.name for p in tmp_path.glob("results.db*")] == ["results.db"]
    caplog.clear()
    file = CacheFile.open(path)
    file.write(rows_of([7], 10))
    assert file.read([rows_of([7], 10)[0][0]])
    file.close()
    (aside,) = tmp_path.glob("results.db.damaged-*")
    assert aside.read_bytes() == before
    assert str(aside) in caplog.text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        path = tmp_path / "results.db"
        path.touch(0o644)
        file = CacheFile(path, 2**20)
        file.write(rows_of([1], 10))
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
        assert len(modes) == 3, "the file, its log and what processes share"
        assert set(modes.values()) == {0o600}
        file.close()
    finally:
        os.umask(previous)
