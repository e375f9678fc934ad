"""What metrics read at a scrape: of models, engines, their processes, and stores."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from logsteer_server.contract.engine import EngineReading, StepCounts

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_FAMILY = 64
"""Processes that are read for one engine: its own and those of its ranks."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine process, as the HTTP process sees it.

    `replica` tells the engines of a model apart. `pid` is None while no process runs,
    `heartbeat_age_s` until the first heartbeat has come. `queued`: jobs that wait here for room in
    the engine. `steps` are those of the process that runs now.
    """

    replica: str
    restarts: int
    queued: int
    pid: int | None = None
    heartbeat_age_s: float | None = None
    reading: EngineReading | None = None
    steps: StepCounts | None = None


@dataclass(frozen=True, slots=True)
class ModelReading:
    """What a model is at right now; `pending_limit` is what `pending_tokens` may come to."""

    model: str
    pending_tokens: int
    pending_limit: int
    is_ready: bool
    engines: Sequence[EngineStatus] = ()


@dataclass(frozen=True, slots=True)
class StoreReading:
    """What the stores of a kind hold: bytes in those of everybody and of keys, and their limit."""

    kind: str
    shared_bytes: int
    keys_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class DiskReading:
    """What lies on disk; None where it was not read yet, or there is none."""

    stores: Sequence[StoreReading] = ()
    free_bytes: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """Processor seconds, and bytes that are resident: those of a family may share some."""

    cpu_s: float
    resident_bytes: int


def read_family(pid: int) -> ProcessReading | None:
    """Return what a process and those that it has started take; None where there is none.

    Elsewhere than on Linux nothing tells.
    """
    found = [reading for member in _list_family(pid) if (reading := _read(member)) is not None]
    if not found:
        return None
    return ProcessReading(
        sum(reading.cpu_s for reading in found), sum(reading.resident_bytes for reading in found)
    )


def _list_family(pid: int) -> Iterator[int]:
    """Yield a process and those below it, as far as their first threads have started them."""
    waiting = [pid]
    for _ in range(MAX_FAMILY):
        if not waiting:
            return
        member = waiting.pop()
        yield member
        with suppress(OSError):
            text = Path(f"/proc/{member}/task/{member}/children").read_text()
            waiting += map(int, text.split())


def _read(pid: int) -> ProcessReading | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # Fields 14, 15 and 24 of proc(5), of which the first two are in front of the bracket.
        return ProcessReading((int(fields[11]) + int(fields[12])) / TICKS, int(fields[21]) * PAGE)
    except (OSError, IndexError, ValueError):
        return None
