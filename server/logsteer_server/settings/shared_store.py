"""Where the stores are: on this machine, or behind a URL that several machines share."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class SharedStore:
    """Where the store of several machines is, and how this one asks it."""

    url: str
    options: Mapping[str, Any] = field(repr=False)
    directory: Path
    store_directory: Path | None
    cache_bytes: int
    timeout_s: float
    retries: int
    fresh_s: float
    stale_s: float
    grace_s: float
    threads: int
    max_calls: int

    @property
    def path(self) -> Path:
        """The directory of the machine that asks, in which contents are kept that were fetched."""
        return find_store_path(self.directory, self.store_directory)


def find_store_path(directory: Path, store_directory: Path | None) -> Path:
    """Return the directory of the stores: the one that is named, or one of this machine's own."""
    if store_directory is not None:
        return directory / store_directory.expanduser()
    data = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification has relative paths ignored.
    home = Path(data) if Path(data).is_absolute() else Path.home() / ".local" / "share"
    return home / "logsteer"
