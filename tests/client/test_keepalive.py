"""A client finds out that its server's machine is gone, by asking it while it waits."""

import socket
import threading
from collections.abc import Iterator

import pytest

from logsteer import Client
from logsteer._exchange import ClientSettings

ALIVE = (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def read_arguments(url: str) -> object:
    """What the transport for an address is made with."""
    return ClientSettings(url, None, None, 2, None, "json").transport


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a server that answers one request."""
    body = b'{"status":"ok"}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer % (len(body), body))
                connection.recv(1)  # until the client has closed it

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def test_its_connections_are_probed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    create = socket.create_connection

    def note(*arguments: object, **options: object) -> socket.socket:
        made.append(create(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(socket, "create_connection", note)
    with Client(url) as client:
        client._http.get("/healthz")
        (own,) = made
        assert own.getsockopt(*ALIVE[:2]) == 1
        idle, every, count = (
            own.getsockopt(socket.IPPROTO_TCP, name)
            for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle + every * count <= 30, "half a minute"


def test_a_proxy_of_the_environment_is_left_to_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert read_arguments("https://example.org") is None


def test_a_unix_socket_needs_no_probes() -> None:
    assert read_arguments("unix:///run/x") == {"uds": "/run/x", "socket_options": []}
