"""What becomes of models while they change: one table. Engines are scripts here."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from logsteer.errors import APIError
from logsteer.schemas import ReloadAnswer
from logsteer_server.models import changes as changes_module
from logsteer_server.models.cache import ResultCache
from logsteer_server.models.changes import ModelChanges
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.observation.metrics import Metrics
from logsteer_server.settings import ModelSettings, Settings
from tests.server.scripted_model import ScriptedHandle, answer_as_fake

LIMIT_S = 30.0

RULES = {
    "beside: the old one answers until the new one does": (
        True,
        """
        at first    a=A b=A
        reload      a=B b=A           replaced a; unchanged b; pending a
        running     a=A a=B b=A
        found       a=A ready
        answers     a=B
        running     a=B b=A
        found       a=B ready
        """,
    ),
    "beside: the old one stays where the new one fails": (
        True,
        """
        at first    a=A
        reload      a=B
        running     a=A a=B
        fails       a=B
        running     a=A
        found       a=A ready
        noted       a its replacement failed: it is broken
        reload      a=A               unchanged a
        """,
    ),
    "in place: the old one answers its last requests, then the new one loads": (
        False,
        """
        at first    a=A
        ask         a
        reload      a=B
        found       a=A draining
        running     a=A
        finish      a
        running     a=B
        found       a=B loading
        answers     a=B
        found       a=B ready
        """,
    ),
    "in place: the old one comes back where the new one fails": (
        False,
        """
        at first    a=A
        reload      a=B
        running     a=B
        fails       a=B
        running     a=A
        answers     a=A
        found       a=A ready
        noted       a its replacement failed: it is broken
        """,
    ),
    "what never answered does not come back": (
        False,
        """
        at first    a=A
        reload      a=A b=A
        fails       b=A
        found       b=A failed
        idle
        reload      a=A b=B
        running     a=A b=B
        fails       b=B
        found       b=B failed
        """,
    ),
    "one that is removed answers its last requests": (
        False,
        """
        at first    a=A b=A
        ask         a
        reload      b=A               removed a; unchanged b; pending a
        found       -
        running     a=A b=A
        finish      a
        running     b=A
        """,
    ),
    "one that is unloaded stays so with other settings": (
        False,
        """
        at first    a=A
        unload      a
        reload      a=B               replaced a
        idle
        found       a=B unloaded
        running     -
        """,
    ),
    "what cannot be loaded is refused before the working model ends (in place)": (
        False,
        """
        at first    a=A
        reload      a=unreadable
        noted       a its replacement failed: no such directory
        found       a=A ready
        running     a=A
        """,
    ),
    "what cannot be loaded is refused before the working model ends (beside)": (
        True,
        """
        at first    a=A
        reload      a=unreadable
        noted       a its replacement failed: no such directory
        found       a=A ready
        running     a=A
        """,
    ),
}
"""By what they promise: `reload_beside`, and what happens and is so then, a line each. `name=X` is
version X of a model; behind a reload stands what its report says at once.
"""


def model(name: str, version: str = "A", **others: Any) -> ModelSettings:
    return ModelSettings(id=name, engine="fake", path=version, **others)


class LateHandle(ScriptedHandle):
    """The engine of one version of a model, which loads until it is let go."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(answer=answer_as_fake)
        self.name = f"{settings.id}={settings.path}"
        self._found, self.info = self.info, None  # type: ignore[assignment]
        self.state, self.detail = "loading", "it loads"
        self.ready.clear()
        self.runs = False

    def start(self) -> None:
        self.runs = True

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.runs, self.state = False, "unloaded"

    def come_up(self) -> None:
        self.info = self._found
        self.state, self.detail = "ready", "answers"
        self.ready.set()


class Machine:
    """Models and what changes them; `configuration` is what a reload reads."""

    def __init__(self, models: list[ModelSettings], **others: Any) -> None:
        self.handles: list[LateHandle] = []
        self._others = others
        self._asked: dict[str, Any] = {}
        self.configuration = models
        settings = self._read()
        self.models = ModelRegistry(settings, ResultCache(0), Metrics(), self._make)
        self.changes = ModelChanges(self.models, settings, self._read)

    def _read(self) -> Settings:
        return Settings(models=list(self.configuration), **self._others)

    def _make(self, settings: ModelSettings) -> LateHandle:
        self.handles.append(LateHandle(settings))
        return self.handles[-1]

    @property
    def running(self) -> list[str]:
        return sorted(one.name for one in self.handles if one.runs)

    def find(self, name: str) -> LateHandle:
        """The latest engine of a version of a model that runs."""
        return [one for one in self.handles if one.name == name and one.runs][-1]

    def show(self) -> set[str]:
        """Which versions requests find, and their states; `-` where there is none of model a."""
        found = {
            f"{name}={own.settings.path} {own.status[0]}" for name, own in self.models.by_id.items()
        }
        return found | ({"-"} if "a" not in self.models.by_id else set())

    async def begin(self) -> None:
        self.models.start()
        for handle in self.handles:
            handle.come_up()
        await until(lambda: all(own.is_ready for own in self.models.by_id.values()))

    async def reload(self, *models: ModelSettings, wait_s: float = 0.0) -> ReloadAnswer:
        self.configuration = list(models)
        return await self.changes.reload(wait_s)

    async def do(self, verb: str, text: str, told: str) -> None:
        """Do what a line of the table says, or wait until it is so."""
        match verb:
            case "reload":
                report = await self.reload(*read_models(text))
                check_report(report, told)
            case "running":
                await until(lambda: self.running == sorted(text.replace("-", "").split()))
            case "found":
                await until(lambda: text in self.show())
            case "answers":
                self.find(text).come_up()
            case "fails":
                handle = self.find(text)
                handle.state, handle.detail = "failed", "it is broken"
            case "ask":
                self._asked[text] = self.models.by_id[text].admission.enter()
            case "finish":
                self._asked.pop(text).release()
            case "unload":
                await self.changes.unload(self.models.by_id[text], LIMIT_S)
            case "noted":
                name, _, note = text.partition(" ")
                await until(lambda: self.models.by_id[name].note == note)
            case "idle":
                await until(lambda: not self.changes._running)
            case _:
                raise AssertionError(verb)


def read_models(text: str) -> list[ModelSettings]:
    return [model(*part.split("=")) for part in text.split()]


def check_report(report: ReloadAnswer, told: str) -> None:
    for part in filter(None, told.split("; ")):
        kind, *names = part.split()
        assert getattr(report, kind) == names, kind


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_so():
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is on its way here that a replaced model would have to wait for; only the version
    `unreadable` cannot be loaded.
    """

    def check(wanted: ModelSettings, _settings: Settings) -> None:
        if wanted.path == "unreadable":
            raise ValueError("no such directory")

    monkeypatch.setattr(changes_module, "QUIET_S", 0.01)
    monkeypatch.setattr(changes_module, "check_files", check)


@pytest.mark.parametrize("rule", RULES)
async def test_a_change_ends_as_the_table_says(rule: str) -> None:
    beside, lines = RULES[rule]
    machine = None
    for line in lines.strip().splitlines():
        verb, text, told = re.fullmatch(r" *(at first|\S+) *(.*?)(?:  +(.*))?", line).groups()  # type: ignore[union-attr]
        if machine is None:
            machine = Machine(read_models(text), reload_beside=beside)
            await machine.begin()
        else:
            await machine.do(verb, text, told or "")


async def test_a_change_during_another_one_is_refused_and_changes_nothing() -> None:
    machine = Machine([model("a"), model("b")], reload_beside=True)
    await machine.begin()
    asked = machine.models.by_id["a"].admission.enter()
    await machine.reload(model("a", "B"), model("b"))
    await until(lambda: len(machine.running) == 3)
    a, b = machine.models.by_id.values()
    assert (a.note, b.note) == ("its replacement loads", "")
    for refused in (machine.changes.unload(a, 0.0), machine.reload(model("c"))):
        with pytest.raises(APIError, match="Another change of model a") as caught:
            await refused
        assert caught.value.retryable
    await machine.changes.unload(b, LIMIT_S)
    assert machine.show() == {"a=A ready", "b=A unloaded"}
    machine.find("a=B").come_up()
    asked.release()
    await until(lambda: machine.running == ["a=B"])


async def test_the_report_says_what_failed_in_time_and_has_the_order_of_the_configuration() -> None:
    machine = Machine([model("a"), model("b")])
    await machine.begin()
    wanted = model("c"), model("b", required=False), model("a", "unreadable")
    report = await machine.reload(*wanted, wait_s=0.1)
    assert (report.added, report.replaced) == (["c"], ["b", "a"])
    assert (report.pending, report.failed) == (["c"], {"a": "no such directory"})
    assert list(machine.models.by_id) == ["c", "b", "a"]
    assert not machine.models.by_id["b"].settings.required
    assert machine.running == ["a=A", "b=A", "c=A"]


async def test_a_model_is_loaded_once() -> None:
    machine = Machine([model("a")])
    await machine.begin()
    own = machine.models.by_id["a"]
    await machine.changes.unload(own, LIMIT_S)
    for _ in range(2):
        await machine.changes.load(own, 0.0)
    assert machine.running == ["a=A"]
    machine.find("a=A").come_up()
    await until(lambda: own.is_ready)
