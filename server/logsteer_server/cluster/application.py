"""The service as a Ray Serve application: a deployment for each group of models, and an ingress.

A replica of a group is a whole server, the one of a single machine, with the group's models alone;
it shares nothing with others. Serve places, balances, scales, checks, replaces and changes them.
"""

import asyncio
import hashlib
import json
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
import uvicorn
import yaml
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from logsteer.schemas import ReloadAnswer
from logsteer_server.app import create_app, open_logs
from logsteer_server.cluster.ingress import SERVICE, Ingress, Models, name_deployment
from logsteer_server.listening import listen_at
from logsteer_server.models.changes import COMES_UP, compare_models, refuse_configuration
from logsteer_server.serving import check_places, check_vllm_arguments, configure_server
from logsteer_server.settings import (
    ConfigurationError,
    ModelSettings,
    Settings,
    load_settings,
    parse_settings,
)

log = logging.getLogger(__name__)

RUNNING = "running"
POLL_S = 0.05
STATUS_S = 1.0
"""Serve's status is that of before a change for less."""
STALE_S = 3.0
"""For so long an ingress may take a replica that is to end for one that stays."""
HEALTH_EVERY_S = 2.0
SILENCES = 3
"""Health checks without an answer before Serve kills a replica: its own number."""
MAX_STARTS = 3
"""Starts of a deployment's first replica that may fail before its change has failed."""
DRAIN_MORE_S = 15.0
INGRESS_CPUS = 0.01
"""More than none, so that no ingress runs on a head without CPUs."""
SERVE_LOG = {"log_level": "WARNING"}
"""Serve would write a line for each call: requests are in the service's own access log."""


class ClusterArguments(BaseModel):
    """What `build` takes: the service's configuration, and what Ray sets aside for it."""

    model_config = ConfigDict(extra="forbid")

    config: Path = Field(description="The configuration file, as `logsteer-server` has it.")
    ingresses: int = Field(1, ge=1, description="Ingress processes, at most one a node.")
    cpus: float = Field(1.0, ge=0, description="CPUs reserved for each replica.")
    gpus: bool = Field(
        False,
        description="Reserve GPUs: tensor_parallel x pipeline_parallel for each model of a replica "
        "that does not run on CPUs.",
    )
    calls_per_replica: float = Field(
        4.0, gt=0, description="Requests running in a replica above which max_replicas adds one."
    )
    revision: int = Field(
        0, description="Raise it, and KubeRay reads the configuration file again."
    )


def read_document(config: Path) -> tuple[Settings, dict[str, Any]]:
    """Read a configuration file; return its settings, and the document that Ray carries to nodes.

    Ray keeps what it carries where its dashboard shows it, so a file with secrets is refused; each
    node has those in its own environment, which goes before the file everywhere.
    Errors: ConfigurationError.
    """
    settings = load_settings(config)
    check_vllm_arguments(settings)
    document: dict[str, Any] = yaml.safe_load(config.read_text())
    faults = [
        f"Ray would show {name}: give each node LOGSTEER_{name.upper()} in its place"
        for name, field in Settings.model_fields.items()
        if name in document and not field.repr
    ]
    if settings.uds is not None:
        faults.append("uds is for one machine: remove it on Ray")
    for model in settings.models:
        if "hf_token" in model.engine_args:
            faults.append(f"model {model.id}: Ray would show hf_token: give each node HF_TOKEN")
        if isinstance(model.devices, list):
            faults.append(f"model {model.id}: Ray chooses GPUs: devices takes auto or cpu there")
    if faults:
        raise ConfigurationError(f"{config}: {'; '.join(faults)}")
    check_places(settings)
    return settings, document | {"directory": str(settings.directory.resolve())}


def build(arguments: ClusterArguments) -> serve.Application:
    """Build the application of a configuration; `serve deploy` imports this.

    Errors: ConfigurationError.
    """
    return plan(arguments)[0]


def plan(arguments: ClusterArguments) -> tuple[serve.Application, Models]:
    """Return the application of a configuration, and where its models are.

    Errors: ConfigurationError.
    """
    settings, document = read_document(arguments.config)
    groups: dict[str, list[ModelSettings]] = {}
    for model in settings.models:
        groups.setdefault(model.group or model.id, []).append(model)
    models: dict[str, dict[str, Any]] = {}
    servers = []
    for name, group in groups.items():
        # Serve has the replicas of a group: each is a server with one engine for each model.
        own = [
            model.model_dump(exclude_unset=True) | {"replicas": 1, "max_replicas": None}
            for model in group
        ]
        deployment = _make_deployment(name, group, settings, arguments)
        # Serve replaces what has another version; without one, all at every change.
        asked = arguments.model_dump(mode="json", exclude={"config", "ingresses", "revision"})
        numbers = [(model.replicas, model.max_replicas) for model in group]
        deployment._version = digest([document | {"models": own}, asked, numbers])
        servers.append(deployment.bind(document | {"models": own}))
        for model in group:
            card = model.model_dump(include={"engine", "required", "default"})
            models[model.id] = card | {"group": name, "version": deployment._version}
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=arguments.ingresses,
        max_replicas_per_node=1,
        health_check_period_s=HEALTH_EVERY_S,
        graceful_shutdown_timeout_s=settings.drain_s + DRAIN_MORE_S,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        logging_config=SERVE_LOG,
        user_config=models,
    )
    ingress._version = digest([document | {"models": None}, arguments.ingresses])
    return ingress.bind(document, partial(reload, arguments), servers), models


def _make_deployment(
    name: str, group: list[ModelSettings], settings: Settings, arguments: ClusterArguments
) -> serve.Deployment:
    """Return the deployment of a group's servers."""
    on_gpus = [model for model in group if model.devices != "cpu"] if arguments.gpus else []
    gpus = sum(model.tensor_parallel * model.pipeline_parallel for model in on_gpus)
    replicas = max(model.replicas for model in group)
    scaling = None
    if max_replicas := max(model.max_replicas or 0 for model in group):
        scaling = AutoscalingConfig(
            min_replicas=replicas,
            max_replicas=max_replicas,
            target_ongoing_requests=arguments.calls_per_replica,
            policy={"policy_function": f"{__name__}:scale"},
        )
    starts_beside = {"always": True, "never": False, "auto": not gpus}[settings.reload_beside]
    return serve.deployment(
        ModelServer,
        name=name_deployment(name),
        num_replicas=None if scaling else replicas,
        autoscaling_config=scaling,
        max_surge_percent=100 if starts_beside else 0,
        health_check_period_s=HEALTH_EVERY_S,
        health_check_timeout_s=settings.heartbeat_timeout_s / SILENCES,
        graceful_shutdown_timeout_s=settings.model_drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=MAX_STARTS,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": gpus},
        logging_config=SERVE_LOG,
    )


def deploy(application: serve.Application) -> None:
    """Have Serve run an application in the place of the one it has; returns before it answers."""
    target = serve.RunTarget(application, SERVICE, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)


async def reload(arguments: ClusterArguments, earlier: Models, wait_s: float) -> ReloadAnswer:
    """Read the configuration again, and have Serve change what is other in it, a replica at a time.

    Return after `wait_s` at the latest, and let the change continue. Errors: APIError
    `invalid_request` where the configuration cannot be used; nothing is changed then.
    """
    try:
        application, models = await asyncio.to_thread(plan, arguments)
    except ConfigurationError as error:
        raise refuse_configuration(error) from error
    await asyncio.to_thread(deploy, application)
    report = compare_models(earlier, models)
    report.pending = report.added + report.replaced
    deadline = time.monotonic() + wait_s
    while report.pending and time.monotonic() < deadline:
        await asyncio.sleep(STATUS_S)
        status = await asyncio.to_thread(serve.status)
        found = status.applications[SERVICE].deployments
        for model_id in list(report.pending):
            own = found.get(name_deployment(models[model_id]["group"]))
            if own is not None and own.status in ("HEALTHY", "DEPLOY_FAILED"):
                report.pending.remove(model_id)
                if own.status == "DEPLOY_FAILED":
                    report.failed[model_id] = own.message
    return report


def digest(value: Any) -> str:
    """Return a short digest of what a deployment depends on: Serve replaces what has another."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class ModelServer:
    """A replica: the server of one machine with a group's models, at a port of its own.

    It is there once its models answer, so Serve sends nobody to it before. Errors of making it:
    RuntimeError where a required model cannot be loaded, ConfigurationError.
    """

    async def __init__(self, document: dict[str, Any]) -> None:  # type: ignore[misc]
        host = ray.util.get_node_ip_address()
        settings = parse_settings(document, Path(document["directory"]))
        settings = settings.model_copy(update={"host": host})
        open_logs(settings)
        check_places(settings)
        app = create_app(settings)
        self._state = app.state
        listener = listen_at(host, 0)
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(configure_server(settings, app))
        self._serving = asyncio.create_task(self._server._serve(sockets=[listener]))
        try:
            while not self._serving.done() and not (self._server.started and self._has_come_up()):
                await asyncio.sleep(POLL_S)
            await self.check_health()
        except BaseException:
            await self.__del__()
            raise

    def _has_come_up(self) -> bool:
        return all(own.status[0] not in COMES_UP for own in self._state.models.by_id.values())

    def _find_fault(self) -> str:
        """Say which required model does not answer any more, and why; empty where all may."""
        for model in self._state.models.required:
            state, detail = model.status
            if state == "failed" or model.handle.given_up:
                return f"model {model.id}: {detail}"
        return ""

    async def check_health(self) -> None:
        """Have Serve replace this replica if an engine is not started again. Errors: RuntimeError.

        One that hangs or dies is restarted below it, by the server's own supervision.
        """
        fault = "the server has ended" if self._serving.done() else self._find_fault()
        if fault:
            log.error("this replica is to be replaced: %s", fault)
            raise RuntimeError(fault)

    async def describe(self) -> dict[str, Any]:
        """Return where this replica is, what is wrong with it, and its models' cards."""
        context = serve.get_replica_context()
        return {
            "id": context.replica_id.unique_id,
            "address": self.address,
            "actor": ray.get_runtime_context().current_actor,
            "fault": self._find_fault(),
            "running": self._state.drain.num_running,
            "cards": {own.id: own.describe() for own in self._state.models.by_id.values()},
        }

    async def change_model(self, change: str, model_id: str, wait_s: float) -> None:
        """Load, unload or drain a model. Errors: APIError."""
        work = getattr(self._state.changes, change)
        await work(self._state.models.find(model_id), wait_s)

    async def record_autoscaling_stats(self) -> dict[str, int]:
        """Return what `scale` scales by; Serve asks for it."""
        return {RUNNING: self._state.drain.num_running}

    async def __del__(self) -> None:
        """Answer what is at work and what still comes, then end the server and its engines."""
        if self._server.started:
            await asyncio.sleep(STALE_S)
            while self._state.drain.num_running:
                await asyncio.sleep(POLL_S)
        self._server.should_exit = True
        await asyncio.wait([self._serving])


def scale(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return how many replicas the requests at work take; Serve keeps to bounds and delays."""
    running = (context.aggregated_metrics or {}).get(RUNNING, {})
    assert context.config is not None
    return sum(running.values()) / context.config.get_target_ongoing_requests(), {}
