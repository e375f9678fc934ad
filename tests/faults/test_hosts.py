"""Which names and pages a server answers to, and where it listens."""

import asyncio
import json
import socket
import stat
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
from tests.conftest import Server, fake_model
from tests.faults.processes import wait_for
from tests.servers import Configuration

ITEM = {"context_ids": [5], "target_ids": [[6]]}
EVIL = "evil.example"


def make_settings(**given: Any) -> Settings:
    return Settings(models=[ModelSettings(id="a", path="p")], **given)


@pytest.fixture
def http(fake_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fake_server.url, timeout=30) as client:
        yield client


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
