"""The service as a Ray Serve application: a deployment for each group of models, and an ingress.

caller ──► Serve's proxy ──► ingress ── handle ──► a replica: checks, works, answers

A replica of a group is the whole application of one machine, with the group's models alone; it
shares nothing with others. Serve listens, places, balances, scales, checks and replaces.

The ingress is the same application without engines, whose models are as their replicas say: it
answers itself what concerns all replicas, such as lists of models, readiness, changes, metrics. Of
other requests it parses no more than the `model` of a body.
"""

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial, partialmethod
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import ray
import yaml
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import RayServeException
from starlette.middleware.base import RequestResponseEndpoint
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Scope

from logsteer._endpoints import ENDPOINTS, Endpoint
from logsteer.errors import APIError, api_error
from logsteer.schemas import ModelCard, ReloadAnswer
from logsteer_server.api.dependencies import find_base
from logsteer_server.api.problems import OPENAI_PATHS
from logsteer_server.api.respond import encode_error
from logsteer_server.api.routing import KeyedRoute, LimitedRequest
from logsteer_server.app import create_app
from logsteer_server.keys.keyring import check_metrics_key
from logsteer_server.models.changes import COMES_UP, compare_models, refuse_configuration
from logsteer_server.models.model import ResidentModel
from logsteer_server.observation.logs import LogStyle, configure_logs
from logsteer_server.observation.metrics import METRICS_TYPE
from logsteer_server.serving import check_places, check_vllm_arguments
from logsteer_server.settings import (
    ConfigurationError,
    ModelSettings,
    Settings,
    load_settings,
    parse_settings,
)

SERVICE = "logsteer"
# Id of a model -> the names of its deployment and of that one's version.
Versions = Mapping[str, tuple[str, str]]
# For so long a request waits for a replica that takes it.
REPLICA_S = 10.0
# For so long a list of models waits for each replica.
SILENT_S = 2.0
RETRY_S = 2.0
# Bytes of memory that a body takes for each of its own.
COPIES = 2
OWN = {
    *("models", "model", "v1.models", "ready", "startup", "health", "reload"),
    *("load_model", "unload_model", "drain_model", "vllm.reset_prefix_cache"),
    *("vllm.health", "vllm.ping", "vllm.post_ping"),
}
# What these answer depends on the models' states.
SHOWS_STATES = ("/models", "/v1/models", "/readyz", "/startupz", "/health", "/ping")
# What a replica gets of a request's scope.
SCOPE = (
    *("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers"),
    *("root_path", "client", "server"),
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


def build_listening(arguments: ClusterArguments) -> serve.Application:
    """Build the application where Serve listens as the settings say; for `serve run`.

    Errors: ConfigurationError.
    """
    application, settings = build(arguments), load_settings(arguments.config)
    serve.start(
        http_options={"host": settings.host, "port": settings.port}, logging_config=SERVE_LOG
    )
    return application


async def reload(arguments: ClusterArguments, earlier: Versions, wait_s: float) -> ReloadAnswer:
    """Read the configuration again, and have Serve change what is other in it, a replica at a time.

    Return after `wait_s` at the latest, and let the change continue. Errors: APIError
    `invalid_request` where the configuration cannot be used; nothing is changed then.
    """
    try:
        application, versions = await asyncio.to_thread(plan, arguments)
    except ConfigurationError as error:
        raise refuse_configuration(error) from error
    report = compare_models(earlier, versions)
    change = asyncio.create_task(asyncio.to_thread(serve.run, application, name=SERVICE))
    await asyncio.wait([change], timeout=wait_s)
    changed = report.added + report.replaced
    if not change.done():
        report.pending = changed
    elif failure := change.exception():
        report.failed = dict.fromkeys(changed, str(failure))
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

    async def change_model(self, change: str, model_id: str, *wait_s: float) -> None:
        """Make a change of `ModelChanges` to a model. Errors: APIError."""
        await getattr(self._state.changes, change)(self._state.models.find(model_id), *wait_s)

    async def __del__(self) -> None:
        """End the engines; Serve has waited for the requests."""
        await self._lifespan.__aexit__(None, None, None)


class _NamedModel(msgspec.Struct):
    """The one field of a body that is read: all others are skipped without being built."""

    model: str | None = None


@serve.ingress()
class Ingress:
    """The deployment that Serve's proxies send all requests to.

    Its application's `changes` are its own methods: they change the model in all replicas.
    """

    def __init__(
        self,
        document: dict[str, Any],
        reload: Callable[[Versions, float], Awaitable[ReloadAnswer]],
        _servers: list[Any],
    ) -> None:
        # Serve deploys what is bound to its argument; where it is, `reconfigure` says.
        self._document, self._apply_reload = document, reload
        settings = parse_settings(document, Path(document["directory"]))
        configure_logs(LogStyle(settings.log_format, settings.log_level))
        self._app = create_app(settings, has_engines=False)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application; what it does not answer itself it forwards."""
        self._app.router.routes[:0] = [
            KeyedRoute("/metrics", self._read_metrics, methods=["GET"]),
            *(
                Route(
                    endpoint.path.replace("{name}", "{name:stored}"),
                    partial(self._forward, endpoint),
                    methods=[endpoint.method],
                )
                for endpoint in ENDPOINTS.values()
                if endpoint.name not in OWN
            ),
        ]

        @self._app.middleware("http")
        async def update(request: Request, answer: RequestResponseEndpoint) -> Response:
            if request.url.path.startswith(SHOWS_STATES):
                await asyncio.gather(*map(self._update, self._app.state.models.by_id.values()))
            answered = await answer(request)
            del answered.headers["X-Request-Id"]  # Serve's proxy adds it
            return answered

        return self._app

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Apply the models that there are from now on, and where each is; called by Serve."""
        document = self._document | {"models": config["models"]}
        settings = parse_settings(document, self._app.state.settings.directory)
        self._app.state.changes, models = self, self._app.state.models
        models.by_id = {model.id: models.make(model) for model in settings.models}
        self._versions: Versions = config["versions"]
        names = dict.fromkeys(name for name, _version in self._versions.values())
        find = serve.get_deployment_handle
        self._handles: dict[str, Any] = {name: find(name, SERVICE) for name in names}

    # ------------------------------------------------------------------ one replica

    async def _forward(self, endpoint: Endpoint, caller: Request) -> Response:
        """Return the answer of a replica of the request's model, as it begins. Errors: APIError."""
        request = LimitedRequest(caller.scope, caller.receive)
        if endpoint.scope is not None:
            # Whoever has no key gets nothing read, and learns no model's name.
            authorization = request.headers.get("authorization", "")
            request.state.caller = request.app.state.keys.identify(authorization)
        request.memory_per_byte = COPIES
        body = await request.body("max_upload_bytes" if endpoint.upload else "max_body_bytes")
        handle = self._handles[await self._locate(request, endpoint, body)]
        scope = {name: request.scope.get(name) for name in SCOPE}
        messages = _call(handle, scope, body, request)
        start = await anext(messages)
        answer = StreamingResponse((own["body"] async for own in messages), start["status"])
        answer.raw_headers = start["headers"]
        return answer

    async def _locate(self, request: Request, endpoint: Endpoint, body: bytes) -> str:
        """Return the deployment whose replicas answer a request. Errors: as `choose_model`."""
        source = endpoint.request or endpoint.query
        if (name := request.path_params.get("model_id")) is None:
            if source is None or "model" not in source.model_fields:
                return next(iter(self._handles))
            if (name := request.query_params.get("model")) is None and not endpoint.upload:
                packed = body and "msgpack" in request.headers.get("content-type", "")
                decode = msgspec.msgpack.decode if packed else msgspec.json.decode
                try:
                    name = decode(body or b"{}", type=_NamedModel).model
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    return next(iter(self._handles))  # it says what is wrong with the body
        model = self._app.state.models.find(await find_base(request, name))
        return self._versions[model.id][0]

    # ------------------------------------------------------------------ all replicas

    async def _ask_all(self, group: str, method: str, *arguments: Any, wait_s: float) -> list[Any]:
        """Return what a group's replicas answer in time, each an exception where it fails."""
        call = self._handles[group].broadcast(method, *arguments)
        try:
            async with asyncio.timeout(wait_s):
                answers = await call._fetch_replica_results_async()
        except (RayServeException, TimeoutError):
            return []  # there is no replica
        asked = [asyncio.ensure_future(answer.get_async()) for answer in answers]
        done, _late = await asyncio.wait(asked, timeout=wait_s)
        return [answer.exception() or answer.result() for answer in done]

    async def _update(self, model: ResidentModel) -> None:
        """Have a model be as the best of its replicas is."""
        group = self._versions[model.id][0]
        answers = await self._ask_all(group, "describe", model.id, wait_s=SILENT_S)
        cards = [card for card in answers if isinstance(card, ModelCard)]
        known = model.settings.model_dump(include={"id", "engine", "required"})
        silent = ModelCard(**known, state="loading", detail="no replica answers")
        best = min(cards, key=lambda card: card.state != "ready", default=silent)
        of_all = {
            "replicas": [replica for card in cards for replica in card.replicas],
            "restarts": sum(card.restarts for card in cards),
        }
        card = best.model_copy(update=of_all)
        model.closed = card.state, card.detail
        model.describe = lambda: card  # type: ignore[method-assign]

    async def _change(self, change: str, model: ResidentModel, *wait_s: float) -> None:
        """Make a change to a model in all its replicas. Errors: APIError, of any of them."""
        group, limit_s = self._versions[model.id][0], sum(wait_s, REPLICA_S)
        asked = self._ask_all(group, "change_model", change, model.id, *wait_s, wait_s=limit_s)
        for answer in await asked:
            if isinstance(answer, RayTaskError) and isinstance(answer.cause, APIError):
                raise answer.cause
        await self._update(model)

    load = partialmethod(_change, "load")
    unload = partialmethod(_change, "unload")
    drain = partialmethod(_change, "drain")
    reset_prefix_cache = partialmethod(_change, "reset_prefix_cache")

    async def reload(self, wait_s: float) -> ReloadAnswer:
        """Read the configuration again. Errors: APIError."""
        return await self._apply_reload(self._versions, wait_s)

    async def _read_metrics(self, request: Request) -> Response:
        """Return the metrics of all replicas; the label `process` says whose each is."""
        key, sent = self._app.state.settings.metrics_key, request.headers.get("authorization", "")
        check_metrics_key(key, sent)
        asked = (self._ask_all(group, "read_metrics", wait_s=SILENT_S) for group in self._handles)
        pages = [own for own in chain(*await asyncio.gather(*asked)) if isinstance(own, list)]
        return Response("".join(dict.fromkeys(chain(*pages))), media_type=METRICS_TYPE)


async def _call(handle: Any, scope: Scope, body: bytes, request: Request) -> AsyncIterator[Message]:
    """Yield the messages of a replica's answer; a caller who hangs up ends its work.

    Errors: APIError `model_loading` where no replica takes the request, `engine_restarting` where
    the one that had it is lost; of a stream that has begun an event says so.
    """
    call = handle.options(method_name="answer", stream=True).remote(scope, body)
    headers: list[tuple[bytes, bytes]] = []
    try:
        async with asyncio.timeout(REPLICA_S):
            await anext(call)  # a replica has it
        async for message in call:
            headers = headers or message.get("headers", [])
            yield message
    except (RayServeException, TimeoutError) as error:
        detail = "No replica takes the request: its model loads, or is replaced. Send it again."
        raise api_error("model_loading", detail, retry_after=RETRY_S) from error
    except RayError as error:
        detail = f"The replica that had the request was lost, send it again: {error}"
        lost = api_error("engine_restarting", " ".join(detail.split()), retry_after=RETRY_S)
        if not dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            raise lost from error
        is_openai = request.url.path.startswith(OPENAI_PATHS)
        # What was cut may be the middle of an event, which an empty line ends.
        yield {"body": b"\n\n" + encode_error(lost, request.state.id, openai=is_openai)}
    finally:
        call.cancel()
