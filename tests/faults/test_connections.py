"""Connections: slow, idle, endless and too many of them harm nobody else."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.conftest import Server, ServerFactory, fake_model

MOST_CONNECTIONS = 20
TIMEOUT_S = 1.0
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
STREAM = {"prompt_ids": [[5, 6, 7]], "n": 100, "max_tokens": 100, "stream": True}


@pytest.fixture(scope="module")
def server(start_server: ServerFactory) -> Iterator[Server]:
    yield start_server(
        {
            "models": [fake_model("fake", context_length=4096)],
            "max_connections": MOST_CONNECTIONS,
            "max_header_bytes": 4096,
            "header_timeout_s": TIMEOUT_S,
            "read_timeout_s": TIMEOUT_S,
            "write_timeout_s": 2 * TIMEOUT_S,
            "max_pending_tokens": 15_000,
        }
    )


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    try:
        while piece := connection.recv(65_536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def check_health(server: Server) -> None:
    assert httpx.get(f"{server.url}/healthz", timeout=10).status_code == 200


def test_headers_that_never_end_are_cut_by_their_size(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(REQUEST + b"X: " + b"a" * 8192)
        assert read_all(connection).startswith(b"HTTP/1.1 431 ")


def test_headers_that_come_slowly_are_cut_by_their_time(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(REQUEST)
        began = time.monotonic()
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < 3 * TIMEOUT_S


def test_a_connection_without_a_byte_is_closed(server: Server) -> None:
    with connect(server) as connection:
        assert read_all(connection) == b""


def test_a_body_that_stops_is_cut(server: Server) -> None:
    with connect(server) as connection:
        head = b"POST /logprob HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
        connection.sendall(head + b"Content-Type: application/json\r\n\r\n{")
        began = time.monotonic()
        assert read_all(connection) == b""
        assert time.monotonic() - began < 3 * TIMEOUT_S


def test_trailers_that_never_end_are_cut(server: Server) -> None:
    head = b"POST /logprob HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    with connect(server) as connection:
        connection.sendall(head)
        try:
            for n in range(1000):
                connection.sendall(b"x%d: " % n + b"a" * 100 + b"\r\n")
        except OSError:
            pass
        read_all(connection)  # ends: the server has closed


def test_the_longest_idle_make_room_at_the_limit(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        idle = [connect(server) for _ in range(3 * MOST_CONNECTIONS)]
        check_health(server)
        assert pool.submit(check_health, server).result(10) is None
        for connection in idle:
            connection.close()


def test_a_request_of_keep_alive_is_not_cut_by_the_one_before(server: Server) -> None:
    with httpx.Client(base_url=server.url) as http:
        before = None
        for pause in (0.7, 0.7, 0.7, 1.5):
            answer = http.get("/healthz")
            stream = answer.extensions["network_stream"]
            own = stream.get_extra_info("client_addr")
            assert before in (None, own), "the connection was closed"
            before = own
            time.sleep(pause * TIMEOUT_S)


def test_a_reader_who_does_not_read_holds_no_budget_and_is_cut(server: Server) -> None:
    """Its 100 x 100 tokens are two thirds of the budget, so another such call needs it back."""
    content = httpx.Request("POST", server.url, json=STREAM).content
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connect(server) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        time.sleep(TIMEOUT_S)
        answer = httpx.post(f"{server.url}/generate", json=STREAM | {"stream": False}, timeout=10)
        assert answer.status_code == 200, answer.text
        time.sleep(3 * TIMEOUT_S)
        assert b"event: result" not in read_all(slow), "it was cut before everything was sent"


def test_what_follows_an_answer_is_dropped_to_a_bound(server: Server) -> None:
    with connect(server) as connection:
        head = b"POST /logprob HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n"
        connection.sendall(head + b"Content-Type: application/json\r\n\r\n")
        sent = 0
        with pytest.raises(OSError):
            while sent < 200_000_000:
                sent += connection.send(b"[" * 65_536)
        assert sent < 100_000_000
