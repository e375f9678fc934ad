"""What happens when things go wrong: engines that die, too much work, callers that leave."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from logsteer import Client
from logsteer.errors import APIError, AuthenticationError, DeadlineError
from tests.conftest import Server, ServerFactory, fake_model
from tests.faults.processes import open_request, wait_for
from tests.held import HOLD, held, may_hold
from tests.server.test_observation import Readings

CRASH, FAIL = 77, 78
ITEM = {"context_ids": [5], "target_ids": [[6]]}
KEY = "k3y"


@pytest.fixture(scope="module")
def server(start_server: ServerFactory, hold: Path) -> Server:
    """Two fakes behind a key: `quick`, and `slow`, which takes half a second a step."""
    return start_server(
        {
            "models": [
                fake_model("quick", crash_id=CRASH, fail_id=FAIL, **may_hold(hold)),
                fake_model("slow", delay_s=0.5, ahead_tokens=100, **may_hold(hold)),
            ],
            "max_pending_tokens": 1000,
            "cache_bytes": 0,
        },
        LOGSTEER_API_KEY=KEY,
        LOGSTEER_HOST="127.0.0.1",
    )


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, api_key=KEY, max_retries=0) as client:
        yield client


def work(tokens: int, count: int = 1, token: int = 5) -> list[dict[str, object]]:
    """Items of which each is another sequence, so that none shares the work of another."""
    return [
        {"context_ids": [token] * (tokens - 2) + [100 + index], "target_ids": [[6, 7]]}
        for index in range(count)
    ]


@pytest.fixture(autouse=True, scope="module")
def _server_with_key() -> Iterator[None]:
    """`start_server` waits with a client that reads its key from the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGSTEER_API_KEY", KEY)
        yield


def test_a_key_is_asked_for_where_one_is_set(server: Server) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
        response = httpx.post(f"{server.url}/logprob", json={"items": [ITEM]}, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    with (
        Client(server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(AuthenticationError),
    ):
        client.models()
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_a_start_that_lacks_memory_is_tried_again(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    config = {"models": [fake_model("waiting", memory_file=str(memory)), fake_model("other")]}
    server = Server.start(config, tmp_path)
    try:
        with Client(server.url, max_retries=3) as client:
            wait_for(lambda: client.model("waiting").state == "restarting")
            card = client.model("waiting")
            assert "MemoryError: the fake engine was told to lack memory" in card.detail
            assert card.restarts >= 1
            with (
                Client(server.url, max_retries=0) as impatient,
                pytest.raises(APIError) as caught,
            ):
                impatient.logprob([ITEM], model="waiting")
            assert (caught.value.code, caught.value.retryable) == ("engine_restarting", True)
            memory.touch()
            wait_for(lambda: client.model("waiting").state == "ready")
            assert client.logprob([ITEM], model="waiting").results
    finally:
        server.stop()


def test_a_job_that_fails_takes_nobody_with_it(client: Client) -> None:
    with pytest.raises(APIError, match="told to fail"):
        client.logprob([ITEM, {"context_ids": [FAIL], "target_ids": [[6]]}], model="quick")
    assert client.logprob([ITEM], model="quick").results


def wait_for_tokens(server: Server, tokens: int) -> None:
    """Wait until so many tokens of work are accepted and unfinished."""
    wait_for(lambda: Readings(server)("pending_tokens", model="slow") == tokens)


def test_a_request_beyond_its_time_is_cancelled_and_its_room_is_free_again(
    start_server: ServerFactory,
) -> None:
    model = fake_model("slow", delay_s=0.5, ahead_tokens=100)
    limits = {"max_pending_tokens": 1000, "request_timeout_s": 4.0, "cache_bytes": 0}
    server = start_server({"models": [model], **limits}, LOGSTEER_API_KEY=KEY)
    with Client(server.url, api_key=KEY, max_retries=0) as client:
        with pytest.raises(DeadlineError, match="request_timeout_s"):
            client.logprob(work(100, 10))  # ten steps of half a second
        deadline = time.monotonic() + 60
        while True:
            try:
                assert client.logprob(work(100)).results
                break
            except DeadlineError:  # the machine stood still for so long
                assert time.monotonic() < deadline


def test_a_caller_that_leaves_frees_its_room(client: Client, server: Server, hold: Path) -> None:
    before = count_ended(server)
    items = work(100, 10, HOLD)
    content = httpx.Request("POST", server.url, json={"model": "slow", "items": items}).content
    key = f"Authorization: Bearer {KEY}"
    with held(hold):
        with open_request(server, "POST /logprob", content, None, key):
            wait_for_tokens(server, 1000)
        wait_for(lambda: count_ended(server) != before)
        assert count_ended(server) == before | {"499": before["499"] + 1}, (
            "its work ended because it left"
        )
        wait_for_tokens(server, 0)
    assert client.logprob(work(100, 2), model="slow").results


def count_ended(server: Server) -> dict[str, float]:
    """Requests to score that have ended, by status."""
    now = Readings(server)
    return {
        status: now("requests_total", path="/logprob", status=status)
        for status in ("200", "499", "504")
    }


def test_a_long_call_does_not_keep_a_short_one_waiting(
    client: Client, server: Server, hold: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held(hold):
            items = [*work(100, 4), *work(100, 1, HOLD)]  # its last job, which takes a step alone
            long = pool.submit(client.logprob, items, model="slow")
            wait_for_tokens(server, 500)
            client.logprob(work(50), model="slow")
            assert not long.done()
        assert len(long.result().results) == 5


def test_a_model_that_cannot_be_loaded_says_why(start_server: ServerFactory) -> None:
    broken = fake_model("broken") | {"path": "/nowhere"}
    with pytest.raises(RuntimeError, match="no such directory"):
        start_server({"models": [broken]})


def test_a_port_in_use_is_an_error_of_one_line(tmp_path: object) -> None:
    from logsteer_server.__main__ import main

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = "demo/models.yaml"
        assert main(["--config", config, "--port", str(port)]) == 2
