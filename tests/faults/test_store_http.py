"""Stores over HTTP under faults: a lock that is held elsewhere, uploads that do not end."""

import concurrent.futures
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from logsteer_server.stores.layer_vectors import LayerVectors
from tests.conftest import Server, ServerFactory, fake_model
from tests.faults.processes import wait_for
from tests.faults.test_stores import held_elsewhere

VECTOR = LayerVectors({1: np.arange(1, 17)}).content
INVALID = b"no vector" * 20
ROOM = 4096


@pytest.fixture(scope="module")
def server(start_server: ServerFactory) -> Server:
    """A server whose stores are small, and wait half a second for a lock."""
    return start_server(
        {"models": [fake_model()], "vector_store_bytes": ROOM, "store_lock_timeout_s": 0.5}
    )


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=server.url, timeout=60, limits=limits) as http:
        yield http


def time_tokenize(http: httpx.Client) -> float:
    started = time.monotonic()
    answer = http.post("/tokenize", json={"texts": ["once upon a time"]})
    assert answer.status_code == 200
    return time.monotonic() - started


def test_a_lock_held_elsewhere_stops_nobody_who_needs_no_store(
    http: httpx.Client, server: Server
) -> None:
    assert http.put("/vectors/a", content=VECTOR).status_code == 200
    (lock,) = Path(server.directory).rglob("vectors/lock")

    def call(number: int) -> tuple[httpx.Response, float]:
        started = time.monotonic()
        if number % 2:
            answer = http.get("/vectors")
        else:
            answer = http.put(f"/vectors/v{number}", content=VECTOR)
        return answer, time.monotonic() - started

    slowest: list[float] = []
    while not slowest or (min(slowest) >= 2 and len(slowest) < 3):  # the machine may be busy
        with concurrent.futures.ThreadPoolExecutor(48) as pool, held_elsewhere(lock):
            calls = [pool.submit(call, number) for number in range(48)]
            time.sleep(0.2)
            slowest.append(max(time_tokenize(http) for _ in range(3)))
            answers = [done.result() for done in calls]
        for answer, _ in answers:
            assert answer.status_code == 429, answer.text
            assert answer.headers["retry-after"]
            assert "locked by others" in answer.json()["detail"]
        assert max(taken for _, taken in answers) < 60
    assert min(slowest) < 2
    assert http.get("/vectors").status_code == 200
    assert http.delete("/vectors/a").status_code == 200


def open_half(server: Server, name: str, *headers: str) -> socket.socket:
    """Begin an upload, and send nothing of it."""
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port))
    lines = [f"PUT /vectors/{name} HTTP/1.1", f"Host: {url.host}", *headers, "", ""]
    connection.sendall("\r\n".join(lines).encode())
    return connection


def wait_for_status(http: httpx.Client, status: int) -> Any:
    """Send what has no room (429), or is refused when it was read (422), until it is so."""
    deadline = time.monotonic() + 60
    while True:
        answer = http.put("/vectors/b", content=INVALID)
        if answer.status_code == status:
            return answer
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)


def test_uploads_that_do_not_end_hold_no_more_than_the_store_may(
    http: httpx.Client, server: Server
) -> None:
    refused = http.put("/vectors/b", content=bytes(ROOM + 1))
    assert refused.status_code == 413
    assert "vector_store_bytes" in refused.json()["detail"]
    with ExitStack() as opened:
        for number in range(4):
            half = open_half(server, f"half{number}", f"Content-Length: {ROOM // 4}")
            opened.enter_context(half)
        # All of them have their room before anybody else asks for some.
        wait_for(lambda: len(list(Path(server.directory).rglob("vectors/uploads/*.part"))) == 4)
        answer = wait_for_status(http, 429)
        assert "uploads at work" in answer.json()["detail"]
        assert answer.headers["retry-after"]
    wait_for_status(http, 422)  # they are gone, and so is what they reserved
    with ExitStack() as opened:
        half = opened.enter_context(open_half(server, "c", "Transfer-Encoding: chunked"))
        assert http.put("/vectors/b", content=VECTOR).status_code == 200
        data = bytes(ROOM - 160)
        chunk = f"{len(data):x}\r\n".encode() + data + b"\r\n"
        half.sendall(chunk)  # it grows, and does not end
        while http.put("/vectors/b", content=INVALID).status_code != 429:
            time.sleep(0.3)
            if select.select([half], [], [], 0)[0]:  # there was no room beside what was asked here
                half = opened.enter_context(open_half(server, "c", "Transfer-Encoding: chunked"))
                half.sendall(chunk)
    wait_for_status(http, 422)
    assert http.delete("/vectors/b").status_code == 200
