"""How long a call takes in which nothing is computed."""

import time

import httpx

from tests.conftest import Server


def test_answers_do_not_wait_for_acknowledgements(fake_server: Server) -> None:
    """Headers and body are two writes, and the second must not wait 40 ms for the first's ACK."""
    seconds = []
    with httpx.Client(base_url=fake_server.url) as client:
        for _ in range(20):
            started = time.monotonic()
            assert client.get("/healthz").status_code == 200
            seconds.append(time.monotonic() - started)
    assert min(seconds[1:]) < 0.03
