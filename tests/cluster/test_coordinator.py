"""What the coordinator does with applications and ingresses, both of which are scripts here."""

import asyncio
import pickle
import warnings
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from logsteer_server.contract.jobs import JobFailure
from logsteer_server.settings import ModelSettings, Settings
from tests.cluster.local import needs_ray
from tests.own_time import run_in_own_time

pytestmark = needs_ray
pytest.importorskip("ray")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, as it is imported
    from ray import serve

    from logsteer_server.cluster.absence import Absence
    from logsteer_server.cluster.applications import AbsenceError, ModelApplications
    from logsteer_server.cluster.coordinator import Accepted, Coordinator
    from logsteer_server.cluster.wanted import WantedModels, name_application


def model(name: str, **others: Any) -> ModelSettings:
    return ModelSettings(id=name, engine="fake", path="p", **others)


OLD, NEW = model("a"), model("a", dtype="float64")


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


THIRD = model("a", dtype="float16")


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


def script(test: Callable[[], Awaitable[None]]) -> None:
    run_in_own_time(asyncio.wait_for(test(), 30))


def accept(found: Accepted | JobFailure) -> Accepted:
    assert isinstance(found, Accepted), found
    return found


@pytest.mark.parametrize("way", ["reload", "unload"])
def test_an_added_model_without_room_can_be_taken_out_again(way: str) -> None:
    async def test() -> None:
        applications = ScriptedApplications()
        coordinator = await make(applications, KeptHere(), OLD)
        ScriptedIngress(coordinator, "one", applications.done)
        await asyncio.sleep(0.1)
        applications.may_settle.clear()
        both = Settings(models=[OLD, model("wide")])
        report = accept(await coordinator.reload(both, 0.1)).report
        assert (report.added, report.pending) == (["wide"], {"wide"})
        if way == "reload":
            again = accept(await coordinator.reload(Settings(models=[OLD]), 5.0)).report
            assert (again.removed, again.pending, again.failed) == (["wide"], set(), {})
        else:
            accept(await coordinator.change("unload", "wide", 5.0))
        assert applications.done[-1] == "end wide-auto"
        assert applications.running == {"a-auto"}

    script(test)


def test_the_old_one_ends_when_the_last_ingress_uses_it_no_more() -> None:
    async def test() -> None:
        applications = ScriptedApplications()
        coordinator = await make(applications, KeptHere(), OLD)
        first = ScriptedIngress(coordinator, "first", applications.done)
        second = ScriptedIngress(coordinator, "second", applications.done)
        await asyncio.sleep(0.1)
        second.may_follow.clear()
        report = accept(await coordinator.reload(Settings(models=[NEW]), 0.3)).report
        assert (report.replaced, report.pending) == (["a"], {"a"})
        assert applications.running == {"a-auto", "a-float64"}
        second.may_follow.set()
        await asyncio.sleep(0.3)
        assert (report.pending, report.failed) == (set(), {})
        assert applications.running == {"a-float64"}
        assert applications.done[-1] == "end a-auto"
        assert first.states[-1] == second.states[-1] == "float64 running"

    script(test)


def test_without_room_the_old_one_ends_first_and_comes_back_if_the_new_one_fails() -> None:
    async def test() -> None:
        applications = ScriptedApplications(has_room=False)
        applications.broken = {"a-float64"}
        coordinator = await make(applications, KeptHere(), OLD)
        ingress = ScriptedIngress(coordinator, "one", applications.done)
        await asyncio.sleep(0.1)
        report = accept(await coordinator.reload(Settings(models=[NEW]), 5.0)).report
        assert report.failed == {"a": "it is broken"}
        steps = [step for step in applications.done if not step.startswith("one")]
        assert steps == [
            "deploy a-auto", "end a-auto", "deploy a-float64", "end a-float64", "deploy a-auto",
        ]  # fmt: skip
        followed = applications.done.index("one follows auto unloaded")
        assert followed < applications.done.index("end a-auto")
        await asyncio.sleep(0.1)
        assert ingress.states[-1] == "auto running"

    script(test)


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("wanted", [OLD, NEW, THIRD, None])
def test_a_replacement_without_room_gives_way_to_the_last_configuration(
    wanted: ModelSettings | None, has_room: bool
) -> None:
    """Where it comes up beside the old one, that one runs until another does."""

    async def test() -> None:
        applications = ScriptedApplications(has_room)
        applications.waiting = {"a-float64"}
        coordinator = await make(applications, KeptHere(), OLD, model("b"))
        ingress = ScriptedIngress(coordinator, "one", applications.done)
        await until(lambda: len(applications.done) == 3)
        await coordinator.reload(Settings(models=[NEW, model("b")]), 0.0)
        await until(lambda: "deploy a-float64" in applications.done)
        assert ("a-auto" in applications.running) == has_room
        models = [model("b")] if wanted is None else [wanted, model("b")]
        again = accept(await coordinator.reload(Settings(models=models), 0.0)).report
        if wanted == NEW:
            assert (again.unchanged, again.pending) == (["a", "b"], {"a"})
            applications.waiting.clear()
        await until(lambda: not again.pending)
        assert again.failed == {}
        own = set() if wanted is None else {applications.name(wanted)}
        assert applications.running == {"b-auto"} | own
        shown = "" if wanted is None else f"{wanted.dtype} running, "
        await until(lambda: ingress.states[-1] == f"{shown}auto running")
        steps = [step for step in applications.done if "a-auto" in step]
        if has_room and wanted == OLD:
            assert steps == ["deploy a-auto"], "the old one was never ended"
        notes = [own.note for own in (await coordinator.watch("x", 0, 0)).by_id.values()]
        assert not any(notes)

    script(test)


def test_what_comes_back_after_several_is_the_one_that_was_up() -> None:
    async def test() -> None:
        applications = ScriptedApplications(has_room=False)
        applications.waiting, applications.broken = {"a-float64"}, {"a-float16"}
        coordinator = await make(applications, KeptHere(), OLD)
        ingress = ScriptedIngress(coordinator, "one", applications.done)
        await until(lambda: len(applications.done) == 2)
        first = accept(await coordinator.reload(Settings(models=[NEW]), 0.0)).report
        await until(lambda: "deploy a-float64" in applications.done)
        second = accept(await coordinator.reload(Settings(models=[THIRD]), 20.0)).report
        assert (second.pending, second.failed) == (set(), {"a": "it is broken"})
        assert "took its place" in first.failed["a"]
        await until(lambda: applications.running == {"a-auto"})
        await until(lambda: ingress.states[-1] == "auto running")

    script(test)


def test_a_reload_after_an_unload_that_is_at_work_is_not_lost() -> None:
    async def test() -> None:
        applications = ScriptedApplications()
        coordinator = await make(applications, KeptHere(), OLD)
        ingress = ScriptedIngress(coordinator, "one", applications.done)
        await until(lambda: len(applications.done) == 2)
        ingress.may_follow.clear()
        await coordinator.change("unload", "a", 0.0)
        report = accept(await coordinator.reload(Settings(models=[NEW]), 0.0)).report
        assert report.pending == {"a"}
        ingress.may_follow.set()
        await until(lambda: not report.pending)
        await until(lambda: ingress.states[-1] == "float64 unloaded")
        accept(await coordinator.change("load", "a", 20.0))
        assert applications.running == {"a-float64"}

    script(test)


def test_a_model_that_is_removed_and_wanted_again_keeps_its_actors() -> None:
    async def test() -> None:
        applications = ScriptedApplications()
        coordinator = await make(applications, KeptHere(), OLD, model("b"))
        ingress = ScriptedIngress(coordinator, "one", applications.done)
        await until(lambda: len(applications.done) == 3)
        ingress.may_follow.clear()
        await coordinator.reload(Settings(models=[model("b")]), 0.0)
        report = accept(await coordinator.reload(Settings(models=[OLD, model("b")]), 0.0)).report
        assert report.added == ["a"]
        ingress.may_follow.set()
        await until(lambda: not report.pending)
        await until(lambda: ingress.states[-1] == "auto running, auto running")
        steps = [step for step in applications.done if not step.startswith("one")]
        assert steps == ["deploy a-auto", "deploy b-auto"]

    script(test)


def test_one_that_starts_again_takes_back_what_was_being_replaced() -> None:
    async def test() -> None:
        applications, kept = ScriptedApplications(has_room=False), KeptHere()
        applications.waiting = {"a-float64"}
        earlier = await make(applications, kept, OLD)
        ScriptedIngress(earlier, "one", applications.done)
        await until(lambda: len(applications.done) == 2)
        await earlier.reload(Settings(models=[NEW]), 0.0)
        await until(lambda: applications.running == {"a-float64"})
        again = await make(applications, kept, OLD, ingress_lease_s=0.2)
        ingress = ScriptedIngress(again, "one", applications.done)
        await until(lambda: applications.running == {"a-auto"})
        await until(lambda: ingress.states[-1:] == ["auto running"])

    script(test)


def test_an_ingress_that_is_gone_is_not_waited_for() -> None:
    async def test() -> None:
        applications = ScriptedApplications()
        coordinator = await make(applications, KeptHere(), OLD, ingress_lease_s=0.5)
        ScriptedIngress(coordinator, "one", applications.done)
        gone = ScriptedIngress(coordinator, "two", applications.done)
        await asyncio.sleep(0.1)
        gone.die()
        accept(await coordinator.change("unload", "a", 5.0))
        assert applications.running == set()

    script(test)


def test_one_that_starts_again_goes_on_with_what_was_wanted_and_sweeps() -> None:
    async def test() -> None:
        applications, kept = ScriptedApplications(), KeptHere()
        earlier = await make(applications, kept, OLD, model("b"), ingress_lease_s=0.2)
        ScriptedIngress(earlier, "one", applications.done)
        await asyncio.sleep(0.1)
        accept(await earlier.change("unload", "b", 5.0))
        applications.running.add("c-auto")  # of a change that was cut off
        again = await make(applications, kept, OLD, model("b"), ingress_lease_s=0.2)
        ingress = ScriptedIngress(again, "one", applications.done)
        await asyncio.sleep(0.8)
        assert ingress.states[-1] == "auto running, auto unloaded"
        assert applications.running == {"a-auto"}
        # A configuration that is deployed anew begins anew.
        other = await make(applications, kept, model("b"), born="later")
        assert list((await other.watch("one", 0, 0)).by_id) == ["b"]

    script(test)


def test_second_changes_are_refused_and_a_load_waits_for_an_unload() -> None:
    async def test() -> None:
        applications = ScriptedApplications()
        coordinator = await make(applications, KeptHere(), OLD)
        ingress = ScriptedIngress(coordinator, "one", applications.done)
        await asyncio.sleep(0.1)
        ingress.may_follow.clear()
        accept(await coordinator.change("unload", "a", 0.1))
        refused = await coordinator.change("unload", "a", 0.0)
        assert isinstance(refused, JobFailure)
        assert refused.code == "overloaded"
        loading = asyncio.create_task(coordinator.change("load", "a", 5.0))
        await asyncio.sleep(0.1)
        ingress.may_follow.set()
        accept(await loading)
        assert applications.running == {"a-auto"}
        steps = [step for step in applications.done if not step.startswith("one")]
        assert steps == ["deploy a-auto", "end a-auto", "deploy a-auto"]

    script(test)


def test_a_model_that_does_not_come_up_at_the_start_has_failed() -> None:
    async def test() -> None:
        applications = ScriptedApplications()
        applications.broken = {"a-auto"}
        coordinator = await make(applications, KeptHere(), OLD)
        ingress = ScriptedIngress(coordinator, "one", applications.done)
        await asyncio.sleep(0.3)
        assert ingress.states[-1] == "auto failed"
        assert applications.running == set()
        applications.broken = set()
        accept(await coordinator.change("load", "a", 5.0))
        await asyncio.sleep(0.1)
        assert ingress.states[-1] == "auto running"

    script(test)


def test_one_whose_engines_were_killed_is_started_again_ever_later() -> None:
    async def test() -> None:
        applications = ScriptedApplications()
        applications.broken, applications.may_pass = {"a-auto"}, True
        coordinator = await make(applications, KeptHere(), OLD, failed_retry_s=0.05)
        ingress = ScriptedIngress(coordinator, "one", applications.done)
        await until(lambda: len(ingress.notes) == 3)
        applications.broken = set()
        told = "it is started again after {} s, or once it is loaded"
        assert ingress.notes == [told.format(wait_s) for wait_s in ("0.05", "0.1", "0.2")]
        steps = [step for step in applications.done if not step.startswith("one")]
        assert steps[:4] == ["deploy a-auto", "end a-auto"] * 2, "what it held is free in between"
        await until(lambda: ingress.states[-1] == "auto running")

    script(test)


@pytest.mark.parametrize("way", ["load", "reload"])
def test_a_start_that_is_asked_for_begins_the_waits_anew(way: str) -> None:
    async def test() -> None:
        applications = ScriptedApplications()
        applications.broken, applications.may_pass = {"a-auto", "a-float64"}, True
        coordinator = await make(applications, KeptHere(), OLD, failed_retry_s=60.0)
        ingress = ScriptedIngress(coordinator, "one", applications.done)
        await until(lambda: len(ingress.notes) == 1 and not applications.running)
        if way == "load":
            accept(await coordinator.change("load", "a", 20.0))
            await until(lambda: len(ingress.notes) == 2)
        else:
            accept(await coordinator.reload(Settings(models=[model("b")]), 20.0))
            accept(await coordinator.reload(Settings(models=[NEW]), 20.0))
            await until(lambda: len(ingress.notes) == 2)
        assert ingress.notes == ["it is started again after 60 s, or once it is loaded"] * 2

    script(test)


def test_a_coordinator_that_starts_again_tries_what_had_failed_unless_it_was_unloaded() -> None:
    async def test() -> None:
        applications, kept = ScriptedApplications(), KeptHere()
        applications.broken, applications.may_pass = {"a-auto", "b-auto"}, True
        earlier = await make(applications, kept, OLD, model("b"))
        ScriptedIngress(earlier, "one", applications.done)
        await asyncio.sleep(0.15)
        accept(await earlier.change("unload", "b", 5.0))
        applications.broken = set()
        again = await make(applications, kept, OLD, model("b"), failed_retry_s=0.1)
        ingress = ScriptedIngress(again, "one", applications.done)
        await asyncio.sleep(0.3)
        assert ingress.states[-1] == "auto running, auto unloaded"

    script(test)


def say(status: str, trigger: str = "", message: str = "") -> SimpleNamespace:
    """What Serve says of the one application of a model."""
    own = SimpleNamespace(status_trigger=trigger, message=message)
    found = SimpleNamespace(status=status, message="", deployments={"model-a": own})
    return SimpleNamespace(applications={"logsteer-a": found})


def settle(monkeypatch: pytest.MonkeyPatch, *said: SimpleNamespace) -> None:
    """Wait for a model of whose application Serve says one thing after the other."""
    statuses = iter(said)
    monkeypatch.setattr(serve, "status", lambda: next(statuses))
    settings = Settings(models=[OLD])
    applications = ModelApplications(settings, str, lambda _: "logsteer-a", lambda _: (1.0, 0.0))
    asyncio.run(applications.settle(OLD))


def test_an_actor_that_is_lost_as_others_come_up_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settle(monkeypatch, say("DEPLOY_FAILED", "HEALTH_CHECK_FAILED", "..."), say("RUNNING"))


@pytest.mark.parametrize(
    ("error", "may_pass"), [("RuntimeError", False), ("logsteer.GivenUpError", True)]
)
def test_a_model_that_does_not_come_up_says_why_and_whether_that_may_pass(
    monkeypatch: pytest.MonkeyPatch, error: str, may_pass: bool
) -> None:
    message = f"failed to start 2 times. Error:\nTraceback:\n  File\n{error}: no such directory"
    with pytest.raises(AbsenceError, match=r"^no such directory$") as caught:
        settle(monkeypatch, say("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED", message))
    assert caught.value.may_pass == may_pass


def test_a_reload_is_one_revision() -> None:
    async def test() -> None:
        applications = ScriptedApplications()
        applications.may_settle.clear()
        coordinator = await make(applications, KeptHere(), OLD)
        ScriptedIngress(coordinator, "one", applications.done)
        before = (await coordinator.watch("one", 0, 0)).revision
        found = accept(await coordinator.reload(Settings(models=[OLD, model("b")]), 0.0))
        assert found.revision == before + 1
        assert (await coordinator.watch("one", before, before)).revision == before + 1

    script(test)


def test_an_application_is_named_by_what_its_actors_depend_on() -> None:
    arguments = Settings(models=[OLD])
    settings = Settings(models=[OLD])

    def name(own: ModelSettings, **others: Any) -> str:
        return name_application(own, settings.model_copy(update=others), arguments)

    assert name(OLD) == name(OLD.model_copy(update={"required": False}), models=[OLD, NEW])
    assert len({name(OLD), name(NEW), name(OLD, heartbeat_timeout_s=1.0)}) == 3
    assert name(OLD).startswith("logsteer-a-")
