"""score_file over two servers of which one is killed: each row once."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import logsteer
from logsteer.corpus import JobLimits
from tests.conftest import Configuration, fake_model
from tests.faults.processes import wait_for
from tests.servers import Server

pytestmark = pytest.mark.engine
ROWS = 4000
MODELS: Configuration = {"models": [fake_model(delay_s=0.02, ahead_tokens=2000)], "cache_bytes": 0}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers of the same model, which a test may kill."""
    found = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        found.append(Server.start(MODELS, tmp_path / name))
    try:
        for server in found:
            server.wait_until_ready()
        yield found
    finally:
        for server in found:
            kill(server)


def kill(server: Server) -> None:
    """End a server and its engines at once."""
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def measure(path: Path) -> int:
    """The bytes of a file; none of one that is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = ({"context": f"The {n} of", "targets": [" the", " a"]} for n in range(ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_server_dies_and_the_other_does_the_rest(
    servers: list[Server], corpus: Path, tmp_path: Path
) -> None:
    one, other = servers
    whole = tmp_path / "whole.jsonl"
    alone = logsteer.score_file(corpus, whole, base_url=other.url)
    assert (alone.rows, alone.failed) == (ROWS, 0)
    part, target = tmp_path / "out.jsonl.part", tmp_path / "out.jsonl"

    def kill_one() -> None:
        wait_for(lambda: target.exists() or measure(part) >= measure(whole) / 4)
        kill(one)

    killer = threading.Thread(target=kill_one)
    killer.start()
    limits = JobLimits(batch_size=50)
    urls = [one.url, other.url]
    scores = logsteer.score_file(corpus, target, base_url=urls, limits=limits)
    killer.join()
    assert one.process is not None and one.process.poll() is not None
    assert scores.retries > 0
    assert (scores.rows, scores.failed) == (ROWS, 0)
    assert target.read_bytes() == whole.read_bytes()
