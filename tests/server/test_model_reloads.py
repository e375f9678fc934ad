"""Reloads on one machine that come while an earlier change is at work; engines are scripts here."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from logsteer.errors import APIError
from logsteer_server.models import changes as changes_module
from logsteer_server.models.cache import ResultCache
from logsteer_server.models.changes import ModelChanges, ReloadReport
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.observation.metrics import Metrics
from logsteer_server.settings import ModelSettings, Settings
from tests.server.scripted_model import ScriptedHandle, answer_as_fake

LIMIT_S = 30.0


def model(name: str, version: str = "A", **others: Any) -> ModelSettings:
    return ModelSettings(id=name, engine="fake", path=version, **others)


class LateHandle(ScriptedHandle):
    """The engine of one version of a model, which loads until it is let go."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(answer=answer_as_fake)
        self.name = f"{settings.id} {settings.path}"
        self._found, self.info = self.info, None  # type: ignore[assignment]
        self.state, self.detail = "loading", "it loads"
        self.ready.clear()
        self.begun = self.closed = False

    def start(self) -> None:
        self.begun = True

    async def close(self) -> None:
        self.closed, self.state = True, "unloaded"

    def come_up(self) -> None:
        self.info = self._found
        self.state, self.detail = "ready", "answers"
        self.ready.set()

    def fail(self) -> None:
        self.state, self.detail = "failed", "it is broken"


class Machine:
    """Models and what changes them; `configuration` is what a reload reads."""

    def __init__(self, *models: ModelSettings, **others: Any) -> None:
        self.handles: list[LateHandle] = []
        self._others = others
        self.configuration = models
        settings = self._read()
        self.models = ModelRegistry(settings, ResultCache(0), Metrics(), self._make)
        self.changes = ModelChanges(self.models, settings, self._read)

    def _read(self) -> Settings:
        return Settings(models=list(self.configuration), **self._others)

    def _make(self, settings: ModelSettings) -> LateHandle:
        handle = LateHandle(settings)
        self.handles.append(handle)
        return handle

    async def begin(self) -> None:
        await self.changes.start(None)
        for handle in self.handles:
            handle.come_up()
        await until(lambda: all(own.is_ready for own in self.models.by_id.values()))

    async def reload(self, *models: ModelSettings, wait_s: float = 0.0) -> ReloadReport:
        self.configuration = models
        return await self.changes.reload(wait_s)

    def find(self, name: str) -> LateHandle:
        """The latest engine of a version of a model that runs."""
        return [one for one in self.handles if one.name == name and one.begun and not one.closed][
            -1
        ]

    @property
    def running(self) -> list[str]:
        return [one.name for one in self.handles if one.begun and not one.closed]

    def show(self, name: str) -> tuple[str, str]:
        """Which version requests find, and its state."""
        found = self.models.by_id[name]
        return found.settings.path, found.status[0]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_so():
            await asyncio.sleep(0.005)


def script(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * LIMIT_S))


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


def test_a_reload_leaves_a_model_alone_that_an_earlier_one_has_begun_to_load() -> None:
    async def test() -> None:
        machine = Machine(model("a"))
        await machine.begin()
        await machine.reload(model("a"), model("large"))
        large = machine.find("large A")
        report = await machine.reload(model("large"), model("c"))
        assert (report.added, report.removed, report.unchanged) == (["c"], ["a"], ["large"])
        assert report.pending >= {"large", "c"}, "what an earlier reload began is told, too"
        for handle in (large, machine.find("c A")):
            handle.come_up()
        await until(lambda: not report.pending)
        assert report.failed == {}
        assert machine.running == ["large A", "c A"]
        assert list(machine.models.by_id) == ["large", "c"]
        assert machine.find("large A") is large, "it went on loading"

    script(test)


def test_what_loads_and_is_wanted_no_more_is_given_up() -> None:
    async def test() -> None:
        machine = Machine(model("a"))
        await machine.begin()
        first = await machine.reload(model("a"), model("large"), model("other"))
        second = await machine.reload(model("a"), model("other", "B"))
        assert (second.removed, second.replaced) == (["large"], ["other"])
        await until(lambda: machine.running == ["a A", "other B"])
        machine.find("other B").come_up()
        await until(lambda: not second.pending)
        assert (second.failed, machine.show("other")) == ({}, ("B", "ready"))
        assert set(first.failed) == {"large", "other"}, "who waits for the first is told"
        assert "took its place" in first.failed["large"]
        assert list(machine.models.by_id) == ["a", "other"]

    script(test)


@pytest.mark.parametrize("wanted", ["A", "B", "C", None])
def test_a_replacement_that_loads_beside_gives_way_to_the_last_configuration(
    wanted: str | None,
) -> None:
    """The old one answers all the time."""

    async def test() -> None:
        machine = Machine(model("a"), model("b"), reload_beside="always")
        await machine.begin()
        first = await machine.reload(model("a", "B"), model("b"))
        await until(lambda: machine.running == ["a A", "b A", "a B"])
        begun = machine.find("a B")
        a = () if wanted is None else (model("a", wanted),)
        second = await machine.reload(*a, model("b"))
        if wanted == "B":
            assert (second.unchanged, second.pending) == (["a", "b"], {"a"})
            begun.come_up()
        if wanted == "C":
            await until(lambda: "a C" in machine.running)
            assert machine.show("a") == ("A", "ready")
            machine.find("a C").come_up()
        await until(lambda: not second.pending)
        assert second.failed == {}
        assert ("a" in first.failed) == (wanted != "B")
        if wanted is None:
            assert machine.running == ["b A"]
        else:
            assert machine.show("a") == (wanted, "ready")
            assert sorted(machine.running) == sorted([f"a {wanted}", "b A"])
            assert machine.models.by_id["a"].note == ""
        assert begun.closed == (wanted != "B")

    script(test)


@pytest.mark.parametrize("wanted", ["A", "B", "C", None])
def test_a_replacement_in_place_gives_way_as_well(wanted: str | None) -> None:
    async def test() -> None:
        machine = Machine(model("a"), model("b"), reload_beside="never")
        await machine.begin()
        await machine.reload(model("a", "B"), model("b"))
        await until(lambda: machine.running == ["b A", "a B"])
        begun = machine.find("a B")
        a = () if wanted is None else (model("a", wanted),)
        second = await machine.reload(*a, model("b"))
        if wanted is not None:
            await until(lambda: sorted(machine.running) == sorted([f"a {wanted}", "b A"]))
            assert machine.show("a") == (wanted, "loading")
            machine.find(f"a {wanted}").come_up()
        await until(lambda: not second.pending)
        assert second.failed == {}
        assert begun.closed == (wanted != "B")
        assert ("a" in machine.models.by_id) == (wanted is not None)
        assert wanted is None or machine.show("a") == (wanted, "ready")

    script(test)


def test_one_that_is_still_answering_its_last_requests_takes_new_ones_again() -> None:
    async def test() -> None:
        machine = Machine(model("a"), reload_beside="never")
        await machine.begin()
        asked = machine.models.by_id["a"].admission.enter()
        await machine.reload(model("a", "B"))
        await until(lambda: machine.show("a") == ("A", "draining"))
        report = await machine.reload(model("a"))
        await until(lambda: not report.pending)
        assert (machine.show("a"), machine.running) == (("A", "ready"), ["a A"])
        assert report.failed == {}
        asked.release()

    script(test)


def test_the_one_that_answered_last_comes_back_whatever_was_given_up_between() -> None:
    async def test() -> None:
        machine = Machine(model("a"), reload_beside="never")
        await machine.begin()
        await machine.reload(model("a", "B"))
        await until(lambda: machine.running == ["a B"])
        report = await machine.reload(model("a", "C"))
        await until(lambda: machine.running == ["a C"])
        machine.find("a C").fail()
        await until(lambda: not report.pending)
        assert report.failed == {"a": "it is broken"}
        assert machine.running == ["a A"]
        machine.find("a A").come_up()
        await until(lambda: machine.show("a") == ("A", "ready"))
        assert "its replacement failed: it is broken" in machine.models.by_id["a"].note
        again = await machine.reload(model("a", "C"))
        assert again.replaced == ["a"], "one that failed is tried again"

    script(test)


@pytest.mark.parametrize("beside", ["always", "never"])
def test_what_cannot_be_loaded_is_refused_before_the_working_model_ends(beside: str) -> None:
    async def test() -> None:
        machine = Machine(model("a"), reload_beside=beside)
        await machine.begin()
        working = machine.find("a A")
        report = await machine.reload(model("a", "unreadable"))
        await until(lambda: not report.pending)
        assert report.failed == {"a": "no such directory"}
        assert (machine.show("a"), machine.handles) == (("A", "ready"), [working])
        assert machine.models.by_id["a"].note == "its replacement failed: no such directory"

    script(test)


def test_a_model_that_comes_back_waits_for_the_end_of_what_it_was() -> None:
    async def test() -> None:
        machine = Machine(model("a"), model("b"))
        await machine.begin()
        asked = machine.models.by_id["a"].admission.enter()
        old = machine.find("a A")
        await machine.reload(model("b"))
        await until(lambda: "a" not in machine.models.by_id)
        report = await machine.reload(model("a"), model("b"))
        assert (report.added, machine.show("a")) == (["a"], ("A", "loading"))
        assert not old.closed, "its requests are answered first"
        with pytest.raises(APIError, match="has to end first") as caught:
            machine.models.by_id["a"].require()
        assert caught.value.retryable
        asked.release()
        await until(lambda: old.closed and len(machine.running) == 2)
        machine.find("a A").come_up()
        await until(lambda: not report.pending)
        assert (report.failed, machine.show("a")) == ({}, ("A", "ready"))

    script(test)


def test_one_that_loads_may_be_unloaded_and_a_reload_waits_for_that() -> None:
    async def test() -> None:
        machine = Machine(model("a"))
        await machine.begin()
        await machine.reload(model("a"), model("large"))
        large = machine.models.by_id["large"]
        await machine.changes.unload(large, LIMIT_S)
        assert (machine.show("large"), machine.running) == (("A", "unloaded"), ["a A"])
        asked = machine.models.by_id["a"].admission.enter()
        unloaded = machine.models.by_id["a"]
        await machine.changes.unload(unloaded, 0.0)
        with pytest.raises(APIError, match="Another change of model a"):
            await machine.changes.unload(unloaded, 0.0)
        report = await machine.reload(model("a", "B"), model("large", "B"))
        assert report.pending == {"a"}
        assert machine.show("a") == ("A", "draining")
        asked.release()
        await until(lambda: not report.pending)
        assert (machine.show("a"), machine.show("large")) == (("B", "unloaded"),) * 2
        assert (machine.running, report.failed) == ([], {})

    script(test)


def test_required_alone_changes_what_loads_without_a_new_start() -> None:
    async def test() -> None:
        machine = Machine(model("a"), reload_beside="always")
        await machine.begin()
        await machine.reload(model("a", "B"), model("c"))
        await until(lambda: len(machine.running) == 3)
        b, c = machine.find("a B"), machine.find("c A")
        report = await machine.reload(model("a", "B", required=False), model("c", required=False))
        assert (report.replaced, report.pending) == (["a", "c"], {"a", "c"})
        b.come_up()
        c.come_up()
        await until(lambda: not report.pending)
        assert [own.settings.required for own in machine.models.by_id.values()] == [False, False]
        assert sorted(machine.running) == ["a B", "c A"]
        assert (machine.find("a B"), report.failed) == (b, {})

    script(test)


def test_of_reloads_at_once_the_last_one_counts() -> None:
    async def test() -> None:
        machine = Machine(model("a"), reload_beside="always")
        await machine.begin()
        reloads = []
        for version in "BCDE":
            reloads.append(asyncio.create_task(machine.reload(model("a", version))))
            await asyncio.sleep(0)
        reports = await asyncio.gather(*reloads)
        await until(lambda: machine.running == ["a A", "a E"])
        machine.find("a E").come_up()
        await until(lambda: not reports[-1].pending)
        assert (machine.show("a"), machine.running) == (("E", "ready"), ["a E"])
        assert reports[-1].failed == {}

    script(test)
