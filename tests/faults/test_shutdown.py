"""The server's end: signals to the group, what is still answered, and nothing that is left."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Server, fake_model
from tests.faults.processes import (
    check_retryable,
    find_family,
    is_alive,
    open_request,
    read_all,
    running,
    score,
    signal_all,
    wait_for,
    wait_for_jobs,
)
from tests.held import HOLD_FILE, held

LONG: dict[str, Any] = {"models": [fake_model(delay_s=8.0)]}
ENDLESS: dict[str, Any] = {"models": [fake_model(delay_s=600.0)]}
"""A step of it ends with its process."""
GENERATE = {"prompt_ids": [[5, 6]], "max_tokens": 3, "stream": True}


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A fake whose steps can be held; settings by parameter."""
    settings: dict[str, Any] = getattr(request, "param", {})
    with running(
        {"models": [fake_model(hold_file=HOLD_FILE)], "cache_bytes": 0} | settings, tmp_path
    ) as s:
        s.wait_until_ready()
        yield s


def signal_group(server: Server, number: int) -> None:
    """Send a signal to everything of the server's: group, engines and what these started."""
    family = find_family(server)
    os.killpg(server.process.pid, number)
    signal_all(family, number)  # as systemd does: the whole control group


def wait_for_end(server: Server) -> int:
    return server.process.wait(60)


def is_withdrawn(server: Server) -> bool:
    return httpx.get(f"{server.url}/readyz", timeout=60).status_code == 503


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_lets_answers_in_flight_come_back(
    server: Server, number: int
) -> None:
    family = find_family(server)
    with ThreadPoolExecutor(2) as pool:
        with held(server.directory / HOLD_FILE):
            plain = pool.submit(score, server, "fake", 7)
            events = pool.submit(httpx.post, f"{server.url}/generate", json=GENERATE, timeout=60)
            wait_for_jobs(server, "fake", 2)
            signal_group(server, number)
            wait_for(lambda: is_withdrawn(server))
            assert httpx.get(f"{server.url}/healthz", timeout=60).status_code == 200
            late = score(server, "fake", 8)
            check_retryable(late)
            assert "shutting down" in late.json()["detail"]
            assert late.headers["connection"] == "close"
        assert plain.result().status_code == 200
        assert "event: result" in events.result().text
    assert wait_for_end(server) == 0
    wait_for(lambda: not any(map(is_alive, family)))


@pytest.mark.full
@pytest.mark.parametrize("server", [LONG | {"drain_s": 0.5}], indirect=True)
def test_after_its_time_each_request_is_told(server: Server) -> None:
    """Two wait for the engine, one for its own body, one for its caller to send the rest."""
    with ThreadPoolExecutor(3) as pool:
        plain = pool.submit(score, server, "fake", 7)
        events = pool.submit(httpx.post, f"{server.url}/generate", json=GENERATE, timeout=60)
        chunks = pool.submit(
            httpx.post,
            f"{server.url}/v1/completions",
            json={"prompt": [5, 6], "max_tokens": 3, "stream": True},
            timeout=60,
        )
        with (
            open_request(server, "POST /perplexity/stream", b"Some ", 100) as text,
            open_request(server, "POST /logprob", b'{"items": ', 100) as body,
        ):
            wait_for_jobs(server, "fake", 3)
            signal_group(server, signal.SIGTERM)
            check_retryable(plain.result())
            assert "event: error" in events.result().text
            assert '"code":"engine_restarting"' in events.result().text
            assert '"code":"engine_restarting"' in chunks.result().text
            for half in (text, body):
                answer = read_all(half)
                assert b" 503 " in answer.splitlines()[0], answer
                assert b'"engine_restarting"' in answer
    assert wait_for_end(server) == 0


@pytest.mark.parametrize("server", [ENDLESS], indirect=True)
def test_a_second_signal_ends_the_server_at_once(server: Server) -> None:
    family = find_family(server)
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(score, server, "fake", 7)
        wait_for_jobs(server, "fake")
        signal_group(server, signal.SIGTERM)
        wait_for(lambda: is_withdrawn(server))
        signal_group(server, signal.SIGTERM)
        assert wait_for_end(server) == 128 + signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            lost.result()
    wait_for(lambda: not any(map(is_alive, family)), 20)
