"""Real engines that are stopped, killed and sent signals, with the processes of their ranks."""

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from logsteer_server.engines.lifetime import PREFIX, sweep
from tests.conftest import Server, tlens_model, vllm_model
from tests.faults.processes import (
    check_retryable,
    find_engines,
    find_family,
    is_alive,
    read_card,
    read_metric,
    running,
    score,
    signal_all,
    wait_for,
)

pytestmark = pytest.mark.engine

RESTART_S = 180.0
INTERRUPTS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """Where engines keep what nobody needs afterwards; a short name, because sockets lie there."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ls-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Iterator[Server]:
    """VLLM with two ranks, and TransformerLens."""
    config = {
        "models": [vllm_model("two", tensor_parallel=2), tlens_model("tlens")],
        "heartbeat_timeout_s": 10.0,  # a busy machine may keep an engine silent for seconds
        "cache_bytes": 0,
    }
    with running(config, tmp_path_factory.mktemp("server"), TMPDIR=str(scratch)) as server:
        server.wait_until_ready()
        yield server


def find_vllm(server: Server) -> int:
    """Its engine: the one that has started others."""
    return next(pid for pid in find_engines(server) if psutil.Process(pid).children())


def find_tlens(server: Server) -> int:
    """Its engine: the one that uses no directory for sockets."""
    return next(pid for pid in find_engines(server) if not uses_scratch(pid))


def uses_scratch(pid: int) -> bool:
    return any(PREFIX in path for path in map(str, list_files(pid)))


def list_files(pid: int) -> list[Path]:
    """What a process has open."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            found.append(path.readlink())
    return found


def find_ranks(server: Server) -> list[psutil.Process]:
    """The processes of vLLM's ranks, below that of their engine."""
    engine = psutil.Process(find_vllm(server))
    return [p for p in engine.children(recursive=True) if is_alive(p)]


def test_engines_and_their_ranks_ignore_interrupts(server: Server) -> None:
    body = {"prompt_ids": [[5, 6, 7]], "ignore_eos": True, "n": 32}
    lengths = {"two": 100, "tlens": 900}  # so that both take seconds
    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(
                httpx.post,
                f"{server.url}/generate",
                json=body | {"model": model, "max_tokens": length, "stream": stream},
                timeout=600,
            )
            for model, length in lengths.items()
            for stream in (False, True)
        ]
        wait_for(lambda: all(read_metric(server, "pending_tokens", model=m) for m in lengths))
        for number in INTERRUPTS:
            signal_all(find_family(server), number)
        for answer in answers:
            assert answer.result().status_code == 200, answer.result().text
            assert "event: error" not in answer.result().text
    for model in lengths:
        assert read_card(server, model)["restarts"] == 0


def test_a_stopped_engine_is_killed_with_its_ranks(server: Server, scratch: Path) -> None:
    ranks, (own,) = find_ranks(server), scratch.glob(f"{PREFIX}*")
    assert len(ranks) >= 2
    os.kill(find_vllm(server), signal.SIGSTOP)
    ranks[0].suspend()
    check_retryable(score(server, "two", 7))
    wait_for(lambda: not any(map(is_alive, ranks)))
    wait_for(lambda: not own.exists())
    wait_for(lambda: read_card(server, "two")["restarts"] == 1)


def test_no_process_outlives_a_server_that_is_killed(
    server: Server, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TransformerLens is stopped, vLLM is loading again."""
    wait_for(lambda: list(scratch.glob(f"{PREFIX}*")), RESTART_S)
    family = find_family(server)
    assert len(find_engines(server)) == 2
    os.kill(find_tlens(server), signal.SIGSTOP)
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not any(map(is_alive, family)), 20)
    left = list(scratch.glob(f"{PREFIX}*"))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert sorted(sweep()) == sorted(left) != []
    assert not [path for path in scratch.rglob("*") if path.is_socket()]
