"""Changes of what is resident, while other models answer: load, unload, drain, replace, remove.

No request is lost over a change. What is at work is answered first, for as long as `model_drain_s`;
who comes meanwhile is either answered by the model that takes the place, or told `model_loading`
with a time to come back at. A model of other settings is started beside the one that it replaces
where there is room for both, and takes its place when it answers:

    old   answers  answers  answers its last requests  ends
    new            loads    answers

Without that room the old one ends first. If the new one fails, the old one is kept, or comes back.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from logsteer.errors import api_error
from logsteer.schemas import ModelState
from logsteer_server.models.fit import fits_beside
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings

log = logging.getLogger(__name__)

QUIET_S = 1.0
"""A replaced model has ended its work when none was there for so long: a request that has found
it may be on its way."""
POLL_S = 0.02
RELOAD_RETRY_S = 5.0
OTHERS = {"models", "directory"}
"""Settings that are no reason to start the server again."""


@dataclass(slots=True)
class ReloadReport:
    """What a configuration that was read again changes: ids of models, names of settings."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    pending: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    needs_restart: list[str] = field(default_factory=list)


class ModelChanges:
    """Makes changes, each in a task of its own that goes on when nobody waits for it any more.

    `reread` reads the configuration again. Errors of it: ConfigurationError.
    """

    def __init__(
        self, models: ModelRegistry, settings: Settings, reread: Callable[[], Settings]
    ) -> None:
        self._models = models
        self._settings = settings
        self._reread = reread
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reload: asyncio.Task[None] | None = None

    def _begin(self, model_id: str, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(change)
        self._tasks[model_id] = task
        return task

    def close(self) -> None:
        """Give up all changes: the server ends."""
        for task in (*self._tasks.values(), *([self._reload] if self._reload else ())):
            task.cancel()

    async def drain(self, model: ResidentModel, wait_s: float) -> None:
        """Refuse a model new requests, and wait until those at work are answered."""
        self._check_free(model)
        if model.status[0] != "unloaded":
            model.closed = ("draining", "it was drained: load it to have it answer again")
            await _wait_until(lambda: not model.num_running, wait_s)

    async def unload(self, model: ResidentModel, wait_s: float) -> None:
        """Drain a model, and end its engine then."""
        self._check_free(model)
        if model.status[0] == "unloaded":
            return
        model.closed = ("draining", "it is being unloaded")
        await _wait_for(self._begin(model.id, self._unload(model)), wait_s)

    async def _unload(self, model: ResidentModel) -> None:
        await self._end_work(model)
        await self._models.end_one(model)
        model.closed = ("unloaded", "it was unloaded: load it to have it answer again")
        log.info("model %s was unloaded", model.id)

    async def _end_work(self, model: ResidentModel) -> None:
        """Wait until a model's requests are answered, or their time is over."""
        if not await _wait_until(lambda: not model.num_running, self._settings.model_drain_s):
            log.warning(
                "model %s: %d requests did not end within model_drain_s",
                *(model.id, model.num_running),
            )

    async def load(self, model: ResidentModel, wait_s: float) -> None:
        """Have a model answer again: with a new engine where it has none, or one that failed."""
        task = self._tasks.get(model.id)
        if task is not None and not task.done():
            if model.status[0] != "draining":
                self._check_free(model)
            await _wait_for(task, wait_s)
            if not task.done():
                return
        state = model.status[0]
        if state == "draining":
            model.closed = None
        elif state in ("unloaded", "failed"):
            await self._models.end_one(model)
            self._models.restart(model)
        await _wait_until(lambda: model.status[0] in ("ready", "failed"), wait_s)

    def _check_free(self, model: ResidentModel) -> None:
        """Refuse a second change of a model. Errors: APIError `overloaded`."""
        task = self._tasks.get(model.id)
        if task is not None and not task.done():
            detail = f"Another change of model {model.id} is at work; wait for its end."
            raise api_error("overloaded", detail, retry_after=RELOAD_RETRY_S)

    async def reload(self, wait_s: float = 0.0) -> ReloadReport:
        """Read the configuration again and change what is other in it.

        Errors: APIError `invalid_request` where it cannot be used, and `overloaded` while an
        earlier change goes on: nothing is changed then.
        """
        if self._reload is not None and not self._reload.done():
            detail = "A reload of the configuration is at work; wait for its end."
            raise api_error("overloaded", detail, retry_after=RELOAD_RETRY_S)
        try:
            new = await asyncio.to_thread(self._reread)
        except ConfigurationError as error:
            detail = f"The configuration cannot be used, and nothing was changed: {error}"
            raise api_error("invalid_request", detail) from error
        for model in self._models.by_id.values():
            self._check_free(model)
        report, changes = self._plan(new)
        report.pending = set(changes)
        for model_id, change in changes.items():
            self._begin(model_id, self._follow(model_id, change, report))
        self._models.sort([model.id for model in new.models])
        tasks = [self._tasks[model_id] for model_id in changes]
        self._reload = asyncio.create_task(_join(tasks))
        await _wait_for(self._reload, wait_s)
        return report

    def _plan(self, new: Settings) -> tuple[ReloadReport, dict[str, Coroutine[Any, Any, None]]]:
        """Return what a configuration changes, and what does it, by the model's id."""
        report = ReloadReport(needs_restart=self._find_fixed(new))
        changes: dict[str, Coroutine[Any, Any, None]] = {}
        by_id = self._models.by_id
        for wanted in new.models:
            old = by_id.get(wanted.id)
            if old is None:
                report.added.append(wanted.id)
                changes[wanted.id] = self._add(wanted)
            elif old.settings == wanted:
                report.unchanged.append(wanted.id)
            elif old.settings.model_copy(update={"required": wanted.required}) == wanted:
                old.settings = wanted
                report.replaced.append(wanted.id)
            else:
                report.replaced.append(wanted.id)
                changes[wanted.id] = self._replace(old, wanted)
        kept = {model.id for model in new.models}
        for model_id, model in list(by_id.items()):
            if model_id not in kept:
                report.removed.append(model_id)
                del by_id[model_id]
                changes[model_id] = self._retire(model)
        return report, changes

    def _find_fixed(self, new: Settings) -> list[str]:
        """Return the settings of a configuration that are others, and count from the start on."""
        return [
            name
            for name in Settings.model_fields
            if name not in OTHERS and getattr(new, name) != getattr(self._settings, name)
        ]

    async def _follow(
        self, model_id: str, change: Coroutine[Any, Any, None], report: ReloadReport
    ) -> None:
        try:
            await change
        except ChangeError as error:
            report.failed[model_id] = str(error)
            log.error("model %s: %s", model_id, error)
        finally:
            report.pending.discard(model_id)

    async def _add(self, settings: ModelSettings) -> None:
        model = self._models.make(settings)
        self._models.by_id[settings.id] = model
        self._models.start_one(model)
        await _wait_for_answer(model)

    async def _retire(self, model: ResidentModel) -> None:
        """End a model that requests no longer find, once it has answered those that did."""
        since = time.monotonic()
        deadline = since + self._settings.model_drain_s
        while (now := time.monotonic()) < deadline and now - since < QUIET_S:
            if model.num_running:
                since = now
            await asyncio.sleep(POLL_S)
        model.closed = ("unloaded", "it was replaced or removed")
        await self._models.end_one(model)
        log.info("model %s of earlier settings has ended", model.id)

    async def _replace(self, old: ResidentModel, wanted: ModelSettings) -> None:
        new = self._models.make(wanted)
        state = old.status[0]
        if state == "unloaded":
            new.closed = old.closed
            self._models.by_id[old.id] = new
            return
        if state == "ready" and fits_beside(old.settings, wanted, self._settings):
            old.note = "its replacement loads"
            self._models.start_one(new)
            try:
                await _wait_for_answer(new)
            except ChangeError as error:
                await self._models.end_one(new)
                old.note = f"its replacement failed: {error}"
                raise
            self._models.by_id[old.id] = new
            await self._retire(old)
            return
        old.closed = ("draining", "it is being replaced")
        await self._end_work(old)
        await self._models.end_one(old)
        old.closed = ("unloaded", "it was replaced")
        self._models.by_id[old.id] = new
        self._models.start_one(new)
        try:
            await _wait_for_answer(new)
        except ChangeError as error:
            await self._models.end_one(new)
            self._models.by_id[old.id] = old
            self._models.restart(old)
            old.note = f"its replacement failed: {error}"
            raise


class ChangeError(Exception):
    """A change that could not be made; the message says why."""


async def _wait_for_answer(model: ResidentModel) -> None:
    """Wait until a model answers, with each replica that loads. Errors: ChangeError if it fails."""
    settled: tuple[ModelState, ...] = ("ready", "failed", "unloaded")
    while model.status[0] not in settled:
        await asyncio.sleep(POLL_S)
    while any(replica.state == "loading" for replica in model.handle.read()):
        await asyncio.sleep(POLL_S)
    state, detail = model.status
    if state != "ready":
        raise ChangeError(detail)


async def _wait_until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Return whether something became so in time."""
    deadline = time.monotonic() + limit_s
    while not (found := is_so()) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return found


async def _wait_for(task: asyncio.Task[None], limit_s: float) -> None:
    """Wait for a task that goes on afterwards."""
    if limit_s:
        await asyncio.wait([task], timeout=limit_s)
    else:
        await asyncio.sleep(0)


async def _join(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
