"""What becomes of changes of models when another one comes: one table. Engines are scripts here."""

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
    "a model that an earlier reload has begun to load goes on loading": (
        "auto",
        """
        at first    a=A
        reload      a=A large=A
        running     a=A large=A
        reload      large=A c=A       added c; removed a; unchanged large
        running     large=A c=A
        answers     large=A
        answers     c=A
        ended       failed -
        """,
    ),
    "what loads and is wanted no more is given up, and who waits for it is told": (
        "auto",
        """
        at first    a=A
        reload      a=A large=A other=A
        running     a=A large=A other=A
        reload      a=A other=B       removed large; replaced other
        running     a=A other=B
        answers     other=B
        ended       failed -; failed of 1 large other
        found       other=B ready
        """,
    ),
    "beside: the old one answers, and stays where it is wanted again": (
        "always",
        """
        at first    a=A b=A
        reload      a=B b=A
        running     a=A a=B b=A
        reload      a=A b=A           replaced a
        running     a=A b=A
        ended       failed -; failed of 1 a
        found       a=A ready
        """,
    ),
    "beside: what loads already goes on": (
        "always",
        """
        at first    a=A b=A
        reload      a=B b=A
        running     a=A a=B b=A
        reload      a=B b=A           unchanged a b
        answers     a=B
        ended       failed -; failed of 1 -
        running     a=B b=A
        """,
    ),
    "beside: another one loads in place of what loads": (
        "always",
        """
        at first    a=A b=A
        reload      a=B b=A
        running     a=A a=B b=A
        reload      a=C b=A           replaced a
        running     a=A a=C b=A
        found       a=A ready
        answers     a=C
        ended       failed -; failed of 1 a
        running     a=C b=A
        """,
    ),
    "beside: a model that goes takes what loads along": (
        "always",
        """
        at first    a=A b=A
        reload      a=B b=A
        running     a=A a=B b=A
        reload      b=A               removed a
        ended       failed -; failed of 1 a
        running     b=A
        """,
    ),
    "in place: what has ended is started again where it is wanted again": (
        "never",
        """
        at first    a=A b=A
        reload      a=B b=A
        running     a=B b=A
        reload      a=A b=A
        running     a=A b=A
        found       a=A loading
        answers     a=A
        ended       failed -
        found       a=A ready
        """,
    ),
    "in place: another one loads in place of what loads": (
        "never",
        """
        at first    a=A b=A
        reload      a=B b=A
        running     a=B b=A
        reload      a=C b=A
        running     a=C b=A
        answers     a=C
        ended       failed -
        found       a=C ready
        """,
    ),
    "in place: a model that goes takes what loads along": (
        "never",
        """
        at first    a=A b=A
        reload      a=B b=A
        running     a=B b=A
        reload      b=A
        ended       failed -
        running     b=A
        """,
    ),
    "one that answers its last requests takes new ones again": (
        "never",
        """
        at first    a=A
        ask         a
        reload      a=B
        found       a=A draining
        reload      a=A
        ended       failed -
        found       a=A ready
        running     a=A
        """,
    ),
    "the one that answered last comes back, whatever was given up between": (
        "never",
        """
        at first    a=A
        reload      a=B
        running     a=B
        reload      a=C
        running     a=C
        fails       a=C
        ended       failed a
        running     a=A
        answers     a=A
        found       a=A ready
        reload      a=C               replaced a
        """,
    ),
    "a model that comes back waits for the end of what it was": (
        "auto",
        """
        at first    a=A b=A
        ask         a
        reload      b=A
        found       -
        reload      a=B b=A           added a
        found       a=B loading
        running     a=A b=A
        finish      a
        running     a=B b=A
        answers     a=B
        ended       failed -
        found       a=B ready
        """,
    ),
    "one that loads may be unloaded, and a reload waits for an unload": (
        "auto",
        """
        at first    a=A
        reload      a=A large=A
        unload      large
        found       large=A unloaded
        ask         a
        unload      a
        reload      a=B large=B       replaced a large
        found       a=A draining
        finish      a
        ended       failed -
        found       a=B unloaded
        found       large=B unloaded
        running     -
        """,
    ),
    "what cannot be loaded is refused before the working model ends (in place)": (
        "never",
        """
        at first    a=A
        reload      a=unreadable      replaced a
        ended       failed a
        found       a=A ready
        running     a=A
        """,
    ),
    "what cannot be loaded is refused before a working model ends that has replaced another": (
        "never",
        """
        at first    a=A
        reload      a=B
        running     a=B
        answers     a=B
        ended       failed -
        reload      a=unreadable      replaced a
        ended       failed a
        found       a=B ready
        running     a=B
        """,
    ),
    "what cannot be loaded is refused before the working model ends (beside)": (
        "always",
        """
        at first    a=A
        reload      a=unreadable      replaced a
        ended       failed a
        found       a=A ready
        running     a=A
        """,
    ),
    "a load given up for one that cannot be loaded: the one that answered last comes back": (
        "never",
        """
        at first    a=A
        reload      a=B
        running     a=B
        reload      a=unreadable
        running     a=unreadable
        fails       a=unreadable
        ended       failed a
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
        self.reports: list[ReloadAnswer] = []
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
        self.reports.append(await self.changes.reload(wait_s))
        return self.reports[-1]

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
                wait_s = 0.0 if text in self._asked else LIMIT_S
                await self.changes.unload(self.models.by_id[text], wait_s)
            case "ended":
                await until(lambda: not self.reports[-1].pending)
                for part in text.split("; "):
                    _, number, names = re.fullmatch(r"failed( of \d)? ?(.*)", part).group(0, 1, 2)  # type: ignore[union-attr]
                    report = self.reports[int(number[-1]) - 1 if number else -1]
                    assert sorted(report.failed) == names.replace("-", "").split()
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

    def check(_old: ModelSettings, wanted: ModelSettings, _settings: Settings) -> None:
        if wanted.path == "unreadable":
            raise ValueError("no such directory")

    monkeypatch.setattr(changes_module, "QUIET_S", 0.01)
    monkeypatch.setattr(changes_module, "check_loadable", check)


@pytest.mark.parametrize("rule", RULES)
async def test_a_change_ends_as_the_table_says(rule: str) -> None:
    beside, lines = RULES[rule]

    machine = None
    for line in lines.strip().splitlines():
        verb, text, told = re.fullmatch(r" *(\S+(?: first)?) +(.*?)(?:  +(.*))?", line).groups()  # type: ignore[union-attr]
        if machine is None:
            machine = Machine(read_models(text), reload_beside=beside)
            await machine.begin()
        else:
            await machine.do(verb, text, told or "")


async def test_a_card_says_what_became_of_its_replacement() -> None:
    machine = Machine([model("a")], reload_beside="always")
    await machine.begin()
    await machine.reload(model("a", "unreadable"))
    found = machine.models.by_id["a"]
    await until(lambda: found.note == "its replacement failed: no such directory")
    await machine.reload(model("a", "B"))
    await until(lambda: found.note == "its replacement loads")
    await machine.reload(model("a"))
    await until(lambda: found.note == "")


async def test_who_asks_meanwhile_is_told_why_and_a_second_change_is_refused() -> None:
    machine = Machine([model("a"), model("b")])
    await machine.begin()
    asked = machine.models.by_id["a"].admission.enter()
    await machine.reload(model("b"))
    await until(lambda: "a" not in machine.models.by_id)
    await machine.reload(model("a"), model("b"))
    with pytest.raises(APIError, match="has to end first") as caught:
        machine.models.by_id["a"].require()
    assert caught.value.retryable
    with pytest.raises(APIError, match="Another change of model a"):
        await machine.changes.unload(machine.models.by_id["a"], 0.0)
    asked.release()


async def test_required_alone_changes_what_loads_without_a_new_start() -> None:
    machine = Machine([model("a")], reload_beside="always")
    await machine.begin()
    await machine.reload(model("a", "B"), model("c"))
    await until(lambda: len(machine.running) == 3)
    b, c = machine.find("a=B"), machine.find("c=A")
    report = await machine.reload(model("a", "B", required=False), model("c", required=False))
    assert (report.replaced, sorted(report.pending)) == (["a", "c"], ["a", "c"])
    b.come_up()
    c.come_up()
    await until(lambda: not report.pending)
    assert [own.settings.required for own in machine.models.by_id.values()] == [False, False]
    assert machine.running == ["a=B", "c=A"]
    assert (machine.find("a=B"), report.failed) == (b, {})


async def test_of_reloads_at_once_the_last_one_counts() -> None:
    machine = Machine([model("a")], reload_beside="always")
    await machine.begin()
    reloads = []
    for version in "BCDE":
        reloads.append(asyncio.create_task(machine.reload(model("a", version))))
        await asyncio.sleep(0)
    await asyncio.gather(*reloads)
    await until(lambda: machine.running == ["a=A", "a=E"])
    machine.find("a=E").come_up()
    await until(lambda: "a=E ready" in machine.show() and machine.running == ["a=E"])
    await machine.reload(model("b"), model("a", "E"))
    assert list(machine.models.by_id) == ["b", "a"], "as the configuration has them"


async def test_loads_at_once_start_one_engine() -> None:
    machine = Machine([model("a")])
    await machine.begin()
    own = machine.models.by_id["a"]
    await machine.changes.unload(own, LIMIT_S)
    await asyncio.gather(*(machine.changes.load(own, 0.0) for _ in range(3)))
    assert machine.running == ["a=A"]
    machine.find("a=A").come_up()
    await until(lambda: own.is_ready)
