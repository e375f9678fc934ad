"""What happens when things go wrong: engines that die, too much work, callers that leave."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from logsteer import Client
from logsteer.errors import APIError, AuthenticationError
from tests.conftest import Server, ServerFactory, fake_model
from tests.faults.processes import wait_for
from tests.held import may_hold

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
