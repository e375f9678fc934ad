"""What the coordinator starts: itself anew, and models, of which some do not come up.

How long it waits before it starts these again, what it says of them, and what their applications
are called. Applications and ingresses are scripts.
"""

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from logsteer_server.settings import ModelSettings, Settings
from tests.cluster.local import needs_ray
from tests.cluster.scripted_applications import (
    NEW,
    OLD,
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

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, as it is imported
    from ray import serve

    from logsteer_server.cluster.applications import AbsenceError, ModelApplications
    from logsteer_server.cluster.wanted import name_application


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


# ------------------------------------------------------------------ models that do not come up


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


# ------------------------------------------------------------------ applications of Serve


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


def test_an_application_is_named_by_what_its_actors_depend_on() -> None:
    arguments = Settings(models=[OLD])
    settings = Settings(models=[OLD])

    def name(own: ModelSettings, **others: Any) -> str:
        return name_application(own, settings.model_copy(update=others), arguments)

    assert name(OLD) == name(OLD.model_copy(update={"required": False}), models=[OLD, NEW])
    assert len({name(OLD), name(NEW), name(OLD, heartbeat_timeout_s=1.0)}) == 3
    assert name(OLD).startswith("logsteer-a-")
