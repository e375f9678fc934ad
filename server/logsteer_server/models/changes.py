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
from collections.abc import Callable

from logsteer.errors import APIError, api_error
from logsteer.schemas import ModelState
from logsteer_server.models.fit import fits_beside
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry, Prove
from logsteer_server.models.transitions import (
    ChangeError,
    ReloadReport,
    SupersededError,
    Transition,
    Transitions,
    find_fixed,
    is_same_engine,
    wait_for_ends,
)
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings

log = logging.getLogger(__name__)

QUIET_S = 1.0
"""A replaced model has ended its work when none was there for so long: a request that has found
it may be on its way."""
POLL_S = 0.02
RELOAD_RETRY_S = 5.0
COMES_UP: tuple[ModelState, ...] = ("loading", "testing", "restarting")
WAITS: tuple[ModelState, str] = ("loading", "an earlier change of it has to end first")
"""What is said of a model that has not been started yet."""


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
        self._changes = Transitions()
        self._reading = asyncio.Lock()
        """Of two configurations, the one that was read last counts."""
        self._spares: dict[str, ResidentModel] = {}
        """Models that have ended for one that has not answered yet, and come back if it fails."""

    async def start(self, prove: Prove | None) -> None:
        """Start the models; with `prove`, none answers before that."""
        self._models.start(prove)

    def close(self) -> None:
        """Give up all changes: the server ends."""
        self._changes.close()

    async def drain(self, model: ResidentModel, wait_s: float) -> None:
        """Refuse a model new requests, and wait until those at work are answered."""
        self._check_free(model)
        if model.status[0] != "unloaded":
            model.closed = ("draining", "it was drained: load it to have it answer again")
            await wait_until(lambda: not model.num_running, wait_s)

    async def unload(self, model: ResidentModel, wait_s: float) -> None:
        """Drain a model, and end its engine then."""
        self._check_free(model)
        if model.status[0] == "unloaded":
            return
        model.closed = ("draining", "it is being unloaded")
        unloading = self._changes.begin(model.id, model.settings, lambda _: self._unload(model))
        await wait_for_ends([unloading], wait_s)

    async def _unload(self, model: ResidentModel) -> None:
        await self.end_work(model)
        await self._models.end_one(model)
        model.closed = ("unloaded", "it was unloaded: load it to have it answer again")
        log.info("model %s was unloaded", model.id)

    async def end_work(self, model: ResidentModel) -> None:
        """Wait until a model's requests are answered, or their time is over."""
        if not await wait_until(lambda: not model.num_running, self._settings.model_drain_s):
            log.warning(
                "model %s: %d requests did not end within model_drain_s",
                *(model.id, model.num_running),
            )

    async def load(self, model: ResidentModel, wait_s: float) -> None:
        """Have a model answer again: with a new engine where it has none, or one that failed."""
        if (change := self._changes.find(model.id)) is not None:
            if model.status[0] != "draining":
                self._check_free(model)
            await wait_for_ends([change], wait_s)
            if not change.task.done():
                return
        state = model.status[0]
        if state == "draining":
            model.closed = None
        elif state in ("unloaded", "failed"):
            await self._models.end_one(model)
            self._models.restart(model)
        await wait_until(lambda: model.status[0] in ("ready", "failed"), wait_s)

    def _check_free(self, model: ResidentModel) -> None:
        """Refuse a second change of a model. Errors: APIError `overloaded`."""
        if self._changes.is_busy(model.id):
            raise refuse_second(model.id)

    async def reload(self, wait_s: float = 0.0) -> ReloadReport:
        """Read the configuration again and change what is other in it.

        Errors: APIError `invalid_request` where it cannot be used; nothing is changed then.
        """
        async with self._reading:
            try:
                new = await asyncio.to_thread(self._reread)
            except ConfigurationError as error:
                raise refuse_configuration(error) from error
        by_id = self._models.by_id
        there = {name: own.settings for name, own in by_id.items()}
        report, changes = self._changes.take(there, new.models, self._reach)
        report.needs_restart = find_fixed(self._settings, new)
        for wanted in new.models:
            if wanted.id not in by_id:
                self._place(wanted)
            elif is_same_engine(by_id[wanted.id].settings, wanted):
                by_id[wanted.id].settings = wanted
        self._models.sort([model.id for model in new.models])
        await wait_for_ends(changes, wait_s)
        return report

    def _place(self, settings: ModelSettings) -> ResidentModel:
        """Have requests find a model, which is not started yet."""
        model = self._models.by_id[settings.id] = self._models.make(settings)
        model.closed = WAITS
        return model

    async def _reach(self, change: Transition) -> None:
        """Bring a model from whatever it is to the aim of a change. Errors: ChangeError."""
        aim, model = change.aim, self._models.by_id[change.model_id]
        if aim is None:
            self._spares.pop(model.id, None)
            await self.retire(self._models.by_id.pop(model.id))
            return
        if model.is_ready:
            self._spares.pop(model.id, None)
        if not is_same_engine(model.settings, aim):
            state = model.status[0]
            if state == "unloaded":
                closed, model = model.closed, self._place(aim)
                model.closed = closed
                return
            if state == "ready" and await change.wait(
                asyncio.to_thread(fits_beside, model.settings, aim, self._settings)
            ):
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
        await self._see_answer(model, change)

    async def _replace_beside(self, old: ResidentModel, change: Transition) -> None:
        """Put a model in the place of one that answers meanwhile. Errors: ChangeError."""
        assert change.aim is not None
        new = self._models.make(change.aim)
        old.note = "its replacement loads"
        self._models.start_one(new)
        try:
            await change.wait(wait_for_answer(new))
        except ChangeError as error:
            await self._models.end_one(new)
            is_wanted = not isinstance(error, SupersededError)
            old.note = f"its replacement failed: {error}" if is_wanted else ""
            raise
        new.settings = change.aim
        self._models.by_id[old.id] = new
        await self.retire(old)

    async def _end_first(self, old: ResidentModel, change: Transition) -> None:
        """End a model to make room for another. Errors: SupersededError; it goes on then."""
        closed, old.closed = old.closed, ("draining", "it is being replaced")
        try:
            await change.wait(self.end_work(old))
        except SupersededError:
            old.closed = closed
            raise
        await self._models.end_one(old)
        old.closed = ("unloaded", "it was replaced")
        if old.handle.info is not None:
            self._spares[old.id] = old

    async def _see_answer(self, model: ResidentModel, change: Transition) -> None:
        """Wait until a model answers; what it has replaced comes back if it fails.

        Errors: ChangeError.
        """
        spare = self._spares.get(model.id)
        change.only_waits = spare is None
        try:
            await change.wait(wait_for_answer(model))
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

    async def retire(self, model: ResidentModel) -> None:
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


def refuse_configuration(error: ConfigurationError) -> APIError:
    """Return the error of a configuration that is not used."""
    detail = f"The configuration cannot be used, and nothing was changed: {error}"
    return api_error("invalid_request", detail)


def refuse_second(model_id: str) -> APIError:
    """Return the error of a change of a model while another one is at work."""
    detail = f"Another change of model {model_id} is at work; wait for its end."
    return api_error("overloaded", detail, retry_after=RELOAD_RETRY_S)


async def wait_for_answer(model: ResidentModel) -> None:
    """Wait until a model answers, with each replica that loads. Errors: ChangeError if it fails."""
    while model.status[0] in COMES_UP:
        await asyncio.sleep(POLL_S)
    while any(replica.state == "loading" for replica in model.handle.read()):
        await asyncio.sleep(POLL_S)
    state, detail = model.status
    if state != "ready":
        raise ChangeError(detail)


async def wait_until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Return whether something became so in time."""
    deadline = time.monotonic() + limit_s
    while not (found := is_so()) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return found
