"""Fake engines that stay where they are until a test lets them go on: no pause is long enough."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLD_FILE = "hold"
"""The file by which the engines of a server are held, in the directory of its configuration."""
HOLD = 1300
"""A token: a step with it does not end while the engine's `hold_file` exists, as no start does."""


def may_hold(file: Path) -> dict[str, object]:
    """Arguments of a fake model that this file holds."""
    return {"hold_file": str(file), "hold_id": HOLD}


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Hold a file's engines at their next start or step, until it is gone or the block ends.

    Those of `may_hold` are held at steps with HOLD alone.
    """
    file.touch()
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
