"""Connections: slow, idle, endless and too many of them harm nobody else."""

import asyncio
import re
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from logsteer_server.api.connections import ConnectionLimits, LimitedProtocol
from tests.conftest import Server, ServerFactory, fake_model
from tests.faults.processes import open_request, read_all, wait_for
from tests.held import HOLD, HOLD_FILE, held

pytestmark = pytest.mark.full

MOST_CONNECTIONS = 20
TIMEOUT_S = 1.0
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
STREAM = {
    "model": "fake",
    "prompt_ids": [[5, 6, 7]],
    "n": 100,
    "max_tokens": 100,
    "stream": True,
}


@pytest.fixture(scope="module")
def server(start_server: ServerFactory) -> Iterator[Server]:
    return start_server(
        {
            "models": [
                fake_model("fake", context_length=4096, hold_file=HOLD_FILE, hold_id=HOLD),
            ],
            "max_connections": MOST_CONNECTIONS,
            "stall_timeout_s": TIMEOUT_S,
        }
    )


def address_of(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(address_of(server), timeout=60)


def check_health(server: Server) -> None:
    assert httpx.get(f"{server.url}/healthz", timeout=60).status_code == 200


def test_headers_that_never_end_are_cut_by_their_size(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(REQUEST + b"X: " + b"a" * 2**17)
        assert read_all(connection).startswith(b"HTTP/1.1 431 ")


def test_headers_that_come_slowly_are_cut_by_their_time(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(REQUEST)
        began = time.monotonic()
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < 8, "it is 30 s without the setting"


def test_a_connection_without_a_byte_is_closed(server: Server) -> None:
    with connect(server) as connection:
        assert read_all(connection) == b""


def test_a_body_that_stops_is_cut(server: Server) -> None:
    with open_request(server, "POST /logprob", b"{", 100) as connection:
        began = time.monotonic()
        assert read_all(connection) == b""
        assert time.monotonic() - began < 20, "it is 30 s without the setting"


def test_trailers_that_never_end_are_cut(server: Server) -> None:
    head = b"POST /logprob HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    with connect(server) as connection:
        connection.sendall(head)
        try:
            for n in range(10_000):
                connection.sendall(b"x%d: " % n + b"a" * 100 + b"\r\n")
        except OSError:
            pass
        read_all(connection)  # ends: the server has closed


def test_the_longest_idle_make_room_at_the_limit(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        idle = [connect(server) for _ in range(3 * MOST_CONNECTIONS)]
        check_health(server)
        assert pool.submit(check_health, server).result(60) is None
        for connection in idle:
            connection.close()


def test_a_request_of_keep_alive_is_not_cut_by_the_one_before(server: Server) -> None:
    # The client, too, keeps an idle connection for as long as a busy machine has it wait.
    limits = httpx.Limits(keepalive_expiry=60)
    with httpx.Client(base_url=server.url, timeout=60, limits=limits) as http:
        before = None
        for pause in (0.7, 0.7, 0.7, 1.5):
            answer = http.get("/healthz")
            stream = answer.extensions["network_stream"]
            own = stream.get_extra_info("client_addr")
            assert before in (None, own), "the connection was closed"
            before = own
            time.sleep(pause * TIMEOUT_S)


def connect_slowly(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request over a connection that takes little of its answer unless it is read."""
    content = httpx.Request("POST", server.url, json=body).content
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.settimeout(60)
    slow.connect(address_of(server))
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % path.encode()
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
    slow.sendall(head + content)
    return slow


def test_a_stream_that_is_not_read_holds_no_budget(start_server: ServerFactory) -> None:
    """Its 100 x 100 tokens are two thirds of the budget, so another such call needs it back."""
    patient = start_server(
        {
            "models": [fake_model("fake", context_length=4096)],
            "max_pending_tokens": 15_000,
            "stall_timeout_s": 600.0,
        }
    )
    with connect_slowly(patient, "/generate", STREAM):
        again = STREAM | {"stream": False}
        url = f"{patient.url}/generate"
        wait_for(lambda: httpx.post(url, json=again, timeout=60).status_code == 200)


def test_an_answer_that_is_not_read_is_cut(server: Server) -> None:
    """It has more bytes than the system's buffers hold; the end comes without reading any."""
    texts = ["Once upon a time there was a little girl who liked to read books."] * 16_384
    with connect_slowly(server, "/tokenize", {"model": "fake", "texts": texts}) as slow:
        ended = select.poll()
        ended.register(slow, select.POLLHUP)
        assert ended.poll(60_000), "the server keeps a connection that reads nothing"
        found = read_all(slow)
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
    assert 0 < len(body) < length


async def test_a_caller_who_reads_on_is_not_cut_for_the_pause() -> None:
    protocol = LimitedProtocol.__new__(LimitedProtocol)
    protocol._limits, protocol._writing = ConnectionLimits(1, 60.0), None
    protocol.loop = asyncio.get_running_loop()
    protocol.transport = SimpleNamespace(get_write_buffer_size=lambda: 2**16)  # type: ignore[assignment]
    protocol.flow = SimpleNamespace(pause_writing=int, resume_writing=int)  # type: ignore[assignment]
    protocol.pause_writing()
    watch = protocol._writing
    protocol.resume_writing()
    assert watch is not None and protocol._writing is None
    assert watch.cancelled()


def test_what_follows_an_answer_is_dropped_to_a_bound(server: Server) -> None:
    with open_request(server, "POST /logprob", b"", 10**9) as connection:
        sent = 0
        with pytest.raises(OSError, match=r"reset|pipe|abort"):
            while sent < 200_000_000:
                sent += connection.send(b"[" * 65_536)
        assert sent < 100_000_000


def test_a_caller_may_wait_for_less_than_the_server_does(server: Server) -> None:
    body = {"model": "fake", "items": [{"context_ids": [HOLD], "target_ids": [[6]]}]}
    with held(server.directory / HOLD_FILE):
        answer = ask_within(server, body, "0.2")  # its only step does not end
        assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
    assert ask_within(server, body, "60").status_code == 200


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", ""])
def test_a_deadline_is_a_number_of_seconds(server: Server, given: str) -> None:
    body = {"model": "fake", "items": [{"context_ids": [5], "target_ids": [[6]]}]}
    answer = ask_within(server, body, given)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "X-Request-Timeout" in answer.json()["detail"]


def ask_within(server: Server, body: dict[str, Any], seconds: str) -> httpx.Response:
    headers = {"X-Request-Timeout": seconds}
    return httpx.post(f"{server.url}/logprob", json=body, headers=headers, timeout=60)
