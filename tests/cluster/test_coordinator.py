"""How the coordinator changes models: reloads, unloads, and replacements, which ingresses follow.

Applications and ingresses are scripts. `test_coordinator_starts.py` has what comes up, and what
does not.
"""

import asyncio

import pytest

from logsteer_server.contract.jobs import JobFailure
from logsteer_server.settings import ModelSettings, Settings
from tests.cluster.local import needs_ray
from tests.cluster.scripted_applications import (
    NEW,
    OLD,
    THIRD,
    KeptHere,
    ScriptedApplications,
    ScriptedIngress,
    accept,
    make,
    model,
    script,
    until,
)

pytestmark = needs_ray


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
