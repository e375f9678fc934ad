"""Directories that processes leave behind when they are killed."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from logsteer_server.engines.lifetime import LOCK, NEW_S, PREFIX, ScratchDirectory, sweep
from tests.conftest import fake_model
from tests.faults.processes import running

OWNER = """
import sys, time
from pathlib import Path
from logsteer_server.engines.lifetime import ScratchDirectory
scratch = ScratchDirectory(Path(sys.argv[1]))
(scratch.path / "file").write_text("x")
(scratch.path / "below").mkdir()
print(scratch.path, flush=True)
time.sleep(600)
"""


def leave(parent: Path) -> tuple[Path, subprocess.Popen[str]]:
    """A directory of a process that runs."""
    command = [sys.executable, "-c", OWNER, str(parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return Path(process.stdout.readline().strip()), process


def test_what_nobody_owns_is_swept_and_what_somebody_does_is_not(tmp_path: Path) -> None:
    left, process = leave(tmp_path)
    with process:
        try:
            with ScratchDirectory(tmp_path) as own:
                assert sweep(tmp_path) == []
                process.kill()
                process.wait()
                assert sweep(tmp_path) == [left]
                assert (own.exists(), left.exists()) == (True, False)
            assert not own.exists()
        finally:
            process.kill()


def test_one_that_is_not_locked_yet_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []
    lock = fcntl.flock

    def sweep_and_lock(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        swept.extend(sweep(tmp_path))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", sweep_and_lock)
    with ScratchDirectory(tmp_path) as own:
        assert own.exists()
        assert sweep(tmp_path) == swept == []


def test_only_directories_of_ours_are_swept(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / "other").mkdir()
    new = tmp_path / f"{PREFIX}new"
    new.mkdir()
    assert sweep(tmp_path) == [], "one without a lock may be about to be locked"
    os.utime(new, (0, time.time() - NEW_S - 1))
    assert sweep(tmp_path) == [new]
    assert (target / "precious").exists()


def test_a_server_sweeps_at_its_start(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    left, process = leave(scratch)
    with process:
        process.kill()
    assert (left / LOCK).exists()
    with running({"models": [fake_model()]}, tmp_path, TMPDIR=str(scratch)) as server:
        server.wait_until_ready()
        assert not left.exists()
