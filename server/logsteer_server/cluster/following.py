"""An ingress' models brought to what the coordinator wants, one model beside the other."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from logsteer_server.cluster.engine import RemoteEngine
from logsteer_server.cluster.wanted import BEING_REPLACED, WantedModel, WantedModels
from logsteer_server.models.changes import ModelChanges, wait_for_answer
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.models.transitions import (
    ChangeError,
    SupersededError,
    Transition,
    Transitions,
    is_same_engine,
)

log = logging.getLogger(__name__)

POLL_S = 0.02


class WantedFollower:
    """Does to the models of one process what a revision says; `note` is told when that is done.

    Done means that nothing of earlier revisions is used here: their requests are answered, or
    their time is over.
    """

    def __init__(
        self, models: ModelRegistry, own: ModelChanges, note: Callable[[int], None]
    ) -> None:
        self._models = models
        self._own = own
        self._note = note
        self._given: dict[str, WantedModel | None] = {}
        self._changes = Transitions()
        self._noting: set[asyncio.Task[None]] = set()

    def take(self, wanted: WantedModels) -> None:
        """Begin to follow a revision; requests find models that are added from now on."""
        for model_id in {**self._given, **wanted.by_id}:
            entry = wanted.by_id.get(model_id)
            if model_id in self._given and self._given[model_id] == entry:
                continue
            self._given[model_id] = entry
            if entry is not None and model_id not in self._models.by_id:
                self._add(entry)
            aim = None if entry is None else entry.settings
            self._changes.begin(model_id, aim, partial(self._settle, entry))
        self._models.sort(list(wanted.by_id))
        noting = asyncio.create_task(self._tell(wanted.revision, self._changes.at_work))
        self._noting.add(noting)
        noting.add_done_callback(self._noting.discard)

    def close(self) -> None:
        """Give up: the process ends."""
        self._changes.close()
        for task in self._noting:
            task.cancel()

    async def _tell(self, revision: int, changes: list[Transition]) -> None:
        if changes:
            await asyncio.wait([change.task for change in changes])
        self._note(revision)

    async def _settle(self, entry: WantedModel | None, change: Transition) -> None:
        """Bring a model to what is wanted of it."""
        model = self._models.by_id.get(change.model_id)
        if entry is None:
            if model is not None:
                del self._models.by_id[model.id]
                await self._own.retire(model)
        elif model is None:
            self._add(entry)
        elif not is_same_engine(model.settings, entry.settings):
            await self._replace(model, entry, change)
        else:
            await self._bring(model, entry, change)

    def _add(self, entry: WantedModel) -> ResidentModel:
        """Have a model found; returns before its engine answers."""
        model = self._models.make(entry.settings)
        self._models.by_id[model.id] = model
        self._show(model, entry)
        if entry.has_engine:
            self._models.start_one(model)
        return model

    def _show(self, model: ResidentModel, entry: WantedModel) -> None:
        """Have a model's state be what is wanted, where nothing has to end or start for it."""
        model.settings, model.note = entry.settings, entry.note
        model.closed = None
        if entry.state in ("draining", "unloaded"):
            model.closed = (entry.state, entry.detail)
        elif entry.state == "failed" and isinstance(model.handle, RemoteEngine):
            model.handle.give_up(entry.detail)

    async def _replace(self, old: ResidentModel, entry: WantedModel, change: Transition) -> None:
        """Have a model of other settings in the place of one, from when on it answers."""
        if not entry.has_engine or old.status[0] != "ready":
            self._add(entry)
            await self._own.retire(old)
            return
        new = self._models.make(entry.settings)
        self._models.start_one(new)
        try:
            await change.wait(wait_for_answer(new))
        except SupersededError:
            await self._models.end_one(new)
            raise
        except ChangeError as error:
            log.error("model %s: %s", new.id, error)
        self._show(new, entry)
        self._models.by_id[old.id] = new
        await self._own.retire(old)

    async def _bring(self, model: ResidentModel, entry: WantedModel, change: Transition) -> None:
        """Change the state of a model that keeps its settings."""
        has_engine = model.status[0] not in ("unloaded", "failed")
        if not entry.has_engine and has_engine:
            is_replaced = entry.detail == BEING_REPLACED
            model.closed = ("draining", entry.detail if is_replaced else "it is being unloaded")
            await self._own.end_work(model)
            await self._models.end_one(model)
        if entry.has_engine and not has_engine:
            self._models.restart(model)
        self._show(model, entry)
        while entry.state == "draining" and model.num_running and not change.is_given_up:
            await asyncio.sleep(POLL_S)
