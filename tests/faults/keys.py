"""Keys for tests: a file of them, a server that asks for them, and who calls with which."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from logsteer.schemas import KeyScope
from logsteer_server.contract.jobs import Priority
from logsteer_server.keys.caller import KeyLimits
from logsteer_server.keys.keyring import change_keys, make_key
from tests.servers import Configuration, Server

START_TIMEOUT_S = 300


def add_key(
    path: Path, name: str, *scopes: KeyScope, priority: Priority = "interactive", **limits: Any
) -> str:
    """Add a key to a file; its token."""
    with change_keys(path) as keys:
        entry, token = make_key(name, scopes, KeyLimits(**limits), priority)
        keys.append(entry)
    return token


@contextmanager
def serve(config: Configuration, directory: Path) -> Iterator[Server]:
    """A server that is ready, and ends with the block; to ask whether it is takes no key."""
    directory.mkdir(exist_ok=True)
    server = Server.start(config, directory)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while httpx.get(f"{server.url}/readyz", timeout=60).status_code != 200:
            assert time.monotonic() < deadline and ": failed" not in server.output, server.output
            time.sleep(0.1)
        yield server
    finally:
        server.stop()


def connect(server: Server, token: str | None, **headers: str) -> httpx.Client:
    """An HTTP client with a key."""
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return httpx.Client(base_url=server.url, headers=headers, timeout=30)
