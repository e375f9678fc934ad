"""The ingress: reads which model a request is for, and forwards its bytes to a replica of it.

caller ──► ingress ── HTTP ──► a replica's own server, which checks, works and answers
               └─ every second ─► Serve: which replicas there are

It is an application of the layers that a server has, and parses no more than the `model` of a body.
It answers itself what concerns all replicas: lists of models, probes, changes. A request through
Serve's own handles takes three times the CPU time.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpcore
import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from logsteer._endpoints import ENDPOINTS, Endpoint
from logsteer.errors import APIError, api_error
from logsteer.schemas import Health, ModelCard, ModelList, Readiness, ReloadAnswer, Startup
from logsteer_server import __version__
from logsteer_server.api.gate import AllowedHosts, Drain, RequestGate
from logsteer_server.api.problems import OPENAI_PATHS, add_handlers
from logsteer_server.api.respond import encode_error, run_within
from logsteer_server.api.routes.operations import WaitDep, list_as_openai
from logsteer_server.api.routing import KeyedRoute, LimitedRequest
from logsteer_server.keys.keyring import KeyRing, check_metrics_key
from logsteer_server.listening import listen_at
from logsteer_server.models.admission import BYTES, Admission
from logsteer_server.models.registry import choose_model
from logsteer_server.observation.logs import LogStyle, configure_logs
from logsteer_server.serving import configure_server
from logsteer_server.settings import parse_settings

log = logging.getLogger(__name__)

SERVICE = "logsteer"
"""The name of the application in Serve."""
WATCH_S = 1.0
SILENT_S = 2.0
REPLICA_S = 10.0
"""For so long a request waits for a replica that takes it."""
CONNECT_S = 5.0
KEPT_S = 15.0
"""An idle connection to a replica is dropped long before that drops it."""
MAX_TRIES = 3
"""Replicas that are tried where none takes the connection."""
POLL_S = 0.05
RETRY_S = 2.0
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
UNREACHED = (httpcore.ConnectError, httpcore.ConnectTimeout)
LOST = (httpcore.NetworkError, httpcore.RemoteProtocolError, httpcore.TimeoutException)
"""What a connection ends with whose replica is gone."""
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
    | {b"proxy-connection", b"x-request-id"}
)
"""Headers of one connection, and the request's id, which the ingress sets."""
OWN_OF_ANSWERS = HOP_BY_HOP | {b"date", b"server"}


class _NamedModel(msgspec.Struct):
    """The one field of a body that is read: all others are skipped without being built."""

    model: str | None = None


def name_deployment(group: str) -> str:
    """Return the name that Serve has for a group's servers."""
    return f"model-{group}"


Models = Mapping[str, Mapping[str, Any]]
"""Id -> group, engine, whether it is required, and the version of its deployment."""


@dataclass
class ServeReplica:
    """A replica that has described itself."""

    address: str
    actor: Any
    fault: str
    running: int
    """Requests that it has, those of other ingresses included."""
    cards: dict[str, ModelCard]
    """Its models' cards, by id."""
    own: int = 0
    """Requests of this ingress that it has."""
    is_silent: bool = False
    """It did not answer lately: another one is asked."""


class ForwardedRequest(LimitedRequest):
    """A request that is passed on as it came."""

    memory_per_byte = 1

    def copy(self, address: str, body: bytes | None) -> httpcore.Request:
        """Return the request as a replica gets it; without `body` it is read as it is sent."""
        headers = [pair for pair in self.scope["headers"] if pair[0] not in HOP_BY_HOP]
        headers.append((b"x-request-id", self.state.id.encode()))
        if "transfer-encoding" in self.headers:
            headers.append((b"transfer-encoding", b"chunked"))
        target = b"?".join(filter(None, (self.scope["raw_path"], self.scope["query_string"])))
        return httpcore.Request(
            self.method,
            f"http://{address}",
            headers=headers,
            content=self.stream() if body is None else body,
            extensions={"target": target, "timeout": {"connect": CONNECT_S}},
        )


class RelayedAnswer(StreamingResponse):
    """The answer of a replica, which is passed on as it comes."""

    def __init__(self, request: Request, replica: ServeReplica, answer: httpcore.Response) -> None:
        super().__init__(self._relay(), answer.status)
        self.raw_headers = [
            (name.lower(), value)
            for name, value in answer.headers
            if name.lower() not in OWN_OF_ANSWERS
        ]
        self._request = request
        self._replica = replica
        self._answer = answer
        replica.own += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and free the connection however that ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._replica.own -= 1
            await self._answer.aclose()

    async def _relay(self) -> AsyncIterator[bytes]:
        """Yield the answer; where the replica is lost, an event says so, other answers are cut."""
        try:
            async for chunk in self._answer.aiter_stream():
                yield chunk
        except LOST as error:
            self._replica.is_silent = True
            if not self.headers.get("content-type", "").startswith("text/event-stream"):
                raise
            is_openai = self._request.url.path.startswith(OPENAI_PATHS)
            lost = _refuse_lost(self._replica, error)
            # What was cut may be the middle of an event, which an empty line ends.
            yield b"\n\n" + encode_error(lost, self._request.state.id, openai=is_openai)


class Ingress:
    """The deployment that listens for callers."""

    async def __init__(  # type: ignore[misc]
        self,
        document: dict[str, Any],
        reload: Callable[[Models, float], Awaitable[ReloadAnswer]],
        _servers: Sequence[Any],
    ) -> None:
        # Serve deploys what is bound to its argument; where it is, `reconfigure` says.
        self._settings = settings = parse_settings(document, Path(document["directory"]))
        configure_logs(LogStyle(settings.log_format, settings.log_level))
        self._apply_reload = reload
        self._keys = KeyRing(settings)
        self._models: Models = {}
        self._handles: dict[str, Any] = {}
        self._replicas: dict[str, dict[str, ServeReplica]] = {}
        """Group -> its replicas that have described themselves, by id."""
        self._losses: dict[str, str] = {}
        """Group -> why it last lost a replica."""
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEPT_S
        )
        config = configure_server(settings, self._create_app(), settings.drain_s)
        self._server = uvicorn.Server(config)
        listener = listen_at(settings.host, settings.port)
        self._serving = asyncio.create_task(self._server._serve(sockets=[listener]))
        self._watching = asyncio.create_task(self._watch())

    def _create_app(self) -> FastAPI:
        settings = self._settings
        app = FastAPI(openapi_url=None)
        app.state.settings, app.state.keys = settings, self._keys
        own: dict[str, Callable[..., Any]] = {
            "models": self._list_models,
            "model": self._get_model,
            "v1.models": self._list_openai_models,
            "health": self._answer_health,
            "ready": self._answer_ready,
            "startup": self._answer_startup,
            "metrics": self._refuse_metrics,
            "reload": self._reload,
            "load_model": partial(self._change_model, "load"),
            "unload_model": partial(self._change_model, "unload"),
            "drain_model": partial(self._change_model, "drain"),
        }
        for name, endpoint in ENDPOINTS.items():
            path = endpoint.path.replace("{name}", "{name:stored}")
            path = path.replace("{model_id}", "{model_id:path}")
            if name in own:
                app.routes.append(KeyedRoute(path, own[name], methods=[endpoint.method]))
            else:
                app.add_route(path, partial(self._forward, endpoint), [endpoint.method])
        app.add_api_route("/metrics/targets", self._list_targets)
        app.add_route("/{path:path}", self._pass_on, METHODS)
        hosts = AllowedHosts(settings, needs_key=self._keys.needs_key)
        memory = Admission(settings.max_pending_bytes, BYTES)
        app.add_middleware(RequestGate, hosts=hosts, drain=Drain(), admission=memory)
        add_handlers(app)
        return app

    async def reconfigure(self, models: dict[str, dict[str, Any]]) -> None:
        """Apply the models that there are from now on, and where each is; called by Serve."""
        self._models = models
        self._handles = {
            group: self._handles.get(group)
            or serve.get_deployment_handle(name_deployment(group), SERVICE)
            for group in dict.fromkeys(model["group"] for model in models.values())
        }
        self._replicas = {group: self._replicas.get(group, {}) for group in self._handles}

    async def check_health(self) -> None:
        """Have Serve replace this process if it answers nobody. Errors: RuntimeError."""
        if self._serving.done() or self._watching.done():
            raise RuntimeError("the ingress has ended: its log says why")

    async def __del__(self) -> None:
        """Answer what has come, and end."""
        self._server.should_exit = True
        await asyncio.wait([self._serving])
        self._watching.cancel()
        await self._keys.close()

    # ------------------------------------------------------------------ one replica

    async def _forward(self, endpoint: Endpoint, caller: Request) -> Response:
        """Send a request to a replica of its model; once more to another, if it stores nothing."""
        request = ForwardedRequest(caller.scope, caller.receive)
        if endpoint.scope is not None:
            # Whoever has no key gets nothing read, and learns no model's name.
            self._keys.identify(request.headers.get("authorization", ""))
        if endpoint.upload is not None:
            return await self._send(request, self._locate(request, endpoint), None)
        group = self._locate(request, endpoint, body := await request.body())
        may_repeat = endpoint.scope in (None, "score", "steer")
        sending = self._send(request, group, body, may_repeat=may_repeat)
        return await run_within(request, self._settings.request_timeout_s, sending)

    async def _pass_on(self, caller: Request) -> Response:
        """Send a request for any other path to any replica: pages, and what is refused."""
        request = ForwardedRequest(caller.scope, caller.receive)
        return await self._send(request, self._choose_group(), await request.body())

    async def _send(
        self, request: ForwardedRequest, group: str, body: bytes | None, *, may_repeat: bool = False
    ) -> Response:
        """Return the answer of a group's replica, as it begins. Errors: APIError.

        With `may_repeat` another replica is asked once more, where one is lost or answers 503.
        """
        for _ in range(MAX_TRIES):
            replica = await self._choose(group)
            replica.own += 1
            try:
                copy = request.copy(replica.address, body)
                answer = await self._pool.handle_async_request(copy)
                has_others = len(self._list_sound(group)) > 1
                if not (answer.status == 503 and may_repeat and has_others):
                    return RelayedAnswer(request, replica, answer)
                await answer.aclose()
                may_repeat = False
            except LOST as error:
                refusal = _refuse_lost(replica, error)
                log.warning("request %s: %s", request.state.id, refusal.detail)
                if not isinstance(error, UNREACHED):
                    if not may_repeat:
                        raise refusal from error
                    may_repeat = False
            finally:
                replica.own -= 1
            replica.is_silent = True
        raise self._refuse_absent(group)

    def _locate(self, request: Request, endpoint: Endpoint, body: bytes = b"") -> str:
        """Return the group whose replicas answer a request. Errors: APIError."""
        model: str | None = request.path_params.get("model_id")
        if model is None:
            source = endpoint.request or endpoint.query
            if len(self._handles) == 1 or source is None or "model" not in source.model_fields:
                return self._choose_group()
            model = _read_model(request, body) if body else request.query_params.get("model")
        return self._find_group(model)

    def _choose_group(self) -> str:
        """Return the group with the most replicas."""
        return max(self._replicas, key=lambda group: len(self._replicas[group]))

    def _find_group(self, model: str | None) -> str:
        """Return the group of a model, of the default for None. Errors: as `choose_model`."""
        default = next((own for own, card in self._models.items() if card["default"]), None)
        return str(self._models[choose_model(model, self._models, default)]["group"])

    async def _choose(self, group: str) -> ServeReplica:
        """Return the replica with the least to do, as soon as one answers. Errors: APIError."""
        deadline = time.monotonic() + REPLICA_S
        while time.monotonic() < deadline:
            if sound := self._list_sound(group):
                return min(sound, key=lambda one: (one.own, one.running))
            await asyncio.sleep(POLL_S)
        raise self._refuse_absent(group)

    def _list_sound(self, group: str) -> list[ServeReplica]:
        return [one for one in self._replicas.get(group, {}).values() if not one.is_silent]

    def _refuse_absent(self, group: str) -> APIError:
        loss = self._losses.get(group, "")
        detail = f"No replica of {group} answers: it loads, or is replaced. {loss}".strip()
        return api_error("model_loading", detail, retry_after=RETRY_S)

    # ------------------------------------------------------------------ all replicas

    async def _list_models(self) -> ModelList:
        return ModelList(models=self._list_cards())

    async def _list_openai_models(self) -> dict[str, Any]:
        return list_as_openai(self._list_cards())

    async def _get_model(self, model_id: str) -> ModelCard:
        self._find_group(model_id)
        return self._merge_cards(model_id)

    async def _change_model(self, change: str, model_id: str, query: WaitDep) -> ModelCard:
        """Load, unload or drain a model in all its replicas. Errors: APIError, of any of them."""
        group = self._find_group(model_id)
        call = self._handles[group].broadcast("change_model", change, model_id, query.wait_s)
        for answer in await call.results_async(return_exceptions=True):
            if isinstance(answer, RayTaskError) and isinstance(answer.cause, APIError):
                raise answer.cause
        await self._look_up(group)
        return self._merge_cards(model_id)

    def _list_cards(self) -> list[ModelCard]:
        return [self._merge_cards(model_id) for model_id in self._models]

    def _merge_cards(self, model_id: str) -> ModelCard:
        """Return one card of what replicas say of a model: it is as the best of them is."""
        group = self._models[model_id]["group"]
        replicas = self._replicas[group].values()
        cards = [own.cards[model_id] for own in replicas if model_id in own.cards]
        if not cards:
            detail = "no replica answers yet"
            known = {"id": model_id, "state": "loading", "detail": detail, **self._models[model_id]}
            cards = [ModelCard.model_validate(known, extra="ignore")]
        best = next((card for card in cards if card.state == "ready"), cards[0])
        merged = {
            "detail": "; ".join(filter(None, (best.detail, self._losses.get(group)))),
            "replicas": [replica for card in cards for replica in card.replicas],
            "restarts": sum(card.restarts for card in cards),
        }
        return best.model_copy(update=merged)

    async def _answer_health(self) -> Health:
        return Health(status="ok", version=__version__)

    async def _answer_ready(self, response: Response) -> Readiness:
        """Say whether a replica of each required model answers."""
        cards = self._list_cards()
        waiting = [f"{c.id} is {c.state}" for c in cards if c.required and c.state != "ready"]
        response.status_code = 503 if waiting else 200
        states = {card.id: card.state for card in cards}
        return Readiness(ready=not waiting, models=states, reason="; ".join(waiting) or None)

    async def _answer_startup(self, response: Response) -> Startup:
        found = await self._answer_ready(response)
        return Startup(started=found.ready, reason=found.reason)

    async def _refuse_metrics(self) -> None:
        detail = "Each replica has its own metrics: /metrics/targets says where."
        raise api_error("not_found", detail)

    async def _list_targets(self, request: Request) -> list[dict[str, Any]]:
        """Return the replicas in the form that Prometheus' `http_sd_configs` reads."""
        check_metrics_key(self._settings.metrics_key, request.headers.get("authorization", ""))
        return [
            {"targets": [own.address], "labels": {"group": group, "process": replica}}
            for group, replicas in self._replicas.items()
            for replica, own in replicas.items()
        ]

    async def _reload(self, query: WaitDep) -> ReloadAnswer:
        return await self._apply_reload(self._models, query.wait_s)

    async def _watch(self) -> None:
        """Keep up with which replicas there are."""
        while True:
            await asyncio.gather(*(self._look_up(group) for group in self._handles))
            await asyncio.sleep(WATCH_S)

    async def _look_up(self, group: str) -> None:
        """Record what the replicas of a group say of themselves, and why one is lost."""
        replicas = self._replicas[group]
        missing = dict(replicas)
        try:
            call = self._handles[group].broadcast("describe")
            answers = await call.results_async(return_exceptions=True, timeout_s=SILENT_S)
        except (RayError, RayServeException, TimeoutError):
            answers = []  # one of them is silent, or there is none
        for answer in answers:
            if isinstance(answer, dict):
                name = answer.pop("id")
                missing.pop(name, None)
                replica = replicas.setdefault(name, ServeReplica(**answer))
                vars(replica).update(answer, is_silent=False)
        deaths = await asyncio.gather(*(find_death(replica) for replica in missing.values()))
        for name, death in zip(missing, deaths, strict=True):
            if death is not None:
                replicas.pop(name, None)
            if death:
                self._losses[group] = f"replica {name} was lost: {death}"
                log.error("%s: %s", group, self._losses[group])


async def find_death(replica: ServeReplica) -> str | None:
    """Return why a replica is dead, empty where Serve ended a sound one; None: it is alive.

    One that does not answer is silent from now on.
    """
    try:
        async with asyncio.timeout(SILENT_S):
            await replica.actor.__ray_ready__.remote()
        replica.is_silent = False
    except RayActorError as error:
        text = " ".join(str(error).split())
        if "ray.kill" in text or "INTENDED" in text:
            return replica.fault or ("it did not answer" if replica.is_silent else "")
        return text.partition("The actor is dead because ")[2] or text
    except (RayError, TimeoutError):
        replica.is_silent = True
    return None


def _read_model(request: Request, body: bytes) -> str | None:
    """Return the model that a body names. Errors: APIError where it cannot be read."""
    kind = request.headers.get("content-type", "")
    decode = msgspec.msgpack.decode if "msgpack" in kind else msgspec.json.decode
    try:
        return decode(body, type=_NamedModel).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = f"The body cannot be read: {str(error)[:200]}."
        raise api_error("invalid_request", detail) from error


def _refuse_lost(replica: ServeReplica, error: Exception) -> APIError:
    detail = (
        "The replica that had the request was lost, send it again: "
        f"replica {replica.address} is lost: {error!r}"
    )
    return api_error("engine_restarting", detail, retry_after=RETRY_S)
