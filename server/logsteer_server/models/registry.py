"""The models of the configuration, by id: started, found, ended."""

import asyncio
from collections.abc import Awaitable, Callable

from logsteer.errors import api_error
from logsteer_server.engines.supervisor import EngineHandle, SupervisionLimits
from logsteer_server.engines.watchdog import WatchLimits
from logsteer_server.models.admission import Admission
from logsteer_server.models.cache import ResultCache
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.scratch import ScratchSpace
from logsteer_server.observation.logs import LogStyle
from logsteer_server.observation.metrics import Metrics
from logsteer_server.settings import Settings

Prove = Callable[[ResidentModel], Awaitable[None]]
"""Finds out whether a model may answer, and lifts or labels its gate."""


class ModelRegistry:
    """Every configured model, by id."""

    def __init__(self, settings: Settings, results: ResultCache, metrics: Metrics) -> None:
        limits = SupervisionLimits(
            max_unread_results=settings.max_unread_results,
            watch=WatchLimits(
                settings.heartbeat_timeout_s, settings.max_step_s, settings.max_load_s
            ),
            max_restarts=settings.max_restarts,
            restart_window_s=settings.restart_window_s,
            poison_s=settings.poison_s,
            style=LogStyle(settings.log_format, settings.log_level),
        )
        self.by_id = {
            model.id: ResidentModel(
                model,
                EngineHandle(model.to_spec(settings.directory), limits),
                Admission(settings.max_pending_tokens, share=settings.max_key_share),
                results,
                metrics.for_model(model.id),
            )
            for model in settings.models
        }
        metrics.read_models = lambda: [model.read() for model in self.by_id.values()]
        self.scratch = ScratchSpace(settings.max_reference_bytes)
        self._loading: list[asyncio.Task[None]] = []

    def start(self, prove: Prove | None = None) -> None:
        """Start every engine; returns at once. With `prove`, no model answers before that."""
        for model in self.by_id.values():
            if prove is not None:
                model.gate = ("testing", "its self-test has not ended")
            model.handle.start()
            self._loading.append(asyncio.create_task(_load(model, prove)))

    def find_given_up(self) -> ResidentModel | None:
        """Return a required model whose engine is not started any more, if there is one."""
        models = self.by_id.values()
        return next((m for m in models if m.settings.required and m.handle.given_up), None)

    def stop(self) -> None:
        """Answer everyone who waits for an engine that the server is shutting down."""
        for model in self.by_id.values():
            model.handle.stop()

    async def close(self) -> None:
        """End every engine."""
        for task in self._loading:
            task.cancel()
        await asyncio.gather(*(model.handle.close() for model in self.by_id.values()))

    def find(self, model_id: str | None) -> ResidentModel:
        """Return the model of that id, or the only one for None.

        Errors: APIError `unknown_model`, or `invalid_request` where None is ambiguous.
        """
        ids = ", ".join(self.by_id)
        if model_id is None:
            if len(self.by_id) == 1:
                return next(iter(self.by_id.values()))
            detail = f"Several models are resident; name one of them as model: {ids}."
            raise api_error("invalid_request", detail, param="model")
        if model_id not in self.by_id:
            detail = f"No model {model_id!r} is resident; these are: {ids}."
            raise api_error("unknown_model", detail, param="model")
        return self.by_id[model_id]


async def _load(model: ResidentModel, prove: Prove | None) -> None:
    await model.load_codec()
    if prove is not None and model.handle.state != "failed":
        await prove(model)
