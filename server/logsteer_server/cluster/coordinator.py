"""Changes of a cluster's models, made in one place: a deployment of one actor.

It decides which models are wanted, has Serve start and end their applications, and tells every
ingress. A model's application is ended only when all ingresses have said that they use it no more:

    application old   runs  runs  runs               ends
    application new         starts  runs   runs      runs
    ingress 1         old   old   new, answers the last requests of old, says so
    ingress 2         old   old   new, ...
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from logsteer_server.cluster.applications import AbsenceError, ModelApplications
from logsteer_server.cluster.retries import LaterStarts
from logsteer_server.cluster.wanted import BEING_REPLACED, KeptState, WantedModel, WantedModels
from logsteer_server.contract.jobs import JobFailure
from logsteer_server.models.changes import refuse_second
from logsteer_server.models.transitions import (
    ReloadReport,
    Transition,
    Transitions,
    find_fixed,
    is_same_engine,
    wait_for_ends,
)
from logsteer_server.observation.logs import LogStyle, configure_logs
from logsteer_server.settings import ModelSettings, Settings

log = logging.getLogger(__name__)

WATCHES = 3
"""Questions of an ingress, each of which waits for something new, within `ingress_lease_s`."""
POLL_S = 0.02
REPLACEMENT_LOADS = "its replacement loads"
Change = Literal["load", "unload", "drain"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A change that was begun: ingresses have it with this revision. `report` is a reload's."""

    revision: int
    report: ReloadReport = field(default_factory=ReloadReport)


class Coordinator:
    """The class of the deployment. `born` names this deployment of the service.

    Refusals come back as `JobFailure`: errors would arrive wrapped in Ray's.
    """

    async def __init__(  # type: ignore[misc]
        self,
        settings: Settings,
        applications: ModelApplications,
        born: str,
        ingresses: int,
        kept: KeptState | None = None,
    ) -> None:
        configure_logs(LogStyle(settings.log_format, settings.log_level))
        self._settings = settings
        self._ingresses = ingresses
        self._applications = applications
        self._kept = kept or KeptState()
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._followed: dict[str, int] = {}
        self._asked_at: dict[str, float] = {}
        self._began_at = time.monotonic()
        self._changes = Transitions()
        self._later = LaterStarts(
            settings.failed_retry_s, lambda model_id: self._go_on(self._retry(model_id))
        )
        self._others: set[asyncio.Task[None]] = set()
        """What goes on beside changes: what is waited for, what is left of earlier ones."""
        earlier = self._kept.read()
        if earlier is not None and earlier.born == born:
            self._wanted = earlier
        else:
            models = {model.id: WantedModel(model) for model in settings.models}
            self._wanted = WantedModels(born, time.time_ns(), models)
            self._kept.write(self._wanted)
        self._starting = asyncio.create_task(self._start())

    async def check_health(self) -> None:
        """Have Serve replace this actor if it could not begin. Errors: whatever that was."""
        if self._starting.done():
            self._starting.result()

    # ------------------------------------------------------------------ what ingresses ask

    async def watch(self, ingress: str, revision: int, followed: int) -> WantedModels:
        """Return what is wanted, at once if it is not this revision, else when it changes."""
        await asyncio.shield(self._starting)
        self.note(ingress, followed)
        deadline = time.monotonic() + self._settings.ingress_lease_s / WATCHES
        async with self._changed:
            while self._wanted.revision == revision:
                try:
                    left_s = deadline - time.monotonic()
                    await asyncio.wait_for(self._changed.wait(), left_s)
                except TimeoutError:
                    break
        self._asked_at[ingress] = time.monotonic()
        return self._wanted

    def note(self, ingress: str, followed: int) -> None:
        """Note that an ingress does what this revision says, and uses nothing of earlier ones."""
        self._followed[ingress] = followed
        self._asked_at[ingress] = time.monotonic()

    # ------------------------------------------------------------------ what is told them

    async def _change_one(self, model: WantedModel) -> int:
        """Want a model in place of that of the same id; return the revision."""
        return await self._publish(self._wanted.by_id | {model.settings.id: model})

    async def _publish(self, by_id: dict[str, WantedModel]) -> int:
        """Want these models and no others; return the revision."""
        self._wanted = self._wanted.change(by_id)
        revision = self._wanted.revision
        async with self._writing:
            await asyncio.to_thread(self._kept.write, self._wanted)
        async with self._changed:
            self._changed.notify_all()
        return revision

    async def _wait_followed(self, revision: int) -> None:
        """Wait until every ingress has followed, for as long as requests may take to end."""
        lease_s = self._settings.ingress_lease_s
        deadline = time.monotonic() + self._settings.model_drain_s + lease_s
        while time.monotonic() < deadline:
            since = time.monotonic() - lease_s
            there = [own for own, at in self._asked_at.items() if at > since]
            # Soon after its own start it may not know all of them.
            are_known = self._began_at < since or len(there) >= self._ingresses
            if are_known and all(self._followed[own] >= revision for own in there):
                return
            await asyncio.sleep(POLL_S)
        log.warning("not every ingress has followed a change in time")

    # ------------------------------------------------------------------ its own start

    async def _start(self) -> None:
        """Start the applications that are wanted and not there, and end others."""
        there = await self._applications.list()
        await self._take_back()
        for wanted in self._wanted.by_id.values():
            name = self._applications.name(wanted.settings)
            if wanted.has_engine and name not in there:
                await self._applications.deploy(wanted.settings)
            if wanted.has_engine:
                self._changes.begin(wanted.settings.id, wanted.settings, self._see_up)
            elif wanted.may_pass:
                self._later.begin(wanted.settings.id)
        if stale := there - self._list_wanted():
            self._go_on(self._sweep(stale))

    async def _take_back(self) -> None:
        """Want the models that were being replaced when an earlier process of this one ended."""
        by_id = {
            name: WantedModel(own.settings)
            if own.is_replaced or own.note == REPLACEMENT_LOADS
            else own
            for name, own in self._wanted.by_id.items()
        }
        if by_id != self._wanted.by_id:
            await self._publish(by_id)

    def _go_on(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        return task

    def _list_wanted(self) -> set[str]:
        return {
            self._applications.name(own.settings)
            for own in self._wanted.by_id.values()
            if own.has_engine
        }

    async def _sweep(self, stale: set[str]) -> None:
        """End what is left of an earlier deployment, or of a change that was cut off."""
        await asyncio.sleep(self._settings.ingress_lease_s)
        await self._wait_followed(self._wanted.revision)
        for name in stale - self._list_wanted():
            await self._applications.end(name)

    # ------------------------------------------------------------------ changes of one model

    async def change(self, what: Change, model_id: str, wait_s: float) -> Accepted | JobFailure:
        """Begin a change of one model, and wait for its end as long as is asked.

        It is refused while another one of that model is at work that does more than wait for it to
        be up; but a load waits for an unload.
        """
        await asyncio.shield(self._starting)
        wanted = self._wanted.by_id.get(model_id)
        if wanted is None:
            return JobFailure("unknown_model", f"No model {model_id!r} is resident.")
        if self._changes.is_busy(model_id):
            if what != "load" or wanted.has_engine or wanted.is_replaced:
                return _refuse(model_id)
            await wait_for_ends(filter(None, [self._changes.find(model_id)]), wait_s)
            if self._changes.is_busy(model_id) or model_id not in self._wanted.by_id:
                return Accepted(self._wanted.revision)
            wanted = self._wanted.by_id[model_id]
        if what == "drain" and wanted.has_engine:
            detail = "it was drained: load it to have it answer again"
            revision = await self._want(wanted, "draining", detail)
            await self._wait(self._wait_followed(revision), wait_s)
        elif what == "unload" and wanted.state != "unloaded":
            detail = "it was unloaded: load it to have it answer again"
            unloading = self._changes.begin(
                model_id, wanted.settings, lambda _: self._end_after(wanted.settings)
            )
            await self._want(wanted, "unloaded", detail)
            await wait_for_ends([unloading], wait_s)
        elif what == "load" and wanted.state != "running":
            self._later.forget(model_id)
            await wait_for_ends([await self._load(wanted)], wait_s)
        return Accepted(self._wanted.revision)

    async def _load(self, wanted: WantedModel) -> Transition:
        """Want a model to run, and begin to start it if no actors do."""
        work = partial(self._see_up, anew=not wanted.has_engine)
        loading = self._changes.begin(wanted.settings.id, wanted.settings, work)
        await self._want(wanted, "running")
        return loading

    async def _wait(self, work: Coroutine[Any, Any, None], limit_s: float) -> None:
        """Wait for what goes on afterwards."""
        task = self._go_on(work)
        if limit_s:
            await asyncio.wait([task], timeout=limit_s)

    async def _want(self, wanted: WantedModel, state: Any, detail: str = "") -> int:
        other = replace(wanted, state=state, detail=detail, note="", may_pass=False)
        return await self._change_one(other)

    async def _end_after(self, model: ModelSettings) -> None:
        """End a model's application once no ingress has use for it, unless it is wanted again."""
        await self._wait_followed(self._wanted.revision)
        name = self._applications.name(model)
        if name not in self._list_wanted():
            await self._applications.end(name)

    async def _see_up(self, change: Transition, anew: bool = False) -> None:
        """Wait until a model is up that is wanted, and started here if it is not there, or `anew`.

        Errors: AbsenceError if it does not come up: it has failed.
        """
        change.check()
        wanted, applications = self._wanted.by_id[change.model_id], self._applications
        if not wanted.has_engine:
            return
        model = wanted.settings
        if anew or applications.name(model) not in await applications.list():
            await applications.deploy(model)
        change.only_waits = True
        try:
            await change.wait(applications.settle(model))
        except AbsenceError as error:
            await self._fail(self._wanted.by_id[model.id].settings, error)
            raise
        self._later.forget(model.id)

    async def _fail(self, model: ModelSettings, error: AbsenceError) -> None:
        """Have a model be one that failed; what Ray had set aside for it is free again.

        Where nothing says that it will fail the next time, there is one.
        """
        note = "load it to have it started again"
        if error.may_pass:
            wait_s = self._later.begin(model.id)
            note = f"it is started again after {wait_s:g} s, or once it is loaded"
        await self._change_one(WantedModel(model, "failed", str(error), note, error.may_pass))
        await self._end_after(model)

    async def _retry(self, model_id: str) -> None:
        """Start a model that failed, if nothing was done to it since."""
        while (change := self._changes.find(model_id)) is not None:
            await asyncio.wait([change.task])
        wanted = self._wanted.by_id.get(model_id)
        if wanted is not None and wanted.may_pass:
            log.info("model %s is started again, which failed: %s", model_id, wanted.detail)
            await self._load(wanted)

    # ------------------------------------------------------------------ changes of all

    async def reload(self, new: Settings, wait_s: float) -> Accepted:
        """Have the models of a configuration in place of those that are there.

        Changes that are at work go on where it wants the same, and else are given up.
        """
        await asyncio.shield(self._starting)
        before = self._wanted.by_id
        published = asyncio.Event()
        report, changes = self._changes.take(
            {name: own.settings for name, own in before.items()},
            new.models,
            lambda change: self._reach(change, before.get(change.model_id), published),
        )
        report.needs_restart = find_fixed(self._settings, new)
        for model_id in (*report.added, *report.removed, *report.replaced):
            self._later.forget(model_id)
        await self._publish(self._list_models(new))
        published.set()
        await wait_for_ends(changes, wait_s)
        return Accepted(self._wanted.revision, report)

    def _list_models(self, new: Settings) -> dict[str, WantedModel]:
        """Return the models of a configuration: added ones, and others still as they are."""
        models: dict[str, WantedModel] = {}
        for model in new.models:
            old = self._wanted.by_id.get(model.id)
            if old is None:
                old = WantedModel(model)
            elif is_same_engine(old.settings, model):
                old = replace(old, settings=model)
            models[model.id] = old
        return models

    async def _reach(
        self, change: Transition, before: WantedModel | None, published: asyncio.Event
    ) -> None:
        """Bring a model to the aim of a change, which ingresses know. Errors: ChangeError."""
        await published.wait()
        change.check()
        aim = change.aim
        if aim is None:
            if before is not None and before.has_engine:
                await self._end_after(before.settings)
            return
        wanted = self._wanted.by_id[change.model_id]
        if not is_same_engine(wanted.settings, aim):
            if wanted.state == "unloaded" and not wanted.is_replaced:
                await self._change_one(replace(wanted, settings=aim))
            else:
                await self._replace(wanted, change)
            return
        if wanted.is_replaced:
            await self._want(wanted, "running")
        elif wanted.note == REPLACEMENT_LOADS:
            await self._change_one(replace(wanted, note=""))
        await self._see_up(change)

    async def _replace(self, old: WantedModel, change: Transition) -> None:
        """Put a model in the place of one, which answers meanwhile if there is room for both.

        Errors: ChangeError; what was there stays, or is started again.
        """
        assert change.aim is not None
        applications, aim = self._applications, change.aim
        is_beside = old.state == "running" and await change.wait(
            asyncio.to_thread(applications.fits_beside, old.settings, aim)
        )
        if is_beside:
            await self._change_one(replace(old, note=REPLACEMENT_LOADS))
        elif old.has_engine:
            await self._want(old, "unloaded", BEING_REPLACED)
            await self._end_after(old.settings)
        change.check()
        try:
            await applications.deploy(aim)
            await change.wait(applications.settle(aim))
        except Exception as error:  # Serve's, too: what was there is to answer in any case
            await applications.end(applications.name(aim))
            if not change.is_given_up:
                await self._keep(old, f"its replacement failed: {error}", change, is_beside)
            raise
        await self._change_one(WantedModel(change.aim))
        if is_beside:
            await self._end_after(old.settings)
        else:
            await self._wait_followed(self._wanted.revision)

    async def _keep(self, old: WantedModel, note: str, change: Transition, is_there: bool) -> None:
        """Want the model whose replacement failed; it is started again where it is not there."""
        kept = replace(old, note=note)
        if old.is_replaced:
            kept = WantedModel(old.settings, note=note)
        await self._change_one(kept)
        if kept.has_engine and not is_there:
            await self._applications.deploy(kept.settings)
            if not change.is_given_up:
                self._changes.begin(change.model_id, kept.settings, self._see_up)


def _refuse(model_id: str) -> JobFailure:
    error = refuse_second(model_id)
    return JobFailure(error.code, error.detail)
