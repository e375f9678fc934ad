"""The ingress: reads which model a request is for, and hands it to a replica of that model.

caller ──► Serve's proxy ──► ingress ── handle ──► a replica: checks, works, answers

It parses no more than the `model` of a body, and answers itself what concerns all replicas: lists
of models, readiness, changes, metrics.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import ray
from fastapi import FastAPI, Request, Response
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from starlette.datastructures import MutableHeaders
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logsteer._endpoints import ENDPOINTS, Endpoint
from logsteer.errors import APIError, api_error
from logsteer.schemas import ModelCard, ModelList, Readiness, ReloadAnswer, Startup
from logsteer_server.api.dependencies import VariantsDep, find_base
from logsteer_server.api.gate import AllowedHosts, Drain, RequestGate
from logsteer_server.api.problems import OPENAI_PATHS, add_handlers
from logsteer_server.api.respond import encode_error
from logsteer_server.api.routes.operations import WaitDep, list_as_openai, name_variant
from logsteer_server.api.routing import KeyedRoute, LimitedRequest
from logsteer_server.interventions.interventions import NamespaceRegistry
from logsteer_server.keys.keyring import KeyRing, check_metrics_key
from logsteer_server.models.admission import BYTES, Admission
from logsteer_server.models.registry import choose_model
from logsteer_server.observation.logs import LogStyle, configure_logs
from logsteer_server.observation.metrics import METRICS_TYPE
from logsteer_server.settings import ModelSettings, parse_settings
from logsteer_server.stores.contents import ContentFiles
from logsteer_server.stores.objects import Objects
from logsteer_server.stores.threads import StoreThreads

SERVICE = "logsteer"
# Id of a model -> the names of its deployment and of that one's version.
Versions = Mapping[str, tuple[str, str]]
# For so long a request waits for a replica that takes it.
REPLICA_S = 10.0
# For so long a list of models waits for each replica.
SILENT_S = 2.0
RETRY_S = 2.0
# Bytes of an upload that the ingress holds; those before are in Ray's store, and on its disk.
PART_BYTES = 4 * 2**20
# What a replica gets of a request's scope, beside the headers.
SCOPE = (
    *("type", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "client", "server"),
)


class _NamedModel(msgspec.Struct):
    """The one field of a body that is read: all others are skipped without being built."""

    model: str | None = None


@serve.ingress()
class Ingress:
    """The deployment that Serve's proxies send all requests to."""

    def __init__(
        self,
        document: dict[str, Any],
        reload: Callable[[Versions, float], Awaitable[ReloadAnswer]],
        _servers: list[Any],
    ) -> None:
        # Serve deploys what is bound to its argument; where it is, `reconfigure` says.
        self._document = document
        self._settings = settings = parse_settings(document, Path(document["directory"]))
        configure_logs(LogStyle(settings.log_format, settings.log_level))
        self._keys = KeyRing(settings)
        self._apply_reload = reload

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Apply the models that there are from now on, and where each is; called by Serve."""
        document = self._document | {"models": config["models"]}
        settings = parse_settings(document, self._settings.directory)
        self._models = {model.id: model for model in settings.models}
        self._versions: Versions = config["versions"]
        names = dict.fromkeys(name for name, _version in self._versions.values())
        find = serve.get_deployment_handle
        self._handles: dict[str, Any] = {name: find(name, SERVICE) for name in names}

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application, whose answers leave the request's id to Serve's proxy."""
        app = self._create_app()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_on(message: Message) -> None:
                if message["type"] == "http.response.start":
                    del MutableHeaders(scope=message)["X-Request-Id"]
                await send(message)

            await app(scope, receive, send_on)

        return answer

    def _create_app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.state.settings, app.state.keys = self._settings, self._keys
        # Variants are looked up here: it is their models that have replicas.
        objects = Objects.open(self._settings)
        files = ContentFiles(objects, self._settings.store_cache_bytes)
        app.state.namespaces = NamespaceRegistry(self._settings, objects, files)
        app.state.store_threads, app.state.models = StoreThreads(), self
        own: dict[str, Callable[..., Any]] = {
            "models": self._list_models,
            "model": self._describe_model,
            "v1.models": self._list_openai_models,
            "ready": self._answer_ready,
            "startup": self._answer_startup,
            "vllm.health": self._answer_health,
            "vllm.ping": self._answer_health,
            "vllm.post_ping": self._answer_health,
            "vllm.reset_prefix_cache": self._reset_prefix_caches,
            "metrics": self._read_metrics,
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
        any_method = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        app.add_route("/{path:path}", partial(self._forward, None), any_method)
        hosts = AllowedHosts(self._settings, needs_key=self._keys.needs_key)
        memory = Admission(self._settings.max_pending_bytes, BYTES)
        app.add_middleware(RequestGate, hosts=hosts, drain=Drain(), admission=memory)
        add_handlers(app)
        return app

    # ------------------------------------------------------------------ one replica

    async def _forward(self, endpoint: Endpoint | None, caller: Request) -> Response:
        """Return the answer of a replica of the request's model, as it begins. Errors: APIError.

        Without an endpoint any replica answers: pages, and what is refused.
        """
        request = LimitedRequest(caller.scope, caller.receive)
        if endpoint is not None and endpoint.scope is not None:
            # Whoever has no key gets nothing read, and learns no model's name.
            request.state.caller = self._keys.identify(request.headers.get("authorization", ""))
        if endpoint is not None and endpoint.upload is not None:
            body, parts = b"", await _store(request, self._settings.max_upload_bytes)
        else:
            parts = [body := await request.body()]
        headers = MutableHeaders(raw=list(request.scope["headers"]))
        headers["X-Request-Id"] = request.state.id
        scope = {name: request.scope.get(name) for name in SCOPE} | {"headers": headers.raw}
        handle = self._handles[await self._locate(request, endpoint, body)]
        messages = _call(handle, scope, parts, request)
        start = await anext(messages)
        answer = StreamingResponse((own["body"] async for own in messages), start["status"])
        answer.raw_headers = start["headers"]
        return answer

    @property
    def by_id(self) -> Mapping[str, ModelSettings]:
        """The models that there are now."""
        return self._models

    async def _locate(self, request: Request, endpoint: Endpoint | None, body: bytes) -> str:
        """Return the deployment whose replicas answer a request. Errors: APIError."""
        any_group = next(iter(self._handles))
        if "model_id" in request.path_params:
            return self._find_group(await find_base(request, request.path_params["model_id"]))
        source = endpoint.request or endpoint.query if endpoint else None
        if len(self._handles) == 1 or source is None or "model" not in source.model_fields:
            return any_group
        if not body:
            return self._find_group(await find_base(request, request.query_params.get("model")))
        kind = request.headers.get("content-type", "")
        decode = msgspec.msgpack.decode if "msgpack" in kind else msgspec.json.decode
        try:
            name = decode(body, type=_NamedModel).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return any_group  # it says what is wrong with the body
        return self._find_group(await find_base(request, name))

    def _find_group(self, name: str | None) -> str:
        """Return the deployment of a model, of the default for None. Errors: as `choose_model`."""
        default = next((model.id for model in self._models.values() if model.default), None)
        return self._versions[choose_model(name, self._models, default)][0]

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

    async def _merge_cards(self, model_id: str) -> ModelCard:
        """Return one card of what replicas say of a model: it is as the best of them is."""
        group = self._find_group(model_id)
        answers = await self._ask_all(group, "describe", model_id, wait_s=SILENT_S)
        if not (cards := [card for card in answers if isinstance(card, ModelCard)]):
            known = self._models[model_id].model_dump(include={"id", "engine", "required"})
            cards = [ModelCard(**known, state="loading", detail="no replica answers")]
        best = min(cards, key=lambda card: card.state != "ready")
        replicas = [replica for card in cards for replica in card.replicas]
        restarts = sum(card.restarts for card in cards)
        return best.model_copy(update={"replicas": replicas, "restarts": restarts})

    async def _describe_model(self, model_id: str, request: Request) -> ModelCard:
        base = await find_base(request, model_id)
        return name_variant(await self._merge_cards(base or model_id), model_id)

    async def _list_cards(self) -> list[ModelCard]:
        return await asyncio.gather(*map(self._merge_cards, self._models))

    async def _list_models(self, variants: VariantsDep) -> ModelList:
        return ModelList(models=await self._list_cards(), variants=variants)

    async def _list_openai_models(self, variants: VariantsDep) -> dict[str, Any]:
        return list_as_openai(await self._list_cards(), variants)

    async def _change_model(self, change: str, model_id: str, query: WaitDep) -> ModelCard:
        """Load, unload or drain a model in all its replicas. Errors: APIError, of any of them."""
        group = self._find_group(model_id)
        asked = ("change_model", change, model_id, query.wait_s)
        for answer in await self._ask_all(group, *asked, wait_s=query.wait_s + REPLICA_S):
            if isinstance(answer, RayTaskError) and isinstance(answer.cause, APIError):
                raise answer.cause
        return await self._merge_cards(model_id)

    async def _answer_ready(self, response: Response) -> Readiness:
        """Say whether a replica of each required model answers."""
        cards = await self._list_cards()
        waiting = [f"{c.id} is {c.state}" for c in cards if c.required and c.state != "ready"]
        response.status_code = 503 if waiting else 200
        states = {card.id: card.state for card in cards}
        return Readiness(ready=not waiting, models=states, reason="; ".join(waiting) or None)

    async def _answer_startup(self, response: Response) -> Startup:
        found = await self._answer_ready(response)
        return Startup(started=found.ready, reason=found.reason)

    async def _answer_health(self) -> Response:
        await self._answer_ready(response := Response())
        return response

    async def _reset_prefix_caches(self) -> dict[str, bool]:
        """Have all replicas use nothing of earlier requests; say whether each of them does."""
        asking = [self._ask_all(g, "reset_prefix_caches", wait_s=SILENT_S) for g in self._handles]
        answers = [answer for found in await asyncio.gather(*asking) for answer in found]
        return {"success": not any(isinstance(answer, Exception) for answer in answers)}

    async def _read_metrics(self, request: Request) -> Response:
        """Return the metrics of all replicas; the label `process` says whose each is."""
        check_metrics_key(self._settings.metrics_key, request.headers.get("authorization", ""))
        asking = [self._ask_all(group, "read_metrics", wait_s=SILENT_S) for group in self._handles]
        pages = [page for found in await asyncio.gather(*asking) for page in found]
        lines = chain(*(page for page in pages if isinstance(page, list)))
        return Response("".join(dict.fromkeys(lines)), media_type=METRICS_TYPE)

    async def _reload(self, query: WaitDep) -> ReloadAnswer:
        return await self._apply_reload(self._versions, query.wait_s)


async def _store(request: Request, limit: int) -> list[Any]:
    """Return the parts of an upload: references to Ray's store, and the last one's bytes.

    Errors: APIError `payload_too_large`.
    """
    parts, part, size = [], bytearray(), 0
    async for chunk in request.stream():
        part += chunk
        size += len(chunk)
        if size > limit:
            detail = f"The upload is larger than {limit} bytes: raise max_upload_bytes."
            raise api_error("payload_too_large", detail)
        if len(part) >= PART_BYTES:
            parts.append(ray.put(bytes(part)))
            part.clear()
    return [*parts, bytes(part)]


async def _call(
    handle: Any, scope: Scope, parts: list[Any], request: Request
) -> AsyncIterator[Message]:
    """Yield the messages of a replica's answer; a caller who hangs up ends its work.

    Errors: APIError `model_loading` where no replica takes the request, `engine_restarting` where
    the one that had it is lost; of a stream that has begun an event says so.
    """
    call = handle.options(method_name="answer", stream=True).remote(scope, parts)
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
