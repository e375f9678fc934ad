"""Changes of resident models while others answer: load, unload, drain, replace, remove.

No request is lost in a change. Running requests finish first, within `model_drain_s`. A request
that arrives meanwhile is answered by the replacement, or refused as `model_loading` with a
Retry-After. New settings are checked before anything ends (`check_loadable`). A replacement loads
beside the old model if there is room for both, and takes over when it is ready:

    old   answers  answers  answers its last requests  ends
    new            loads    answers

Without that room the old model ends first. If the new one fails, the old one stays or is restored.

Each model has a lock, which the task of a change holds. The latest request wins: a change with the
same aim continues; any other is cancelled where it waits, and the next one gets the lock:

    reload 1   a: B loads beside A ......... given up, B ends
    reload 2                                                 a: C loads beside A ... answers, A ends
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping

from logsteer.errors import APIError, api_error
from logsteer.schemas import ModelState, ReloadAnswer
from logsteer_server.models.fit import check_loadable, fits_beside
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.runtime.engine_process import ENVIRONMENT
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings

log = logging.getLogger(__name__)

QUIET_S = 1.0
"""How long a replaced model must be idle before it ends: a request that has looked it up may
still arrive."""
POLL_S = 0.02
RELOAD_RETRY_S = 5.0
COMES_UP: tuple[ModelState, ...] = ("loading", "testing", "restarting")
WAITS: tuple[ModelState, str] = ("loading", "an earlier change of it has to end first")
"""The detail of a model that has not been started."""


class ChangeError(Exception):
    """A change failed; the message says why."""


class SupersededError(ChangeError):
    """A change was cancelled for a later one of the same model."""


def compare_models(old: Mapping[str, object], new: Mapping[str, object]) -> ReloadAnswer:
    """Return the models that are added, removed, replaced and unchanged, by id.

    Changes update `pending` and `failed` of the answer: see `ModelChange.report_to`.
    """
    return ReloadAnswer(
        added=[name for name in new if name not in old],
        removed=[name for name in old if name not in new],
        replaced=[name for name, own in new.items() if name in old and old[name] != own],
        unchanged=[name for name, own in new.items() if name in old and old[name] == own],
        pending=[],
        failed={},
        needs_restart=[],
    )


def is_same_engine(old: ModelSettings, new: ModelSettings) -> bool:
    """Return whether settings are equal, `required` aside."""
    return old.model_copy(update={"required": new.required}) == new


class ModelChange:
    """A change of one model to the settings `aim`; None removes it.

    `only_waits`: only the wait for the model is left; cancelling leaves the model as it is.
    """

    def __init__(self, model_id: str, aim: ModelSettings | None) -> None:
        self.model_id = model_id
        self.aim = aim
        self.only_waits = False
        self.is_given_up = False
        self.task: asyncio.Task[None]
        self._reports: list[ReloadAnswer] = []

    async def run(
        self, lock: asyncio.Lock, work: Callable[["ModelChange"], Awaitable[None]]
    ) -> None:
        """Do the work once the model's lock is free; record the outcome in the reports."""
        why = None
        try:
            async with lock:
                self.check()
                await work(self)
        except ChangeError as error:
            why = str(error)
            level = logging.INFO if isinstance(error, SupersededError) else logging.ERROR
            log.log(level, "model %s: %s", self.model_id, error)
        except Exception as error:  # reports say so, and the next change begins
            why = f"the change ended with {error!r}"
            log.exception("model %s: a change broke", self.model_id)
        for report in self._reports:
            report.pending.remove(self.model_id)
            if why is not None:
                report.failed[self.model_id] = why

    def report_to(self, report: ReloadAnswer) -> None:
        """Record the outcome in a report."""
        self._reports.append(report)
        report.pending.append(self.model_id)

    def check(self) -> None:
        """Raise SupersededError if the change was cancelled."""
        if self.is_given_up:
            raise SupersededError("a later change of this model took its place")

    async def wait_for_answer(self, model: ResidentModel) -> None:
        """Wait until a model and all its loading replicas are ready. Errors: ChangeError."""
        while model.status[0] in COMES_UP or any(
            replica.state == "loading" for replica in model.handle.read()
        ):
            self.check()
            await asyncio.sleep(POLL_S)
        state, detail = model.status
        if state != "ready":
            raise ChangeError(detail)


class ModelChanges:
    """Make changes, each in a task of its own that continues without a waiting caller.

    `reread` reads the configuration again. It raises ConfigurationError.
    """

    def __init__(
        self, models: ModelRegistry, settings: Settings, reread: Callable[[], Settings]
    ) -> None:
        self._models = models
        self._settings = settings
        self._reread = reread
        self._latest: dict[str, ModelChange] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._reading = asyncio.Lock()
        """Orders reads of the configuration: the latest counts."""
        self._spares: dict[str, ResidentModel] = {}
        """Models that ended for a replacement that is not ready, to be restored if it fails."""

    def close(self) -> None:
        """Cancel all changes at shutdown."""
        for change in self._latest.values():
            change.task.cancel()

    def _begin(
        self,
        model_id: str,
        aim: ModelSettings | None,
        work: Callable[[ModelChange], Awaitable[None]],
    ) -> ModelChange:
        """Start a change of a model; cancel the running one."""
        if (earlier := self._find(model_id)) is not None:
            earlier.is_given_up = True
        change = self._latest[model_id] = ModelChange(model_id, aim)
        change.task = asyncio.create_task(change.run(self._locks[model_id], work))
        return change

    def _find(self, model_id: str) -> ModelChange | None:
        """Return the running change of a model, if any."""
        change = self._latest.get(model_id)
        return None if change is None or change.task.done() else change

    async def drain(self, model: ResidentModel, wait_s: float) -> None:
        """Refuse new requests to a model, and wait until running ones are answered."""
        self._check_free(model)
        if model.status[0] != "unloaded":
            model.closed = ("draining", "it was drained: load it to have it answer again")
            await wait_until(lambda: not model.num_running, wait_s)

    async def unload(self, model: ResidentModel, wait_s: float) -> None:
        """Drain a model, then end its engine."""
        self._check_free(model)
        if model.status[0] == "unloaded":
            return
        model.closed = ("draining", "it is being unloaded")

        async def work(_: ModelChange) -> None:
            await self._end_work(model)
            await self._models.end_one(model)
            model.closed = ("unloaded", "it was unloaded: load it to have it answer again")
            log.info("model %s was unloaded", model.id)

        await wait_for_ends([self._begin(model.id, model.settings, work)], wait_s)

    async def _end_work(self, model: ResidentModel, change: ModelChange | None = None) -> None:
        """Wait until a model's requests are answered, or the timeout.

        Errors: SupersededError if `change` is cancelled.
        """

        def has_ended() -> bool:
            if change is not None:
                change.check()
            return not model.num_running

        if not await wait_until(has_ended, self._settings.model_drain_s):
            log.warning(
                "model %s: %d requests did not end within model_drain_s",
                *(model.id, model.num_running),
            )

    async def load(self, model: ResidentModel, wait_s: float) -> None:
        """Reopen a model; start a new engine if it has none or a failed one."""
        if (change := self._find(model.id)) is not None:
            if model.status[0] != "draining":
                self._check_free(model)
            await wait_for_ends([change], wait_s)
            if not change.task.done():
                return
        async with self._locks[model.id]:
            state = model.status[0]
            if state == "draining":
                model.closed = None
            elif state in ("unloaded", "failed"):
                await self._models.end_one(model)
                self._models.restart(model)
        await wait_until(lambda: model.status[0] in ("ready", "failed"), wait_s)

    def _check_free(self, model: ResidentModel) -> None:
        """Refuse a second change of a model. Errors: APIError `overloaded`."""
        change = self._find(model.id)
        if change is not None and not change.only_waits:
            detail = f"Another change of model {model.id} is running; wait for its end."
            raise api_error("overloaded", detail, retry_after=RELOAD_RETRY_S)

    async def reload(self, wait_s: float = 0.0) -> ReloadAnswer:
        """Read the configuration again and apply the differences.

        Errors: APIError `invalid_request` if it is invalid; then nothing changes.
        """
        async with self._reading:
            try:
                new = await asyncio.to_thread(self._read)
            except ConfigurationError as error:
                raise refuse_configuration(error) from error
        report = self._begin_all(new.models)
        report.needs_restart = [
            name
            for name in Settings.model_fields
            if name != "models" and getattr(new, name) != getattr(self._settings, name)
        ]
        by_id = self._models.by_id
        for requested in new.models:
            if requested.id not in by_id:
                self._place(requested)
            elif is_same_engine(by_id[requested.id].settings, requested):
                by_id[requested.id].settings = requested
        self._models.sort([model.id for model in new.models])
        await wait_for_ends(self._running, wait_s)
        return report

    def _read(self) -> Settings:
        with ENVIRONMENT:
            return self._reread()

    @property
    def _running(self) -> list[ModelChange]:
        return [change for name in self._latest if (change := self._find(name)) is not None]

    def _begin_all(self, models: Iterable[ModelSettings]) -> ReloadAnswer:
        """Start the changes that lead to these models; report them and all running ones.

        A model with a running change counts as its aim. A difference in `required` alone starts
        nothing.
        """
        requested = {model.id: model for model in models}
        working = {change.model_id: change for change in self._running}
        becomes = {name: own.settings for name, own in self._models.by_id.items()}
        becomes |= {name: change.aim for name, change in working.items()}  # type: ignore[misc]
        old = {name: own for name, own in becomes.items() if own is not None}
        report = compare_models(old, requested)
        for model_id in (*report.added, *report.removed):
            self._begin(model_id, requested.get(model_id), self._reach)
        for model_id in report.replaced:
            if not is_same_engine(old[model_id], requested[model_id]):
                self._begin(model_id, requested[model_id], self._reach)
            elif model_id in working:
                working[model_id].aim = requested[model_id]
        for change in self._running:
            change.report_to(report)
        return report

    def _place(self, settings: ModelSettings) -> ResidentModel:
        """Register a model that is not started yet."""
        model = self._models.by_id[settings.id] = self._models.make(settings)
        model.closed = WAITS
        return model

    async def _reach(self, change: ModelChange) -> None:
        """Bring a model to the aim of a change. Errors: ChangeError."""
        aim, model = change.aim, self._models.by_id[change.model_id]
        if aim is None:
            self._spares.pop(model.id, None)
            await self._retire(self._models.by_id.pop(model.id))
            return
        if model.is_ready:
            self._spares.pop(model.id, None)
        if not is_same_engine(model.settings, aim):
            state = model.status[0]
            if state == "unloaded":
                closed, model = model.closed, self._place(aim)
                model.closed = closed
                return
            if model.id not in self._spares:  # otherwise no model answers that could be lost
                await self._check_loadable(model, aim)
                change.check()
            if state == "ready" and await asyncio.to_thread(
                fits_beside, model.settings, aim, self._settings
            ):
                change.check()
                await self._replace_beside(model, change)
                return
            await self._end_first(model, change)
            model = self._place(aim)
            change.check()
        model.note = ""
        if model.closed == WAITS:
            model.closed = None
            self._models.start_one(model)
        elif model.status[0] not in COMES_UP:
            return
        await self._await_answer(model, change)

    async def _check_loadable(self, old: ResidentModel, aim: ModelSettings) -> None:
        """Refuse settings that cannot be loaded, before the old model ends. Errors: ChangeError."""
        try:
            await asyncio.to_thread(check_loadable, old.settings, aim, self._settings)
        except ValueError as error:
            old.note = f"its replacement failed: {error}"
            raise ChangeError(str(error)) from error

    async def _replace_beside(self, old: ResidentModel, change: ModelChange) -> None:
        """Replace a model that answers meanwhile. Errors: ChangeError."""
        assert change.aim is not None
        new = self._models.make(change.aim)
        old.note = "its replacement loads"
        self._models.start_one(new)
        try:
            await change.wait_for_answer(new)
        except ChangeError as error:
            await self._models.end_one(new)
            is_wanted = not isinstance(error, SupersededError)
            old.note = f"its replacement failed: {error}" if is_wanted else ""
            raise
        new.settings = change.aim
        self._models.by_id[old.id] = new
        await self._retire(old)

    async def _end_first(self, old: ResidentModel, change: ModelChange) -> None:
        """End a model to make room for another. Errors: SupersededError; the model continues."""
        closed, old.closed = old.closed, ("draining", "it is being replaced")
        try:
            await self._end_work(old, change)
        except SupersededError:
            old.closed = closed
            raise
        await self._models.end_one(old)
        old.closed = ("unloaded", "it was replaced")
        if old.handle.info is not None:
            self._spares[old.id] = old

    async def _await_answer(self, model: ResidentModel, change: ModelChange) -> None:
        """Wait until a model answers; restore the one that it replaced if it fails.

        Errors: ChangeError.
        """
        spare = self._spares.get(model.id)
        change.only_waits = spare is None
        try:
            await change.wait_for_answer(model)
        except SupersededError:
            raise
        except ChangeError as error:
            if spare is not None:
                self._models.by_id[model.id] = self._spares.pop(model.id)
                await self._models.end_one(model)
                self._models.restart(spare)
                spare.note = f"its replacement failed: {error}"
            raise
        self._spares.pop(model.id, None)

    async def _retire(self, model: ResidentModel) -> None:
        """End an unregistered model once it has answered its requests."""
        idle_since = time.monotonic()
        deadline = idle_since + self._settings.model_drain_s
        while (now := time.monotonic()) < deadline:
            if model.num_running:
                idle_since = now
            elif now - idle_since >= QUIET_S:
                break
            await asyncio.sleep(POLL_S)
        model.closed = ("unloaded", "it was replaced or removed")
        await self._models.end_one(model)
        log.info("model %s of earlier settings has ended", model.id)


async def wait_until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Wait for a condition; return whether it became true in time."""
    deadline = time.monotonic() + limit_s
    while not (found := is_so()) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return found


async def wait_for_ends(changes: Iterable[ModelChange], limit_s: float) -> None:
    """Wait for changes up to a timeout, at least one step; they continue afterwards."""
    await asyncio.sleep(0)
    if limit_s and (tasks := [change.task for change in changes]):
        await asyncio.wait(tasks, timeout=limit_s)


def refuse_configuration(error: ConfigurationError) -> APIError:
    """Return the error for a reload with an invalid configuration."""
    detail = f"The configuration cannot be used, and nothing was changed: {error}"
    return api_error("invalid_request", detail)
