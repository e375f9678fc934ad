"""What metrics read at a scrape: of models, engines and stores."""

from collections.abc import Sequence
from dataclasses import dataclass

from logsteer_server.contract.engine import EngineReading, StepCounts


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
    cache_file_bytes: int | None = None
