"""The configured models, by id: start, lookup, shutdown."""

import asyncio
from collections.abc import Callable, Collection, Sequence

from logsteer.errors import api_error
from logsteer_server.models.admission import KEY_SHARE, SCRATCH, Admission
from logsteer_server.models.cache import ResultCache
from logsteer_server.models.model import ResidentModel
from logsteer_server.observation.logs import LogStyle
from logsteer_server.observation.metrics import Metrics
from logsteer_server.runtime.handle import EngineHandle
from logsteer_server.runtime.supervision import SupervisionLimits
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.stores.contents import JobContents

MakeHandle = Callable[[ModelSettings], EngineHandle]
"""Creates the handle of a model's engine, without starting it."""


def make_handles(settings: Settings, contents: JobContents) -> MakeHandle:
    """Return a factory of engine handles with these settings' supervision."""
    limits = SupervisionLimits(
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        max_step_s=settings.max_step_s,
        max_load_s=settings.max_load_s,
        max_restarts=settings.max_restarts,
        style=LogStyle(settings.log_format, settings.log_level),
    )
    return lambda model: EngineHandle(model.to_spec(settings.directory), limits, contents)


def choose_model(asked: str | None, ids: Collection[str], default: str | None) -> str:
    """Return the id of the model that a request names, or the default.

    Errors: APIError `unknown_model`, or `invalid_request` where it names none of several.
    """
    chosen = default if asked is None else asked
    if chosen is None:
        detail = f"Several models are resident; name one of them as model: {', '.join(ids)}."
        raise api_error("invalid_request", detail, param="model")
    if chosen not in ids:
        detail = f"No model {chosen[:80]!r} is resident; these are: {', '.join(ids)}."
        raise api_error("unknown_model", detail, param="model")
    return chosen


class ModelRegistry:
    """Every configured model, by id; `make_handle` creates the handles of their engines."""

    def __init__(
        self,
        settings: Settings,
        results: ResultCache,
        metrics: Metrics,
        make_handle: MakeHandle,
    ) -> None:
        self._make_handle = make_handle
        self._settings = settings
        self._results = results
        self._metrics = metrics
        self.by_id = {model.id: self.make(model) for model in settings.models}
        metrics.read_models = lambda: [model.read() for model in self.by_id.values()]
        self.scratch = Admission(settings.max_reference_bytes, SCRATCH)
        """Room for the log-probabilities of one model that another one reads."""
        self._loading: dict[ResidentModel, asyncio.Task[None]] = {}
        self._running: set[ResidentModel] = set()
        """Models with an engine: registered ones, and those being added or removed."""
        self._has_started = False

    def make(self, model: ModelSettings) -> ResidentModel:
        """Create a model with these settings, neither started nor registered."""
        settings = self._settings
        return ResidentModel(
            model,
            self._make_handle(model),
            Admission(settings.max_pending_tokens * model.replicas, share=KEY_SHARE),
            self._results,
            self._metrics.for_model(model.id),
        )

    def start(self) -> None:
        """Start every engine in the background."""
        for model in self.by_id.values():
            self.start_one(model)

    def start_one(self, model: ResidentModel) -> None:
        """Start a model's engine in the background."""
        model.handle.start()
        self._running.add(model)
        if (earlier := self._loading.get(model)) is not None:
            earlier.cancel()
        self._loading[model] = asyncio.create_task(model.load_codec())
        self._loading[model].add_done_callback(lambda _: self._loading.pop(model, None))

    def restart(self, model: ResidentModel) -> None:
        """Start a new engine for a model whose engine was closed."""
        model.restart_with(self._make_handle(model.settings))
        self.start_one(model)

    async def end_one(self, model: ResidentModel) -> None:
        """End a model's engine."""
        if (loading := self._loading.get(model)) is not None:
            loading.cancel()
        await model.handle.close()
        self._running.discard(model)

    def sort(self, ids: Sequence[str]) -> None:
        """Sort models by these ids, others last."""
        places = {model_id: place for place, model_id in enumerate(ids)}
        order = sorted(self.by_id, key=lambda model_id: places.get(model_id, len(places)))
        self.by_id = {model_id: self.by_id[model_id] for model_id in order}

    @property
    def required(self) -> list[ResidentModel]:
        """The models that readiness requires."""
        return [model for model in self.by_id.values() if model.settings.required]

    @property
    def default(self) -> ResidentModel | None:
        """The model of requests without a model: the only one, or the configured default."""
        models = list(self.by_id.values())
        meant = models if len(models) == 1 else [one for one in models if one.settings.default]
        return meant[0] if meant else None

    @property
    def has_started(self) -> bool:
        """Whether all required models have been ready at the same time once."""
        self._has_started = self._has_started or all(model.is_ready for model in self.required)
        return self._has_started

    def find_given_up(self) -> ResidentModel | None:
        """Return a required model whose engine is not restarted any more, if any."""
        return next((model for model in self.required if model.handle.given_up), None)

    def stop(self) -> None:
        """Fail all waiting calls because the server is shutting down."""
        for model in self._running:
            model.handle.stop()

    async def close(self) -> None:
        """End every engine."""
        for task in list(self._loading.values()):
            task.cancel()
        await asyncio.gather(*(model.handle.close() for model in self._running))

    def find(self, model_id: str | None) -> ResidentModel:
        """Look up a model by id, None for the default. Errors: as `choose_model`."""
        default = None if self.default is None else self.default.id
        return self.by_id[choose_model(model_id, self.by_id, default)]
