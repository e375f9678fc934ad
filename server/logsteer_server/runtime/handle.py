"""What a resident model needs of its engine, wherever that runs: here, several times, or remotely.

`supervisor.LocalEngine` runs it in processes of this machine; tests have one that is a script.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from logsteer.schemas import ModelState
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Job
from logsteer_server.contract.lane import Lane
from logsteer_server.contract.results import ResultPart
from logsteer_server.observation.readings import EngineStatus


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """What one replica of an engine is at right now; a lane names it by its `number`.

    `num_jobs` are those that it has.
    """

    state: ModelState
    detail: str
    restarts: int
    num_jobs: int = 0
    number: int = 0


class ContentSource(Protocol):
    """Brings what jobs name in stores to the machine that their engine runs on."""

    def open(self, jobs: Sequence[Job]) -> AbstractAsyncContextManager[Sequence[Job]]:
        """Give the jobs with files of this machine, which stay for so long. Errors: APIError."""
        ...


class EngineHandle(Protocol):
    """Run jobs on a model's engine, and keep that running.

    `ready` is set while jobs are taken; `info` is None until they first were. `given_up` says that
    the engine is not started any more, because it died too often.
    """

    @property
    def state(self) -> ModelState:
        """Whether jobs are taken, and if not, why."""
        ...

    @property
    def detail(self) -> str:
        """What the engine does, or what is wrong with it."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """What the engine is."""
        ...

    @property
    def ready(self) -> asyncio.Event:
        """Set while jobs are taken."""
        ...

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        ...

    @property
    def given_up(self) -> bool:
        """Whether it is not started any more."""
        ...

    @property
    def answers_elsewhere(self) -> bool:
        """Whether the engine answers another process, and so is about to answer here."""
        ...

    def start(self) -> None:
        """Begin to start the engine; call it from the event loop that will use the handle."""
        ...

    def stop(self) -> None:
        """Take no more calls; those that still wait get an error."""
        ...

    async def close(self) -> None:
        """End the engine; calls that still wait get an error."""
        ...

    def check_ready(self) -> EngineInfo:
        """Return what the engine is. Errors: APIError, the one that a caller gets now."""
        ...

    def run(
        self, jobs: Sequence[Job], lane: Lane | None = None
    ) -> AsyncGenerator[ResultPart, None]:
        """Yield the results of jobs as they come, by the jobs' indices and in any order.

        Leaving early cancels the rest. Errors: APIError, where a job failed or the engine died.
        """
        ...

    def read(self) -> Sequence[ReplicaReading]:
        """Return what each replica is at right now; one at least."""
        ...

    def observe(self) -> Sequence[EngineStatus]:
        """Return what the process of each replica is at, for metrics."""
        ...
