"""How a client reaches its server."""

import os
import socket
from collections.abc import Callable
from typing import Any
from urllib.request import getproxies

import httpx

from logsteer._exchange import Encoding, RetryPolicy, Terms
from logsteer._upload import UploadBody
from logsteer._version import __version__
from logsteer.errors import LogsteerError

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
UNIX = "unix://"
DEFAULT_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
"""Seconds. Long, as a corpus takes long; short for connecting, so that a wrong address shows."""


_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""After 15 s of silence the peer's machine is asked every 5 s whether it is there, three times."""


class ClientSettings:
    """The settings that both clients share; `model` is the default model of every request.

    LOGSTEER_BASE_URL, _API_KEY and _MODEL are what is not given. `http` are the arguments of
    `httpx.Client` and `httpx.AsyncClient`; `transport` those of httpx's transport, None where
    httpx is to make its own.

    Raises LogsteerError for an invalid base URL, ValueError for a negative `max_retries` or an
    unknown `encoding`.
    """

    def __init__(
        self,
        base_url: str | None,
        api_key: str | None,
        timeout: float | httpx.Timeout | None,
        max_retries: int,
        model: str | None,
        encoding: Encoding,
    ) -> None:
        if max_retries < 0:
            raise ValueError(f"max_retries is {max_retries}; give 0 for no retries")
        if encoding not in ("json", "msgpack"):
            raise ValueError(f"encoding is {encoding!r}; give 'json' or 'msgpack'")
        given = base_url or os.environ.get("LOGSTEER_BASE_URL") or DEFAULT_BASE_URL
        url, uds = _read_address(given)
        headers = {"User-Agent": f"logsteer/{__version__}"}
        if key := api_key or os.environ.get("LOGSTEER_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        if timeout is None:
            timeout = DEFAULT_TIMEOUT
        self.http: dict[str, Any] = {"base_url": url, "headers": headers, "timeout": timeout}
        self.transport = _choose_transport(uds)
        self.model = model or os.environ.get("LOGSTEER_MODEL") or None
        self._encoding = encoding
        self._max_retries = max_retries

    def terms(
        self, build: Callable[..., httpx.Request], chunks: Callable[[UploadBody], Any]
    ) -> Terms:
        """Return the terms of an exchange: `build` makes a request, `chunks` reads an upload."""
        policy = RetryPolicy(self._max_retries)
        return Terms(build, chunks, self.http["base_url"], self._encoding, policy)


def _read_address(url: str) -> tuple[str, str | None]:
    """Return the base URL, and the Unix domain socket of a `unix://` address."""
    if url.startswith(UNIX):
        if not (uds := url.removeprefix(UNIX)).startswith("/"):
            raise LogsteerError(f"base_url {url} needs a path from the root: {UNIX}/run/…")
        return "http://localhost", uds
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as invalid:
        raise LogsteerError(f"base_url {url!r} is not a URL: {invalid}") from invalid
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise LogsteerError(f"base_url {url!r} needs the form http://host:port or unix:///path")
    return url, None


def _choose_transport(uds: str | None) -> dict[str, Any] | None:
    """Return the arguments of a transport that asks a silent peer whether it is there.

    A server's machine that is gone without a word would be waited for as long as for an answer.
    httpx heeds proxies of the environment only in a transport of its own.
    """
    if uds is not None:
        return {"uds": uds, "socket_options": []}
    if getproxies():
        return None
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in _PROBES.items():
        if hasattr(socket, name):  # not on every system
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return {"uds": None, "socket_options": options}
