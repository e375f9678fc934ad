"""`logsteer score-file --ray` on a real local Ray: the lines of a server, whoever is killed."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

import logsteer
from logsteer.corpus import JobLimits
from tests.cluster.local import read_title
from tests.conftest import Configuration, Server, ServerFactory, fake_model
from tests.faults.processes import is_alive, wait_for

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="SKIPPED BECAUSE RAY IS ABSENT: install the extra `ray`",
    ),
]
ROWS = 1500
WAIT_S = 120.0
ACTOR = "ray::MapWorker(MapBatches(ChunkScorer))"
SLOW = fake_model(delay_s=0.15, ahead_tokens=60)


@pytest.fixture
def server(start_server: ServerFactory, tmp_path: Path) -> Server:
    return start_server({"models": [fake_model()], "cache_bytes": 0})


class RayJob:
    """The command, in a process of its own, with two engines on a Ray of its own."""

    def __init__(self, directory: Path, model: Configuration) -> None:
        store = str(directory / "store")
        config = {"models": [model], "cache_bytes": 0, "store_directory": store}
        (directory / "models.yaml").write_text(yaml.safe_dump(config))
        self.target = directory / "out.jsonl"
        self._record = directory / "out.jsonl.job"
        self._log = directory / "log"
        command = [
            sys.executable, "-m", "logsteer.cli", "score-file", str(directory / "in.jsonl"),
            str(self.target), "--endpoint", "perplexity", "--id", "n", "--batch-size", "20",
            "--ray", "--config", str(directory / "models.yaml"), "--actors", "2",
            "--commit-s", "0.2", "--json",
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def committed(self) -> int:
        """Rows that are finished for good."""
        if not self._record.exists():
            return 0
        whole = self._record.read_text().rpartition("\n")[0]  # a line may be half-written
        lines = [json.loads(one) for one in whole.splitlines()]
        return max((one.get("rows", 0) for one in lines), default=0)

    def wait_for(self, rows: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.committed < rows:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def find_actors(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [own for own in found if read_title(own).startswith(ACTOR)]

    def kill(self) -> None:
        """Kill the driver, whose actors and engines end with it; Ray's own agents may take long."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        held = [own for own in family if is_of_engine(own)]
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 60
        while left := [own for own in held if is_at_work(own)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        for own in filter(is_at_work, family):
            with contextlib.suppress(psutil.NoSuchProcess):
                own.kill()


def is_of_engine(process: psutil.Process) -> bool:
    """Whether it is an actor, or an engine below one."""
    words = read_title(process)
    return words.startswith(ACTOR) or "spawn_main" in words


def is_at_work(process: psutil.Process) -> bool:
    """Whether it runs; one that ended may stay, where nobody asks how it ended."""
    return process.is_running() and is_alive(process)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    words = ["the", "sea", "is", "wide", "and", "Tom", "has", "a", "red", "ball", "in", "a", "park"]
    rows = [{"n": n, "text": " ".join(words[n % 7 : n % 7 + 3 + n % 5])} for n in range(ROWS)]
    rows[777]["text"] = ""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def whole(server: Server, corpus: Path, tmp_path: Path) -> tuple[Path, logsteer.FileScores]:
    """The lines of all rows as a server makes them, and what there is to say of them."""
    path, limits = tmp_path / "whole.jsonl", JobLimits(batch_size=100)
    scores = logsteer.score_file(
        corpus, path, "perplexity", id_column="n", base_url=server.url, limits=limits
    )
    return path, scores


@pytest.fixture
def job(whole: tuple[Path, logsteer.FileScores], corpus: Path, tmp_path: Path) -> Iterator[RayJob]:
    """A job that begins when nothing else is to be done that its end could overtake."""
    found = RayJob(tmp_path, SLOW)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.kill()


def test_an_actor_and_the_driver_are_killed_and_each_row_is_there_once(
    job: RayJob, server: Server, corpus: Path, whole: tuple[Path, logsteer.FileScores]
) -> None:
    path, scores = whole
    assert (scores.rows, scores.failed) == (ROWS, 1)
    job.wait_for(200)
    wait_for(lambda: len(job.find_actors()) == 2)  # the other one may still start
    os.kill(job.find_actors()[0].pid, signal.SIGKILL)
    job.wait_for(job.committed + 200)
    assert job.committed < ROWS - 100
    job.kill()
    assert not job.target.exists()
    # What is left is scored over HTTP; the lines are the same whoever made them.
    again = logsteer.score_file(
        corpus, job.target, "perplexity", id_column="n", base_url=server.url
    )
    assert 400 <= again.resumed_rows < ROWS
    assert job.target.read_bytes() == path.read_bytes()
    assert again.total == scores.total


def test_a_job_on_ray_goes_on_where_one_over_http_ended(
    corpus: Path, server: Server, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.jsonl"
    logsteer.score_file(corpus, whole, "perplexity", id_column="n", base_url=server.url)
    strict = JobLimits(batch_size=50)
    with pytest.raises(logsteer.LogsteerError, match="row 777"):
        logsteer.score_file(
            corpus, tmp_path / "out.jsonl", "perplexity", id_column="n", base_url=server.url,
            limits=strict, strict=True,
        )  # fmt: skip
    job = RayJob(tmp_path, fake_model())
    assert job.process.wait(WAIT_S) == 1, job.output
    assert f"1 of {ROWS} rows failed" in job.output
    assert (
        json.loads(job.output[job.output.index("{") : job.output.rindex("}") + 1])["resumed_rows"]
        == 750
    )
    assert job.target.read_bytes() == whole.read_bytes()
