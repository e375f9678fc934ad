"""Files that every rank of an engine reads, wherever it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.contract.jobs import Job, JobFailure
from logsteer_server.engines.exchanged_files import NOT_SHARED, list_files


class RankFiles:
    """Refuse jobs whose files are not on every node of a replica.

    Without it a rank that lacks the file that the others read would leave their common work, and
    they would wait for it for ever. What was found in a directory once is taken to be shared.
    """

    def __init__(self, call_workers: Callable[..., list[Any]], spec: EngineSpec) -> None:
        self._call_workers = call_workers
        self._has_nodes = spec.node is not None
        self._shared: set[Path] = set()

    def has_everywhere(self, path: str, *elsewhere: str) -> bool:
        """Return whether all ranks see a file; on one node nobody is asked.

        `elsewhere` are its paths on the other nodes; without them it has one path on all.
        """
        if not self._has_nodes:
            return True
        directory = Path(path).parent
        if not elsewhere and directory in self._shared:
            return True
        if not all(self._call_workers("has_file", (path, *elsewhere))):
            return False
        if not elsewhere:
            self._shared.add(directory)
        return True

    def refuse(self, job: Job) -> JobFailure | None:
        """Return why a job that compares two models cannot use their files; None where it can."""
        return None if all(map(self.has_everywhere, list_files(job))) else NOT_SHARED
