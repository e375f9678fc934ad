"""Jobs of `logsteer.score_file` that end in their midst, and what the next one finds of them.

It goes on from files that are cut or changed, after a full disk and after kills; it refuses what is
of another job, and leaves what others wrote.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from logsteer import LogsteerError
from logsteer.corpus import JobLimits

from .corpus_server import CorpusServer, serve_corpus
from .score_file_cases import PowerCutError, interrupt, read_rows, score, texts, write_rows


@pytest.mark.full
def test_lines_cut_anywhere_are_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power is lost here
    corpus = write_rows(tmp_path / "in.jsonl", texts(12))
    whole = tmp_path / "whole.jsonl"
    expected = score(corpus, whole, CorpusServer(), id_column="id")
    target = tmp_path / "out.jsonl"
    interrupt(corpus, target, after=2)
    files = {path: path.read_bytes() for path in tmp_path.glob("out.jsonl.*")}
    cut = target.with_name(f"{target.name}.part")
    files[cut] += b'{"row": 8, "resu'  # what stands behind the last commit
    server = CorpusServer(seconds=0.0)
    for size in range(0, len(files[cut]) + 1, 4):
        for path, content in files.items():
            path.write_bytes(content[:size] if path == cut else content)
        found = score(corpus, target, server, id_column="id", limits=JobLimits(batch_size=8))
        assert target.read_bytes() == whole.read_bytes(), f"cut at {size}"
        same = {"seconds", "rows_per_s", "tokens_per_s", "resumed_rows"}
        assert found.model_dump(exclude=same) == expected.model_dump(exclude=same)
        target.unlink()


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_an_end_that_is_interrupted_is_made_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from logsteer.corpus import job, record

    whole = tmp_path / f"whole-{name}"
    score(corpus, whole, CorpusServer())
    target = tmp_path / name

    def stop(*_: Any) -> None:
        raise PowerCutError

    for place in ((job, "place"), (record.JobRecord, "finish")):
        with monkeypatch.context() as patch, pytest.raises(PowerCutError):
            patch.setattr(*place, stop)
            score(corpus, target, CorpusServer())
        silent = CorpusServer(*[OSError()] * 9)
        assert score(corpus, target, silent).rows == 50
        assert target.read_bytes() == whole.read_bytes()
        for path in tmp_path.glob(f"{name}*"):
            path.unlink()


def test_a_full_disk_costs_nothing_that_was_there(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.jsonl"
    write, room, one_at_a_time = os.write, 3000, threading.Lock()

    def write_less(file: int, data: Any) -> int:
        nonlocal room
        with one_at_a_time:  # lines and notes of them are written by several threads
            if not room:
                raise OSError(28, "No space left on device")
            count = write(file, bytes(data)[:room])
            room -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_less)
        with pytest.raises(OSError, match="No space left") as caught:
            score(corpus, target, CorpusServer())
    assert str(caught.value.filename).startswith(str(target))
    assert score(corpus, target, CorpusServer()).rows == 50
    score(corpus, tmp_path / "whole.jsonl", CorpusServer())
    assert target.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


# ------------------------------------------------------------------ the command


def run_command(url: str, *argv: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "logsteer.cli", "score-file", *argv, "--url", url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


@pytest.mark.full
def test_a_command_that_is_killed_again_and_again_writes_what_one_run_writes(
    tmp_path: Path,
) -> None:
    corpus = write_rows(tmp_path / "in.jsonl", texts(4000))
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    score(corpus, whole, CorpusServer(), limits=JobLimits())
    chance = random.Random(5)
    with serve_corpus(delay_s=0.05) as url:  # no run of two calls at once ends in 12 s
        argv = (str(corpus), str(target), "--endpoint", "perplexity", "--batch-size", "8")
        for _ in range(4):
            command = run_command(url, *argv, "--commit-s", "0.02", "--concurrency", "2")
            wait_for_commit(tmp_path / "out.jsonl.job")
            time.sleep(0.1 * chance.random())
            command.kill()
            command.communicate()
            assert not target.exists()
        command = run_command(url, *argv, "--json")
        out, _ = command.communicate(timeout=300)
    assert target.read_bytes() == whole.read_bytes()
    assert (command.returncode, json.loads(out)["rows"]) == (0, 4000)
    assert 0 < json.loads(out)["resumed_rows"] < 4000


def wait_for_commit(record: Path) -> None:
    """Wait until a job has noted more than it had."""

    def count() -> int:
        found = json.loads(record.read_bytes()) if record.exists() else {}
        return int(found.get("commit", {}).get("rows", 0))

    before = count()
    deadline = time.monotonic() + 120
    while count() <= before:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.full
def test_ctrl_c_keeps_what_is_done_and_two_at_once_are_refused(tmp_path: Path) -> None:
    corpus, target = write_rows(tmp_path / "in.jsonl", texts(3000)), tmp_path / "out.jsonl"
    with serve_corpus(delay_s=0.5) as url:  # the first has work for three minutes
        argv = (str(corpus), str(target), "--endpoint", "perplexity", "--batch-size", "4")
        argv = (*argv, "--concurrency", "2", "--commit-s", "0.01")
        command = run_command(url, *argv)
        wait_for_commit(tmp_path / "out.jsonl.job")
        second = run_command(url, *argv)
        _, told = second.communicate(timeout=120)
        assert second.returncode == 1
        assert b"out.jsonl is being written by another process" in told
        command.send_signal(signal.SIGINT)
        _, told = command.communicate(timeout=120)
        assert command.returncode == 130
        assert b"the same command resumes" in told
    scores = score(corpus, target, CorpusServer(), limits=JobLimits())
    assert 0 < scores.resumed_rows < 3000
    assert [row["row"] for row in read_rows(target)] == list(range(3000))


# ------------------------------------------------------------------ another job


def test_what_has_changed_is_refused_by_name_and_restart_begins_anew(
    corpus: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    interrupt(corpus, target, after=3)
    with pytest.raises(LogsteerError, match=r"of another job: options was .* --restart"):
        score(corpus, target, CorpusServer(), id_column="id", options={"stride": 4})
    with pytest.raises(LogsteerError, match="id_column was"):
        score(corpus, target, CorpusServer())
    with pytest.raises(LogsteerError, match="weights_digest: 'w', now 'v'"):
        score(corpus, target, CorpusServer(weights="v"), id_column="id")
    rows = texts(50)
    write_rows(corpus, [*rows[1::-1], *rows[2:]])
    with pytest.raises(LogsteerError, match="has changed: rows 0 to 11 are not the rows"):
        score(corpus, target, CorpusServer(), id_column="id")
    write_rows(corpus, rows[:-1])
    with pytest.raises(LogsteerError, match=r"input was .* and is"):
        score(corpus, target, CorpusServer(), id_column="id")
    scores = score(corpus, target, CorpusServer(weights="v"), id_column="id", restart=True)
    assert (scores.rows, scores.resumed_rows) == (49, 0)
    target.write_text("other")
    with pytest.raises(LogsteerError, match="has 5 bytes, not"):
        score(corpus, target, CorpusServer(), id_column="id")
    assert not (tmp_path / "out.jsonl.part").exists()
    (tmp_path / "out.jsonl.job").write_text('{"score-file": 1}\n{"rows": 4}\n')
    with pytest.raises(LogsteerError, match="not a record of a job of this version; --restart"):
        score(corpus, target, CorpusServer(), id_column="id")


def test_files_of_others_are_not_written_over(corpus: Path, tmp_path: Path) -> None:
    for name in ("out.jsonl", "other.jsonl.part"):
        (tmp_path / name).write_text("mine")
        target = tmp_path / name.removesuffix(".part")
        for _ in range(2):
            with pytest.raises(LogsteerError, match="no job is known that wrote it"):
                score(corpus, target, CorpusServer())
        assert (tmp_path / name).read_text() == "mine"
        assert score(corpus, target, CorpusServer(), restart=True).rows == 50
