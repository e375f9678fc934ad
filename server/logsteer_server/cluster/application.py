"""A configuration file as a Ray Serve application: its deployments, and what each may take."""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from logsteer_server.app import Neighbours, create_app
from logsteer_server.cluster.absence import explain_absence
from logsteer_server.cluster.actors import watch_actors
from logsteer_server.cluster.applications import ModelApplications
from logsteer_server.cluster.bodies import CarriedBodies
from logsteer_server.cluster.calls import HandleCalls, start_apart
from logsteer_server.cluster.changes import ClusterChanges
from logsteer_server.cluster.coordinator import Coordinator
from logsteer_server.cluster.engine import RemoteEngine
from logsteer_server.cluster.ledger import Ledger, LedgerCalls
from logsteer_server.cluster.loads import TELL_EVERY_S, ActorLoad, LoadReader
from logsteer_server.cluster.metrics import OF_ACTORS, AgentExporter
from logsteer_server.cluster.ranks import group_nodes
from logsteer_server.cluster.replica import ModelReplica
from logsteer_server.cluster.secrets import Secrets, check_arguments, take_secrets
from logsteer_server.cluster.wanted import SERVICE, name_application
from logsteer_server.engines.handle import EngineHandle
from logsteer_server.http.answer_ledger import SharedAnswers
from logsteer_server.keys.shared import KeyAccounts
from logsteer_server.models.registry import ModelRegistry, make_limits
from logsteer_server.observation.logs import LogStyle, configure_logs
from logsteer_server.observation.metrics import Metrics
from logsteer_server.serving import check_places, check_vllm_arguments
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings, load_settings
from logsteer_server.stores.disk import DiskUsage

MAX_CALLS = 100_000
"""Calls at once of a replica: how many it is given is settled by the queues of ingresses, not here.
"""
MAX_REQUESTS = 4096
OWN_CPUS = 0.01
"""Of the service's own actors: more than none, so that none runs on a head without CPUs, whose end
would take it along."""
HEALTH_EVERY_S = 5.0
"""Between two health checks; how long one takes to fail is what heartbeat_timeout_s says."""
SILENCES = 3
"""Health checks that are not answered before Serve kills an actor: its own number."""
MAX_LOOK_BACK_S = 30.0
MAX_STARTS = 2
"""Actors of a model that may fail to come up before the model has failed."""
LEDGER_HEALTH_EVERY_S = 2.0
HEARD_S = 3 * TELL_EVERY_S
"""An actor of which the ledger has heard nothing for so long may be gone."""
FIRST_READ_S = 5.0
"""For so long an ingress that starts waits for the ledger, without which it can do."""
SERVE_LOG = {"log_level": "WARNING"}
"""Of Serve itself in each actor, which would write a line for each call: requests are logged by the
service's own log."""
OF_ONE_MACHINE = ("uds", "metrics_port")
"""Settings of `logsteer-server`'s own sockets, which Serve's proxies have in its place."""


class ClusterArguments(BaseModel):
    """What `build` takes: the service's configuration, and what Ray sets aside for it."""

    model_config = ConfigDict(extra="forbid")

    config: Path = Field(description="The configuration file, as `logsteer-server` has it.")
    host: str = Field("0.0.0.0", description="Address that Serve's proxies listen on.")  # noqa: S104
    ingresses: int = Field(1, ge=1, description="Processes that answer HTTP.")
    ingresses_per_node: int | None = Field(
        None,
        ge=1,
        description="The most of them on one node. With 1 each waits for a node of its own, so "
        "that no node takes all along when it ends.",
    )
    cpus: float = Field(
        1.0,
        ge=0,
        description="CPUs that Ray sets aside for each replica, on each of its nodes.",
    )
    gpus: bool = Field(
        False,
        description="Whether Ray sets a GPU aside for each device of a replica: tensor_parallel x "
        "pipeline_parallel, on as many nodes as the model's nodes_per_replica.",
    )
    calls_per_replica: float = Field(
        4.0, gt=0, description="Calls at work in a replica at which max_replicas has another start."
    )
    scale_up_s: float = Field(
        30.0,
        ge=0,
        description="For so long there is more work before another replica starts.",
    )
    scale_down_s: float = Field(
        600.0, ge=0, description="For so long there is less work before a replica ends."
    )


class _Ingress:
    """The application of `app.py`, with the models' replicas behind it."""

    def __init__(
        self,
        settings: Settings,
        arguments: ClusterArguments,
        secrets: Secrets,
        coordinator: Any,
        ledger: Any,
    ) -> None:
        configure_logs(LogStyle(settings.log_format, settings.log_level))
        self._public = settings
        self._settings = secrets.add(settings)
        self._arguments = arguments
        self._coordinator = coordinator
        self._name = serve.get_replica_context().replica_id.unique_id
        self._ledger = LedgerCalls(ledger)
        self._keys = KeyAccounts(
            self._name, self._ledger.settle, arguments.ingresses, settings.ledger_wait_s
        )
        self._engines: WeakKeyDictionary[RemoteEngine, str] = WeakKeyDictionary()
        """Engines of this ingress, with the names of their applications."""
        self._reader = LoadReader(
            self._ledger.read, self._take_load, self._forget_loads, settings.load_every_s
        )
        self._heard: dict[str, float] = {}
        """When an actor of an application has last told the ledger something, in monotonic s."""
        self._changes: ClusterChanges | None = None

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application, whose lifespan Serve begins and ends."""
        wait_s = 2 * self._settings.ledger_wait_s
        answers = SharedAnswers(self._name, self._ledger.claim, self._ledger.end, wait_s)
        neighbours = Neighbours(self._keys.make, answers, self._run_beside, self._read_away)
        app = create_app(self._settings, self._make_handle, self._make_changes, neighbours)
        app.add_middleware(CarriedBodies)
        return app

    def _make_changes(self, models: ModelRegistry, settings: Settings) -> ClusterChanges:
        self._changes = ClusterChanges(
            models,
            settings,
            reread=partial(reread_settings, self._arguments),
            coordinator=self._coordinator,
            ingress=self._name,
        )
        return self._changes

    def _read_away(self) -> dict[str, bool]:
        """Return of each part of the service that all ingresses ask whether it does not answer."""
        is_left = self._changes is not None and self._changes.is_away
        return {"ledger": self._reader.is_away, "coordinator": is_left}

    @asynccontextmanager
    async def _run_beside(self, metrics: Metrics, disk: DiskUsage) -> AsyncIterator[None]:
        """Ask and tell the ledger, and export metrics, for as long as the application runs."""
        exporter = AgentExporter(self._name, metrics.collect, OF_ACTORS, disk.refresh)
        works = (self._keys.run(), self._reader.run(), exporter.run())
        tasks = [start_apart(work) for work in works]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_READ_S):
                    await self._reader.has_read.wait()
            yield
        finally:
            for task in tasks:
                task.cancel()

    def _take_load(self, load: ActorLoad) -> None:
        self._heard[load.application] = time.monotonic()
        for engine, application in list(self._engines.items()):
            if application == load.application:
                engine.take_load(load, self._name)

    def _is_heard(self, application: str) -> bool:
        return time.monotonic() - self._heard.get(application, -math.inf) < HEARD_S

    def _forget_loads(self) -> None:
        self._heard.clear()
        for engine in list(self._engines):
            engine.forget_loads()

    def _make_handle(self, model: ModelSettings) -> EngineHandle:
        name = name_application(model, self._public, self._arguments)
        engine = RemoteEngine(
            model.to_spec(self._settings.directory),
            make_limits(self._settings),
            HandleCalls(DeploymentHandle(f"model-{model.id}", name), self._name),
            partial(watch_actors, name),
            partial(explain_absence, name, model.nodes_per_replica),
            partial(self._is_heard, name),
            least=model.replicas,
            most=model.max_replicas or model.replicas,
        )
        self._engines[engine] = name
        return engine


Ingress = serve.ingress()(_Ingress)


def build(arguments: ClusterArguments) -> Any:
    """Return the application for `serve.run`, `serve deploy` or a RayService.

    All processes have the settings that are read here, environment included. Errors:
    ConfigurationError.
    """
    return bind(read_settings(arguments), arguments)


def bind(settings: Settings, arguments: ClusterArguments) -> Any:
    """Return the application of settings that `read_settings` has returned.

    Its coordinator deploys the models, each as an application of its own.
    """
    settings, names = take_secrets(settings)
    applications = ModelApplications(
        settings,
        partial(_deploy_model, settings=settings, arguments=arguments),
        partial(name_application, settings=settings, arguments=arguments),
        partial(_measure_node, arguments=arguments),
    )
    coordinator = serve.deployment(
        Coordinator,
        name="coordinator",
        max_ongoing_requests=MAX_CALLS,
        health_check_period_s=HEALTH_EVERY_S,
        health_check_timeout_s=settings.heartbeat_timeout_s / SILENCES,
        graceful_shutdown_timeout_s=0,  # what ingresses ask may wait for long
        ray_actor_options={"num_cpus": OWN_CPUS},
        logging_config=SERVE_LOG,
    )
    ledger = serve.deployment(
        Ledger,
        name="ledger",
        max_ongoing_requests=MAX_CALLS,
        health_check_period_s=LEDGER_HEALTH_EVERY_S,
        health_check_timeout_s=settings.ledger_silence_s,
        graceful_shutdown_timeout_s=0,
        ray_actor_options={"num_cpus": OWN_CPUS},
        logging_config=SERVE_LOG,
    )
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=arguments.ingresses,
        max_replicas_per_node=arguments.ingresses_per_node,
        max_ongoing_requests=MAX_REQUESTS,
        graceful_shutdown_timeout_s=settings.drain_s,
        ray_actor_options={"num_cpus": OWN_CPUS},
        logging_config=SERVE_LOG,
    )
    born = uuid.uuid4().hex
    return ingress.bind(
        settings,
        arguments,
        Secrets(names, arguments.config.resolve()),
        coordinator.bind(settings, applications, born, arguments.ingresses),
        ledger.bind(settings.idempotency_bytes, settings.idempotency_s, settings.ledger_lease_s),
    )


def read_settings(arguments: ClusterArguments) -> Settings:
    """Read the configuration. Errors: ConfigurationError, also for what Ray has no use for."""
    settings = _read_settings(arguments)
    check_places(settings)
    return settings


def reread_settings(arguments: ClusterArguments) -> Settings:
    """Read the configuration while it is in use, without its keys. Errors: ConfigurationError."""
    return take_secrets(_read_settings(arguments))[0]


def _read_settings(arguments: ClusterArguments) -> Settings:
    settings = load_settings(arguments.config)
    settings = settings.model_copy(
        update={"host": arguments.host, "directory": settings.directory.resolve()}
    )
    if found := [name for name in OF_ONE_MACHINE if getattr(settings, name) is not None]:
        raise ConfigurationError(f"{', '.join(found)}: Ray Serve's proxies listen; leave it out")
    check_arguments(settings)
    if not arguments.cpus and any(model.nodes_per_replica > 1 for model in settings.models):
        raise ConfigurationError(
            "cpus is 0: a model with nodes_per_replica above 1 needs a part of each node; set cpus"
        )
    check_vllm_arguments(settings)
    return settings


def _measure_node(model: ModelSettings, arguments: ClusterArguments) -> tuple[float, int]:
    """Return the CPUs and GPUs that Ray sets aside for a replica on each of its nodes."""
    needs_gpus = arguments.gpus and model.devices != "cpu" and model.engine != "fake"
    ranks = model.tensor_parallel * model.pipeline_parallel
    return arguments.cpus, ranks // model.nodes_per_replica if needs_gpus else 0


def _deploy_model(model: ModelSettings, settings: Settings, arguments: ClusterArguments) -> Any:
    """Return a model's deployment, bound to what its engine needs."""
    spec = replace(model.to_spec(settings.directory), replicas=1, devices="auto")
    if model.devices == "cpu":
        spec = replace(spec, devices="cpu")
    nodes = model.nodes_per_replica
    cpus, gpus = _measure_node(model, arguments)
    number: dict[str, Any] = {"num_replicas": model.replicas}
    if model.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=model.replicas,
            max_replicas=model.max_replicas,
            target_ongoing_requests=arguments.calls_per_replica,
            upscale_delay_s=arguments.scale_up_s,
            downscale_delay_s=arguments.scale_down_s,
            look_back_period_s=min(MAX_LOOK_BACK_S, max(1.0, arguments.scale_up_s)),
        )
        number = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        ModelReplica,
        name=f"model-{model.id}",
        max_ongoing_requests=MAX_CALLS,
        health_check_period_s=HEALTH_EVERY_S,
        health_check_timeout_s=settings.heartbeat_timeout_s / SILENCES,
        graceful_shutdown_timeout_s=settings.model_drain_s,
        max_constructor_retry_count=MAX_STARTS,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        logging_config=SERVE_LOG,
        request_router_config=RequestRouterConfig(
            request_router_class="logsteer_server.cluster.router.ChosenActorRouter",
            request_router_kwargs={"model": name_application(model, settings, arguments)},
        ),
        **number,
        **group_nodes(nodes, cpus, gpus),
    )
    ledger = DeploymentHandle("ledger", SERVICE)
    shared = settings.shared_store
    return deployment.bind(
        spec, make_limits(settings), ledger, shared, nodes, settings.load_every_s
    )
