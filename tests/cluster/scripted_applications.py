"""Applications, ingresses and a kept state that are scripts, and a coordinator of these.

No Ray runs, but what is imported here needs it: without it, files that import this are skipped.
"""

import asyncio
import pickle
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from logsteer_server.contract.jobs import JobFailure
from logsteer_server.settings import ModelSettings, Settings
from tests.own_time import run_in_own_time

pytest.importorskip("ray")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, as it is imported
    from logsteer_server.cluster.absence import Absence
    from logsteer_server.cluster.applications import AbsenceError
    from logsteer_server.cluster.coordinator import Accepted, Coordinator
    from logsteer_server.cluster.wanted import WantedModels


def model(name: str, **others: Any) -> ModelSettings:
    return ModelSettings(id=name, engine="fake", path="p", **others)


OLD, NEW, THIRD = model("a"), model("a", dtype="float64"), model("a", dtype="float16")


class ScriptedApplications:
    """Which run, in the order of what was done; those in `broken` do not come up.

    Where `may_pass` is set, they say that they may at another time. There is no room for
    those in `waiting`.
    """

    def __init__(self, has_room: bool = True) -> None:
        self.done: list[str] = []
        self.running: set[str] = set()
        self.broken: set[str] = set()
        self.waiting: set[str] = set()
        self.may_pass = False
        self.has_room = has_room
        self.may_settle = asyncio.Event()
        self.may_settle.set()

    def name(self, settings: ModelSettings) -> str:
        return f"{settings.id}-{settings.dtype}"

    async def list(self) -> set[str]:
        return set(self.running)

    async def deploy(self, settings: ModelSettings) -> None:
        self.done.append(f"deploy {self.name(settings)}")
        self.running.add(self.name(settings))

    async def end(self, name: str) -> None:
        self.done.append(f"end {name}")
        self.running.discard(name)

    async def settle(self, settings: ModelSettings) -> None:
        await self.may_settle.wait()
        await until(lambda: self.name(settings) not in self.waiting)
        if self.name(settings) in self.broken:
            raise AbsenceError(Absence("it is broken", self.may_pass))

    def fits_beside(self, old: ModelSettings, wanted: ModelSettings) -> bool:
        return self.has_room


class KeptHere:
    """The state in this process, as it is when it is read again."""

    def __init__(self) -> None:
        self.content: bytes | None = None

    def read(self) -> WantedModels | None:
        return None if self.content is None else pickle.loads(self.content)

    def write(self, wanted: WantedModels) -> None:
        self.content = pickle.dumps(wanted)


class ScriptedIngress:
    """Follows each revision at once, or where it `holds`, when it is let go.

    `notes` are those of models that failed.
    """

    def __init__(self, coordinator: Coordinator, name: str, done: list[str]) -> None:
        self.states: list[str] = []
        self.notes: list[str] = []
        self.may_follow = asyncio.Event()
        self.may_follow.set()
        self._task = asyncio.create_task(self._watch(coordinator, name, done))

    async def _watch(self, coordinator: Coordinator, name: str, done: list[str]) -> None:
        revision = 0
        while True:
            wanted = await coordinator.watch(name, revision, revision)
            shown = [f"{own.settings.dtype} {own.state}" for own in wanted.by_id.values()]
            self.states.append(", ".join(shown))
            self.notes += [own.note for own in wanted.by_id.values() if own.state == "failed"]
            await self.may_follow.wait()
            revision = wanted.revision
            done.append(f"{name} follows {self.states[-1]}")

    def die(self) -> None:
        self._task.cancel()


async def make(
    applications: ScriptedApplications,
    kept: KeptHere,
    *models: ModelSettings,
    born: str = "b",
    **others: Any,
) -> Coordinator:
    found = Coordinator.__new__(Coordinator)
    settings = Settings(models=list(models), model_drain_s=5.0, **others)
    await Coordinator.__init__(found, settings, applications, born, 1, kept)  # type: ignore[arg-type, func-returns-value, misc]
    return found


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


def script(test: Callable[[], Awaitable[None]]) -> None:
    run_in_own_time(asyncio.wait_for(test(), 30))


def accept(found: Accepted | JobFailure) -> Accepted:
    assert isinstance(found, Accepted), found
    return found
