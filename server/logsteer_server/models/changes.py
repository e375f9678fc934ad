"""Changes of resident models while others answer: load, unload, drain, replace, remove.

No request is lost in a change. Running requests finish first, within `model_drain_s`. A request
that arrives meanwhile is answered by the replacement, or refused as `model_loading` with a
Retry-After. The new model's files are checked before anything ends. With `reload_beside` it loads
beside the old one, and takes over when it is ready:

    old   answers  answers  answers its last requests  ends
    new            loads    answers

Otherwise the old model ends first. If the new one fails, the old one stays or is restored.
A change during another one of the same model, and a reload during any, is refused as `overloaded`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping

from logsteer.errors import APIError, api_error
from logsteer.schemas import ModelState, ReloadAnswer
from logsteer_server.models.fit import check_files
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.runtime.engine_process import ENVIRONMENT
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings

log = logging.getLogger(__name__)

QUIET_S = 1.0
"""How long a replaced model must be idle before it ends: a request that has looked it up may
still arrive."""
POLL_S = 0.02
RETRY_S = 5.0
COMES_UP: tuple[ModelState, ...] = ("loading", "restarting")


class ChangeError(Exception):
    """A change failed; the message says why."""


def compare_models(old: Mapping[str, object], new: Mapping[str, object]) -> ReloadAnswer:
    """Return the models that are added, removed, replaced and unchanged, by id."""
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


Change = asyncio.Task[str | None]
"""A running change; its result says why it failed, if it did."""


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
        self._running: dict[str, Change] = {}

    def close(self) -> None:
        """Cancel all changes at shutdown."""
        for change in self._running.values():
            change.cancel()

    def _begin(self, model_id: str, work: Coroutine[None, None, None]) -> Change:
        """Start a change of a model that has none."""
        change = self._running[model_id] = asyncio.create_task(self._finish(model_id, work))
        change.add_done_callback(lambda _: self._running.pop(model_id))
        return change

    async def _finish(self, model_id: str, work: Coroutine[None, None, None]) -> str | None:
        try:
            await work
        except ChangeError as error:
            log.error("model %s: %s", model_id, error)
            return str(error)
        except Exception as error:  # whatever it is, the report says so
            log.exception("model %s: a change broke", model_id)
            return f"the change ended with {error!r}"
        return None

    def _check_free(self, *model_ids: str) -> None:
        """Refuse a second change of models. Errors: APIError `overloaded`."""
        for model_id in model_ids:
            if model_id in self._running:
                detail = f"Another change of model {model_id} is running; wait for its end."
                raise api_error("overloaded", detail, retry_after=RETRY_S)

    # ------------------------------------------------------------------ one model

    async def drain(self, model: ResidentModel, wait_s: float) -> None:
        """Refuse new requests to a model, and wait until running ones are answered."""
        self._check_free(model.id)
        if model.status[0] != "unloaded":
            model.closed = ("draining", "it was drained: load it to have it answer again")
            await wait_until(lambda: not model.num_running, wait_s)

    async def unload(self, model: ResidentModel, wait_s: float) -> None:
        """Drain a model, then end its engine."""
        self._check_free(model.id)
        if model.status[0] == "unloaded":
            return
        model.closed = ("draining", "it is being unloaded")

        async def work() -> None:
            await self._answer_last(model)
            await self._models.end_one(model)
            model.closed = ("unloaded", "it was unloaded: load it to have it answer again")
            log.info("model %s was unloaded", model.id)

        await asyncio.wait([self._begin(model.id, work())], timeout=wait_s)

    async def load(self, model: ResidentModel, wait_s: float) -> None:
        """Reopen a model; start a new engine if it has none or a failed one."""
        self._check_free(model.id)

        async def work() -> None:
            await self._models.end_one(model)
            self._models.restart(model)

        state = model.status[0]
        if state == "draining":
            model.closed = None
        elif state in ("unloaded", "failed"):
            await asyncio.wait([self._begin(model.id, work())])
        await wait_until(lambda: model.status[0] in ("ready", "failed"), wait_s)

    async def reset_prefix_cache(self, model: ResidentModel) -> None:
        """Have a model use nothing of earlier requests."""
        model.num_resets += 1

    async def _answer_last(self, model: ResidentModel) -> None:
        """Wait until a model's requests are answered, or the timeout."""
        if not await wait_until(lambda: not model.num_running, self._settings.model_drain_s):
            log.warning(
                "model %s: %d requests did not end within model_drain_s",
                *(model.id, model.num_running),
            )

    # ------------------------------------------------------------------ all models

    async def reload(self, wait_s: float) -> ReloadAnswer:
        """Read the configuration again and apply the differences.

        Errors: APIError `invalid_request` if it is invalid, `overloaded` while a change is running;
        then nothing changes.
        """
        try:
            new = await asyncio.to_thread(self._read)
        except ConfigurationError as error:
            raise refuse_configuration(error) from error
        self._check_free(*self._running)
        by_id, wanted = self._models.by_id, {model.id: model for model in new.models}
        report = compare_models({name: own.settings for name, own in by_id.items()}, wanted)
        report.needs_restart = [
            name
            for name in Settings.model_fields
            if name != "models" and getattr(new, name) != getattr(self._settings, name)
        ]
        changes: dict[str, Change] = {}
        for model_id in report.removed:
            changes[model_id] = self._begin(model_id, self._retire(by_id.pop(model_id)))
        for model_id in report.added:
            changes[model_id] = self._begin(model_id, self._wait(self._start(wanted[model_id])))
        for model_id in report.replaced:
            old, aim = by_id[model_id], wanted[model_id]
            if is_same_engine(old.settings, aim):
                old.settings = aim
            else:
                changes[model_id] = self._begin(model_id, self._replace(old, aim))
        self._models.sort(list(wanted))
        if changes:
            await asyncio.wait(changes.values(), timeout=wait_s)
        report.pending = [name for name, change in changes.items() if not change.done()]
        ended = {name: change.result() for name, change in changes.items() if change.done()}
        report.failed = {name: why for name, why in ended.items() if why is not None}
        return report

    def _read(self) -> Settings:
        with ENVIRONMENT:
            return self._reread()

    def _start(self, settings: ModelSettings) -> ResidentModel:
        """Register and start a model."""
        model = self._models.by_id[settings.id] = self._models.make(settings)
        self._models.start_one(model)
        return model

    async def _wait(self, model: ResidentModel) -> None:
        """Wait until a model and all its loading replicas are ready. Errors: ChangeError."""
        while model.status[0] in COMES_UP or any(
            replica.state == "loading" for replica in model.handle.read()
        ):
            await asyncio.sleep(POLL_S)
        state, detail = model.status
        if state != "ready":
            raise ChangeError(detail)

    async def _replace(self, old: ResidentModel, aim: ModelSettings) -> None:
        """Replace a model. Errors: ChangeError."""
        models = self._models
        if old.status[0] == "unloaded":
            models.by_id[old.id] = models.make(aim)
            models.by_id[old.id].closed = old.closed
            return
        try:
            await asyncio.to_thread(check_files, aim, self._settings)
            beside = old.is_ready and self._settings.reload_beside
            await (self._replace_beside if beside else self._replace_first)(old, aim)
        except (ChangeError, ValueError) as error:
            old.note = f"its replacement failed: {error}"
            raise ChangeError(str(error)) from error

    async def _replace_beside(self, old: ResidentModel, aim: ModelSettings) -> None:
        """Replace a model that answers meanwhile. Errors: ChangeError; it stays."""
        new = self._models.make(aim)
        old.note = "its replacement loads"
        self._models.start_one(new)
        try:
            await self._wait(new)
        except ChangeError:
            await self._models.end_one(new)
            raise
        self._models.by_id[old.id] = new
        await self._retire(old)

    async def _replace_first(self, old: ResidentModel, aim: ModelSettings) -> None:
        """End a model to make room for another. Errors: ChangeError; one that answered is back."""
        has_answered = old.handle.info is not None
        old.closed = ("draining", "it is being replaced")
        await self._answer_last(old)
        await self._models.end_one(old)
        old.closed = ("unloaded", "it was replaced")
        new = self._start(aim)
        try:
            await self._wait(new)
        except ChangeError:
            if has_answered:
                self._models.by_id[old.id] = old
                await self._models.end_one(new)
                self._models.restart(old)
            raise

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


def refuse_configuration(error: ConfigurationError) -> APIError:
    """Return the error for a reload with an invalid configuration."""
    detail = f"The configuration cannot be used, and nothing was changed: {error}"
    return api_error("invalid_request", detail)
