"""The ingress: reads which model a request is for, and hands it to a replica of that model.

caller ──► Serve's proxy ──► ingress ── handle ──► a replica: checks, works, answers

It is the application of one machine without engines, whose models are as their replicas say: it
answers itself what concerns all replicas, such as lists of models, readiness, changes, metrics. Of
other requests it parses no more than the `model` of a body.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial, partialmethod
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from ray import serve
from ray.exceptions import RayError, RayTaskError
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
from logsteer_server.models.model import ResidentModel
from logsteer_server.observation.logs import LogStyle, configure_logs
from logsteer_server.observation.metrics import METRICS_TYPE
from logsteer_server.settings import parse_settings

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
    *("load_model", "unload_model", "drain_model", "vllm.health", "vllm.ping", "vllm.post_ping"),
}
# What these answer depends on the models' states.
SHOWS_STATES = ("/models", "/v1/models", "/readyz", "/startupz", "/health", "/ping")
# What a replica gets of a request's scope.
SCOPE = (
    *("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers"),
    *("root_path", "client", "server"),
)


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
            KeyedRoute("/reset_prefix_cache", self._reset_prefix_caches, methods=["POST"]),
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

    async def _change(self, change: str, model: ResidentModel, wait_s: float) -> None:
        """Load, unload or drain a model in all its replicas. Errors: APIError, of any of them."""
        asked = (self._versions[model.id][0], "change_model", change, model.id, wait_s)
        for answer in await self._ask_all(*asked, wait_s=wait_s + REPLICA_S):
            if isinstance(answer, RayTaskError) and isinstance(answer.cause, APIError):
                raise answer.cause
        await self._update(model)

    load = partialmethod(_change, "load")
    unload = partialmethod(_change, "unload")
    drain = partialmethod(_change, "drain")

    async def reload(self, wait_s: float) -> ReloadAnswer:
        """Read the configuration again. Errors: APIError."""
        return await self._apply_reload(self._versions, wait_s)

    async def _reset_prefix_caches(self) -> dict[str, bool]:
        """Have all replicas use nothing of earlier requests; say whether each of them does."""
        answers = await self._ask_everyone("reset_prefix_caches")
        return {"success": not any(isinstance(answer, Exception) for answer in answers)}

    async def _read_metrics(self, request: Request) -> Response:
        """Return the metrics of all replicas; the label `process` says whose each is."""
        key, sent = self._app.state.settings.metrics_key, request.headers.get("authorization", "")
        check_metrics_key(key, sent)
        pages = [
            page for page in await self._ask_everyone("read_metrics") if isinstance(page, list)
        ]
        return Response("".join(dict.fromkeys(chain(*pages))), media_type=METRICS_TYPE)

    async def _ask_everyone(self, method: str) -> list[Any]:
        asking = (self._ask_all(group, method, wait_s=SILENT_S) for group in self._handles)
        return list(chain(*await asyncio.gather(*asking)))


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
