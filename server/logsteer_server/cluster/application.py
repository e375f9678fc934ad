"""A configuration file as a Ray Serve application: its deployments, and what each may take."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from logsteer_server.app import create_app
from logsteer_server.cluster.actors import watch_actors
from logsteer_server.cluster.engine import RemoteEngine
from logsteer_server.cluster.replica import HandleCalls, ModelReplica
from logsteer_server.engines.handle import EngineHandle
from logsteer_server.models.registry import make_limits
from logsteer_server.observation.logs import LogStyle, configure_logs
from logsteer_server.serving import check_places, check_vllm_arguments
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings, load_settings

MAX_CALLS = 100_000
"""Calls at once of a replica: how many it is given is settled by the queues of ingresses, not here.
"""
MAX_REQUESTS = 4096
HEALTH_EVERY_S = 5.0
OF_ONE_MACHINE = ("uds", "metrics_port")
"""Settings of `logsteer-server`'s own sockets, which Serve's proxies have in its place."""


class ClusterArguments(BaseModel):
    """What `build` takes: the service's configuration, and what Ray sets aside for it."""

    model_config = ConfigDict(extra="forbid")

    config: Path = Field(description="The configuration file, as `logsteer-server` has it.")
    host: str = Field("0.0.0.0", description="Address that Serve's proxies listen on.")  # noqa: S104
    ingresses: int = Field(1, ge=1, description="Processes that answer HTTP.")
    cpus: float = Field(1.0, ge=0, description="CPUs that Ray sets aside for each replica.")
    gpus: bool = Field(
        False,
        description="Whether Ray sets a GPU aside for each device of a replica: tensor_parallel x "
        "pipeline_parallel, all on one node.",
    )
    calls_per_replica: float = Field(
        4.0, gt=0, description="Calls at work in a replica at which max_replicas has another start."
    )


class _Ingress:
    """The application of `app.py`, with the models' replicas behind it."""

    def __init__(self, settings: Settings, handles: dict[str, Any]) -> None:
        configure_logs(LogStyle(settings.log_format, settings.log_level))
        self._settings = settings
        self._handles = handles

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application, whose lifespan Serve begins and ends."""
        return create_app(self._settings, self._make_handle)

    def _make_handle(self, model: ModelSettings) -> EngineHandle:
        return RemoteEngine(
            model.to_spec(self._settings.directory),
            make_limits(self._settings),
            HandleCalls(self._handles[model.id]),
            partial(watch_actors, model.id),
            least=model.replicas,
            most=model.max_replicas or model.replicas,
        )


Ingress = serve.ingress()(_Ingress)


def build(arguments: ClusterArguments) -> Any:
    """Return the application for `serve.run`, `serve deploy` or a RayService.

    All processes have the settings that are read here, environment included. Errors:
    ConfigurationError.
    """
    return bind(read_settings(arguments), arguments)


def bind(settings: Settings, arguments: ClusterArguments) -> Any:
    """Return the application of settings that `read_settings` has returned."""
    models = {model.id: _deploy_model(model, settings, arguments) for model in settings.models}
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=arguments.ingresses,
        max_ongoing_requests=MAX_REQUESTS,
        graceful_shutdown_timeout_s=settings.drain_s,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(settings, models)


def read_settings(arguments: ClusterArguments) -> Settings:
    """Read the configuration. Errors: ConfigurationError, also for what Ray has no use for."""
    settings = load_settings(arguments.config)
    settings = settings.model_copy(
        update={"host": arguments.host, "directory": settings.directory.resolve()}
    )
    if found := [name for name in OF_ONE_MACHINE if getattr(settings, name) is not None]:
        raise ConfigurationError(f"{', '.join(found)}: Ray Serve's proxies listen; leave it out")
    check_vllm_arguments(settings)
    check_places(settings)
    return settings


def _deploy_model(model: ModelSettings, settings: Settings, arguments: ClusterArguments) -> Any:
    """Return a model's deployment, bound to what its engine needs."""
    spec = replace(model.to_spec(settings.directory), replicas=1, devices="auto")
    if model.devices == "cpu":
        spec = replace(spec, devices="cpu")
    needs_gpus = arguments.gpus and model.devices != "cpu" and model.engine != "fake"
    gpus = model.tensor_parallel * model.pipeline_parallel if needs_gpus else 0
    number: dict[str, Any] = {"num_replicas": model.replicas}
    if model.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=model.replicas,
            max_replicas=model.max_replicas,
            target_ongoing_requests=arguments.calls_per_replica,
        )
        number = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        ModelReplica,
        name=f"model-{model.id}",
        max_ongoing_requests=MAX_CALLS,
        health_check_period_s=HEALTH_EVERY_S,
        health_check_timeout_s=settings.heartbeat_timeout_s,
        graceful_shutdown_timeout_s=settings.model_drain_s,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": gpus},
        request_router_config=RequestRouterConfig(
            request_router_class="logsteer_server.cluster.router.ChosenActorRouter",
            request_router_kwargs={"model": model.id},
        ),
        **number,
    )
    return deployment.bind(spec, make_limits(settings))
