"""Connections: slow, idle, endless and too many of them harm nobody else.

And which names and pages a server answers to, and where it listens.
"""

import asyncio
import json
import re
import select
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from logsteer import AsyncClient, Client
from logsteer.errors import LogsteerError
from logsteer_server.__main__ import main
from logsteer_server.api.gate import AllowedHosts
from logsteer_server.listening import check_exposure, listen_at
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings
from tests.conftest import Server, ServerFactory, fake_model
from tests.faults.processes import open_request, read_all, wait_for
from tests.held import HOLD, HOLD_FILE, held
from tests.servers import Configuration

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
TEXT = "Once upon a time there was a little girl who liked to read books."
LONG = {"model": "fake", "texts": [TEXT] * 16_384}


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
        assert read_all(connection) == b""


def test_headers_that_come_slowly_are_cut_by_their_time(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(REQUEST)
        began = time.monotonic()
        assert read_all(connection) == b""
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


def test_more_connections_than_the_limit_are_ended_and_those_without_a_byte_make_room(
    server: Server,
) -> None:
    idle = [connect(server) for _ in range(MOST_CONNECTIONS)]
    with connect(server) as beyond:
        assert read_all(beyond) == b""
    for connection in idle:
        assert read_all(connection) == b""
        connection.close()
    check_health(server)


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


def connect_slowly(
    server: Server, path: str, body: dict[str, Any], buffer: int = 4096
) -> socket.socket:
    """Send a request over a connection that takes little of its answer unless it is read."""
    content = httpx.Request("POST", server.url, json=body).content
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
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
    with connect_slowly(server, "/tokenize", LONG) as slow:
        ended = select.poll()
        ended.register(slow, select.POLLHUP)
        assert ended.poll(60_000), "the server keeps a connection that reads nothing"
        found = read_all(slow)
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
    assert 0 < len(body) < length


def test_a_caller_who_reads_on_is_not_cut_for_the_pauses(server: Server) -> None:
    with connect_slowly(server, "/tokenize", LONG, buffer=2**17) as slow:
        found = b""
        while len(found) < 2**20:
            time.sleep(0.4 * TIMEOUT_S)
            found += slow.recv(2**17, socket.MSG_WAITALL)
        found += read_all(slow)
    head, _, body = found.partition(b"\r\n\r\n")
    assert len(body) == int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]


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


# ------------------------------------------------------------------ names and pages


ITEM = {"context_ids": [5], "target_ids": [[6]]}
EVIL = "evil.example"


def make_settings(**given: Any) -> Settings:
    return Settings(models=[ModelSettings(id="a", path="p")], **given)


# ------------------------------------------------------------------ hosts


@pytest.mark.parametrize("path", ["/healthz", "/models", "/vectors", "/nothing", "/openapi.json"])
def test_another_name_is_not_this_servers(http: httpx.Client, path: str) -> None:
    """A page whose own name was made to point to this machine could read everything."""
    for host in (EVIL, f"{EVIL}:8000", "127.0.0.1.evil.example", "localhost.evil.example"):
        answer = http.get(path, headers={"Host": host})
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert "allowed_hosts" in answer.json()["detail"]
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:80",
        "localhost:1",
        "LOCALHOST.",
        "a.localhost",
        "[::1]:8000",
        "10.1.2.3",
        socket.gethostname(),
    ],
)
def test_addresses_and_own_names_are(http: httpx.Client, host: str) -> None:
    assert http.get("/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("settings", "needs_key", "allowed"),
    [
        ({}, False, False),
        ({}, True, True),  # a page has no key
        ({"allowed_hosts": [EVIL]}, False, True),
        ({"allowed_hosts": ["*"]}, False, True),
        ({"allowed_hosts": ["lab.example"]}, True, False),
        ({"host": EVIL}, False, True),
        ({"uds": Path("socket")}, False, True),
    ],
)
def test_settings_say_which_names(settings: Any, needs_key: bool, allowed: bool) -> None:
    hosts = AllowedHosts(make_settings(**settings), needs_key=needs_key)
    assert (hosts.check("GET", Headers({"host": f"{EVIL}:8000"})) is None) == allowed


# ------------------------------------------------------------------ origins


@pytest.mark.parametrize(
    "origin",
    [f"https://{EVIL}", "null", "http://127.0.0.1:1", "file://", "http://[", "http://", "OWN.evil",
     "OWN0", "OWN@evil.example", "OWN/a"],
)  # fmt: skip
def test_other_sites_pages_are_refused(
    http: httpx.Client, fake_server: Server, origin: str
) -> None:
    """`text/plain` needs no preflight: any page could have the model read texts."""
    headers = {
        "Origin": origin.replace("OWN", fake_server.url),
        "Content-Type": "text/plain",
    }
    calls = [("POST", "/perplexity/stream"), ("POST", "/logprob"), ("PUT", "/vectors/a"),
             ("DELETE", "/vectors/a"), ("POST", "/v1/completions")]  # fmt: skip
    for method, path in calls:
        answer = http.request(method, path, headers=headers, content=b"Once upon a time")
        assert answer.status_code == 403, (path, answer.text)
        problem = answer.json()
        assert (problem.get("code") or problem["error"]["code"]) == "forbidden"
    assert http.get("/models", headers=headers).status_code == 200  # which no page can read


def test_own_pages_and_callers_without_one_are_not(http: httpx.Client, fake_server: Server) -> None:
    for headers in ({}, {"Origin": fake_server.url}, {"Origin": fake_server.url.upper()}):
        assert http.post("/logprob", json={"items": [ITEM]}, headers=headers).status_code == 200


def test_settings_say_which_origins() -> None:
    settings = make_settings(allowed_origins=["https://lab.example/"])
    hosts = AllowedHosts(settings, needs_key=True)
    for origin, allowed in (
        ("https://lab.example", True),
        ("http://lab.example", False),
        ("https://lab.example:81", False),
        ("https://lab.example.evil", False),
        ("https://a.lab.example", False),
    ):
        headers = Headers({"host": "x", "origin": origin})
        assert (hosts.check("POST", headers) is None) == allowed


# ------------------------------------------------------------------ where it listens


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "10.1.2.3"}, True),
        ({"host": "lab.example"}, True),
        ({"host": "0.0.0.0", "insecure": True}, False),
        ({"host": "0.0.0.0", "api_key": "k"}, False),
        ({"host": "0.0.0.0", "key_file": Path("k")}, False),
        ({"host": "0.0.0.0", "uds": Path("s")}, False),
        ({"host": "127.1.2.3"}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
    ],
)
def test_a_public_address_takes_a_key(given: Any, refused: bool) -> None:
    settings = make_settings(**given)
    if refused:
        with pytest.raises(ConfigurationError, match="--insecure"):
            check_exposure(settings)
    else:
        check_exposure(settings)


def test_the_command_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "models.yaml"
    config.write_text(json.dumps({"models": [fake_model()]}))
    command = ["--check", "--config", str(config), "--host", "0.0.0.0"]
    assert main(command) == 2
    assert "without a key" in capsys.readouterr().err
    assert main([*command, "--insecure"]) == 0


class Delaying(socket.socket):
    """A listener whose connections begin without TCP_NODELAY: some kernels begin with it."""

    def accept(self) -> tuple[socket.socket, Any]:
        own, peer = super().accept()
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        return own, peer


async def test_answers_do_not_wait_for_acknowledgements() -> None:
    """Headers and body are two writes: without TCP_NODELAY the second waits 40 ms for an ACK."""
    found = asyncio.get_running_loop().create_future()

    async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = writer.get_extra_info("socket")
        found.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    made = listen_at("127.0.0.1", 0)
    listener = Delaying(made.family, made.type, made.proto, fileno=made.detach())
    async with await asyncio.start_server(note, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        writer.close()
        assert await found != 0


class SocketServer(Server):
    """A server that listens on a Unix domain socket; `url` is its address."""

    def _wait_for(self, pattern: str) -> str:
        return super()._wait_for(r"listens on (unix://\S+);")


@pytest.fixture
def on_socket(tmp_path: Path) -> Iterator[SocketServer]:
    config: Configuration = {"models": [fake_model()], "uds": str(tmp_path / "socket")}
    (tmp_path / "server").mkdir()
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(str(tmp_path / "socket"))
    left_over.close()  # as a server that was killed leaves it
    server = SocketServer.start(config, tmp_path / "server")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def test_a_unix_domain_socket(
    on_socket: SocketServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "socket"
    assert on_socket.url == f"unix://{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    wait_for(lambda: "--unix-socket" in on_socket.output)
    with Client(on_socket.url, max_retries=0) as client:
        assert client.logprob([ITEM]).results
        assert [*client.perplexity_events(["Once upon a time"])]

    async def ask() -> None:
        async with AsyncClient(on_socket.url, max_retries=0) as asked:
            assert (await asked.logprob([ITEM])).results

    asyncio.run(ask())
    # A second server does not take the first one's place.
    assert main(["--config", str(on_socket.config_path)]) == 2
    assert "cannot listen on" in capsys.readouterr().err
    assert path.is_socket()


def test_a_socket_is_named_from_the_root() -> None:
    with pytest.raises(LogsteerError, match="path from the root"):
        Client("unix://socket")


def test_a_file_that_is_no_socket_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, config = tmp_path / "file", tmp_path / "models.yaml"
    path.write_text("mine")
    config.write_text(json.dumps({"models": [fake_model()], "uds": str(path)}))
    assert main(["--config", str(config)]) == 2
    assert path.read_text() == "mine"
