"""Where a Ray of a process' own lives: in a directory that goes with it, or at the next start."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from logsteer_server.engines.scratch import ScratchDirectory, sweep

PARENT = Path("/tmp")  # noqa: S108 - the directory below it is made by mkdtemp
"""Paths of the sockets below it may have 107 characters, which a longer $TMPDIR would take."""
NODE_CPUS = 64
"""Logical ones of a node: what is to run here is said by arguments, not counted against cores."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # It would kill actors for what other programs of this machine take.
    "RAY_memory_monitor_refresh_ms": "0",
}


@contextmanager
def hold_ray_directory() -> Iterator[str]:
    """Give the Ray that is started in the block a directory, and remove it afterwards.

    Those that killed processes have left go first.
    """
    sweep(PARENT)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with ScratchDirectory(PARENT) as directory:
        yield str(directory)
