"""Sockets that the server listens on, and who may reach them."""

import errno
import ipaddress
import os
import resource
import socket
from pathlib import Path

from logsteer_server.settings import ConfigurationError, Settings

MOST_DESCRIPTORS = 2**16


def check_exposure(settings: Settings) -> None:
    """Refuse to let everybody in by accident. Errors: ConfigurationError.

    Without keys, only this machine may reach the server, unless the settings say otherwise.
    """
    needs_key = settings.api_key is not None or settings.key_file is not None
    if needs_key or settings.insecure or settings.uds is not None or is_loopback(settings.host):
        return
    raise ConfigurationError(
        f"other machines can reach host {settings.host}, without a key: set key_file or api_key, "
        "listen on 127.0.0.1, or say --insecure where something else keeps strangers out"
    )


def is_loopback(host: str) -> bool:
    """Return whether a host is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED


def listen_unix(path: Path) -> socket.socket:
    """Return a listening socket that its owner alone may connect to, in place of a left-over one.

    Errors: OSError for a socket that a server answers on, and for another file.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
    except OSError:
        listener.close()
        raise
    return listener


def raise_descriptor_limit() -> int:
    """Have this process open as many files as it may, and return how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Errors: OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY where the protocol is named; without it every answer on a connection
    # but the first waits 40 ms for the caller's acknowledgement of its headers.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def open_listener(settings: Settings) -> socket.socket:
    """Return the service's listening socket. Errors: ConfigurationError."""
    place: object = settings.uds or f"{settings.host}:{settings.port}"
    try:
        if settings.uds is not None:
            return listen_unix(settings.uds)
        return listen_at(settings.host, settings.port)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        setting = "--port" if settings.uds is None else "--uds"
        detail = f"cannot listen on {place}: {why}; choose another {setting}"
        raise ConfigurationError(detail) from error
