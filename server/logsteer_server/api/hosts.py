"""Which names this server answers to, and whose pages may use it.

A page of another site can have a browser send requests to a server on the same machine, and, once
it has its own name point to that machine, read the answers. A request for a name that is not this
server's is such a page's; so is one that computes or changes something and comes from its origin.
"""

import ipaddress
import socket

from starlette.datastructures import Headers

from logsteer.errors import APIError, api_error
from logsteer_server.settings import Settings

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""What these answer is nothing that a page of another origin could read."""
ANY = "*"


class AllowedHosts:
    """The names and origins of a server.

    An address is always allowed: what a browser asks for by its address has no name that could be
    made to point elsewhere. Where a key is needed, or on a Unix domain socket, pages get nowhere,
    and every name is allowed unless `allowed_hosts` says which.
    """

    def __init__(self, settings: Settings, *, needs_key: bool) -> None:
        given = settings.allowed_hosts
        is_out_of_reach = needs_key or settings.uds is not None
        self._allows_any = is_out_of_reach if given is None else ANY in given
        own = {"localhost", settings.host, socket.gethostname(), *(given or ())}
        self._names = {name.lower().rstrip(".") for name in own}
        self._origins = {origin.lower().rstrip("/") for origin in settings.allowed_origins}

    def check(self, method: str, headers: Headers) -> APIError | None:
        """Return why a request is refused, if it is."""
        host = headers.get("host", "").strip().lower()
        name = _drop_port(host)
        if not (self._allows_any or not host or self._is_own(name)):
            detail = f"This server is not called {name!r}: add the name to allowed_hosts."
            return api_error("forbidden", detail)
        origin = headers.get("origin", "").strip().lower().rstrip("/")
        if origin and method not in SAFE_METHODS and not self._is_own_origin(origin, host):
            detail = (
                f"A page of {origin} sent this to {host or 'this server'}: add the origin to "
                "allowed_origins."
            )
            return api_error("forbidden", detail)
        return None

    def _is_own(self, name: str) -> bool:
        name = name.rstrip(".")
        return name in self._names or name.endswith(".localhost") or _is_address(name)

    def _is_own_origin(self, origin: str, host: str) -> bool:
        return origin in self._origins or origin in (f"http://{host}", f"https://{host}")


def _drop_port(host: str) -> str:
    """Return `[::1]:8000` as `::1`, `name:8000` as `name`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
