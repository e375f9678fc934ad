"""Ports for programs that take no port 0."""

import random
import socket

NOT_GIVEN_OUT = range(20_000, 32_000)
"""Linux gives out those from 32,768 on, and Ray its workers those from 10,002 to 19,999."""


def find_port() -> int:
    """Return a port of this machine that is free, and that nobody gets who asks for any port."""
    for port in random.SystemRandom().sample(NOT_GIVEN_OUT, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("a hundred ports are in use")
