"""The service as a Ray Serve application: a deployment for each group of models, and an ingress.

A replica of a group is the whole application of one machine, with the group's models alone; it
shares nothing with others. Serve listens, places, balances, scales, checks and replaces.
"""

import asyncio
import faulthandler
import hashlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
import yaml
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig
from starlette.types import Message, Scope

from logsteer.schemas import ModelCard, ReloadAnswer
from logsteer_server.api.routes.vllm import reset_prefix_cache
from logsteer_server.app import create_app
from logsteer_server.cluster.ingress import SERVICE, Ingress, Versions
from logsteer_server.models.changes import COMES_UP, compare_models, refuse_configuration
from logsteer_server.observation.logs import LogStyle, configure_logs
from logsteer_server.serving import check_places, check_vllm_arguments
from logsteer_server.settings import (
    ConfigurationError,
    ModelSettings,
    Settings,
    load_settings,
    parse_settings,
)

# Serve would write a line for each call: requests are in the service's own access log.
SERVE_LOG = {"log_level": "WARNING"}
COMMON: dict[str, Any] = {
    "logging_config": SERVE_LOG,
    "health_check_period_s": 2.0,
    # The server itself says when it has enough.
    "max_ongoing_requests": 4096,
}


class ClusterArguments(BaseModel):
    """What `build` takes: the service's configuration, and what Ray sets aside for it."""

    model_config = ConfigDict(extra="forbid")

    config: Path = Field(description="The configuration file, as `logsteer-server` has it.")
    ingresses: int = Field(1, ge=1, description="Ingress processes.")
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
        *(
            f"Ray would show {name}: give each node LOGSTEER_{name.upper()} in its place"
            for name, field in Settings.model_fields.items()
            if name in document and not field.repr
        ),
        *(["uds is for one machine: remove it on Ray"] if settings.uds else []),
        *(
            f"model {model.id}: Ray would show hf_token: give each node HF_TOKEN"
            for model in settings.models
            if "hf_token" in model.engine_args
        ),
        *(
            f"model {model.id}: Ray chooses GPUs: devices takes auto or cpu there"
            for model in settings.models
            if isinstance(model.devices, list)
        ),
    ]
    if faults:
        raise ConfigurationError(f"{config}: {'; '.join(faults)}")
    check_places(settings)
    return settings, document | {"directory": str(settings.directory.resolve())}


def build(arguments: ClusterArguments) -> serve.Application:
    """Build the application of a configuration; `serve deploy` imports this.

    Errors: ConfigurationError.
    """
    return plan(arguments)[0]


def plan(arguments: ClusterArguments) -> tuple[serve.Application, Versions]:
    """Return the application of a configuration, and what each model's deployment depends on.

    Errors: ConfigurationError.
    """
    settings, document = read_document(arguments.config)
    groups: dict[str, list[ModelSettings]] = {}
    for model in settings.models:
        groups.setdefault(model.group or model.id, []).append(model)
    servers: list[serve.Application] = []
    versions: dict[str, tuple[str, str]] = {}
    for name, group in groups.items():
        models = [model.model_dump(exclude_unset=True) for model in group]
        deployment = _make_deployment(f"model-{name}", group, settings, arguments)
        # Serve replaces what has another version; without one, all at every change.
        deployment._version = _digest(document | {"models": models}, arguments)
        # Serve has the replicas of a group: each is a server with one engine for each model.
        alone = [model | {"replicas": 1, "max_replicas": None} for model in models]
        servers.append(deployment.bind(document | {"models": alone}))
        versions |= {model.id: (deployment.name, deployment._version) for model in group}
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        num_replicas=arguments.ingresses,
        # More than none, so that no ingress runs on a head without CPUs.
        ray_actor_options={"num_cpus": 0.01},
        graceful_shutdown_timeout_s=settings.drain_s + 15.0,
        user_config={"models": document["models"], "versions": versions},
        **COMMON,
    )
    ingress._version = _digest(document | {"models": None}, arguments)
    return ingress.bind(document, partial(reload, arguments), servers), versions


def _digest(*parts: Any) -> str:
    """Return the name of a version: what depends on something else has another one."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _make_deployment(
    name: str, group: list[ModelSettings], settings: Settings, arguments: ClusterArguments
) -> serve.Deployment:
    """Return the deployment of a group's servers."""
    on_gpus = [model for model in group if model.devices != "cpu"] if arguments.gpus else []
    gpus = sum(model.tensor_parallel * model.pipeline_parallel for model in on_gpus)
    scaling = AutoscalingConfig(
        min_replicas=max(model.replicas for model in group),
        max_replicas=max(model.max_replicas or model.replicas for model in group),
        target_ongoing_requests=arguments.calls_per_replica,
    )
    return serve.deployment(
        ModelServer,
        name=name,
        autoscaling_config=scaling,
        max_surge_percent=100 if settings.reload_beside else 0,
        # Serve kills a replica after three checks without an answer.
        health_check_timeout_s=settings.heartbeat_timeout_s / 3,
        graceful_shutdown_timeout_s=settings.model_drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        # Starts of a deployment's first replica that may fail before its change has failed.
        max_constructor_retry_count=3,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": gpus},
        **COMMON,
    )


def run(config: Path, **options: Any) -> None:
    """Have a Ray serve a configuration until an interrupt; `options` are those of `ray.init`.

    The process ends within `drain_s` and 30 s of it. Errors: ConfigurationError.
    """
    application, settings = build(ClusterArguments(config=config)), load_settings(config)
    try:
        ray.init(logging_level="WARNING", **options)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own ends without more
        host, port = settings.host, settings.port
        serve.start(http_options={"host": host, "port": port}, logging_config=SERVE_LOG)
        _deploy(application)
        said = f"logsteer on Ray comes up at http://{host}:{port}; GET /models says how far."
        print(said, flush=True)
        signal.pause()
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        faulthandler.dump_traceback_later(settings.drain_s + 30, exit=True)
        with suppress(serve.exceptions.RayServeException):  # Serve has ended
            serve.context._get_global_client().shutdown(settings.drain_s)
        ray.shutdown()


def _deploy(application: serve.Application) -> None:
    """Have Serve run an application in the place of the one it has; return before it answers."""
    target = serve.RunTarget(application, SERVICE, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)


async def reload(arguments: ClusterArguments, earlier: Versions, wait_s: float) -> ReloadAnswer:
    """Read the configuration again, and have Serve change what is other in it, a replica at a time.

    Return after `wait_s` at the latest, and let the change continue. Errors: APIError
    `invalid_request` where the configuration cannot be used; nothing is changed then.
    """
    try:
        application, versions = await asyncio.to_thread(plan, arguments)
    except ConfigurationError as error:
        raise refuse_configuration(error) from error
    await asyncio.to_thread(_deploy, application)
    report, deadline = compare_models(earlier, versions), time.monotonic() + wait_s
    report.pending = report.added + report.replaced
    while report.pending and time.monotonic() < deadline:
        await asyncio.sleep(1.0)  # for less, the status may be that of before the change
        found = (await asyncio.to_thread(serve.status)).applications[SERVICE].deployments
        own = {name: found.get(versions[name][0]) for name in report.added + report.replaced}
        failed = {name: one for name, one in own.items() if one and one.status == "DEPLOY_FAILED"}
        report.failed = {name: one.message for name, one in failed.items()}
        ended = {name for name, one in own.items() if one and one.status == "HEALTHY"}
        report.pending = [name for name in own if name not in ended and name not in failed]
    return report


class ModelServer:
    """A replica: the application of one machine with a group's models, called in this process.

    It is there once its models answer, so Serve sends nobody to it before. Errors of making it:
    RuntimeError where a required model cannot be loaded, ConfigurationError.
    """

    async def __init__(self, document: dict[str, Any]) -> None:  # type: ignore[misc]
        settings = parse_settings(document, Path(document["directory"]))
        style = LogStyle(settings.log_format, settings.log_level)
        configure_logs(style, access=settings.access_log)
        check_places(settings)
        self._app = create_app(settings)
        self._state = self._app.state
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        while any(own.status[0] in COMES_UP for own in self._state.models.by_id.values()):
            await asyncio.sleep(0.1)
        await self.check_health()

    async def check_health(self) -> None:
        """Have Serve replace this replica if an engine is not started again. Errors: RuntimeError.

        One that hangs or dies is restarted below it, by the server's own supervision.
        """
        for model in self._state.models.required:
            state, detail = model.status
            if state == "failed" or model.handle.given_up:
                raise RuntimeError(f"model {model.id}: {detail}")

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[Message | None]:
        """Yield None as the request has arrived, then the messages of the application's answer.

        A call that is cancelled ends the request.
        """
        yield None
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        asked = [{"type": "http.request", "body": body}]

        async def receive() -> Message:
            if not asked:  # a caller who hangs up cancels
                await asyncio.Event().wait()
            return asked.pop()

        running = asyncio.create_task(self._app(scope, receive, messages.put))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            running.cancel()

    async def describe(self, model_id: str) -> ModelCard:
        """Return a model's card."""
        return self._state.models.find(model_id).describe()  # type: ignore[no-any-return]

    async def read_metrics(self) -> list[str]:
        """Return the lines of the page of metrics, with this replica as the label `process`."""
        label = f'process="{ray.util.get_node_ip_address()}:{os.getpid()}"'
        page = re.sub(r"(?m)^([\w:]+) ", r"\1{} ", self._state.metrics.render().decode())
        return re.sub(r"(?m)^([\w:]+)\{", rf"\1{{{label},", page).splitlines(keepends=True)

    async def reset_prefix_caches(self) -> None:
        """Have the models use nothing of earlier requests."""
        await reset_prefix_cache(self._state.models)

    async def change_model(self, change: str, model_id: str, wait_s: float) -> None:
        """Load, unload or drain a model. Errors: APIError."""
        await getattr(self._state.changes, change)(self._state.models.find(model_id), wait_s)

    async def __del__(self) -> None:
        """End the engines; Serve has waited for the requests."""
        await self._lifespan.__aexit__(None, None, None)
