"""The ingress: reads which model a request is for, and forwards its bytes to a replica of it.

caller ──► ingress ── HTTP ──► a replica's own server, which checks, works and answers
               └─ every second ─► Serve: which replicas there are

It parses no more than the `model` of a body, and answers itself what is about all replicas: the
list of models, probes, changes. A request through Serve's own handles takes thrice the CPU time.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpcore
import msgspec
import orjson
import uvicorn
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from starlette.types import Receive, Scope, Send

from logsteer._endpoints import ENDPOINTS, Endpoint
from logsteer.errors import APIError, api_error
from logsteer.schemas import ReloadAnswer
from logsteer.schemas.faults import explain
from logsteer.schemas.vectors import WaitQuery
from logsteer_server import __version__
from logsteer_server.api.gate import AllowedHosts, Drain, RequestGate
from logsteer_server.cluster.exchange import Exchange, HangUpError
from logsteer_server.keys.keyring import KeyRing, check_metrics_key
from logsteer_server.listening import listen_at
from logsteer_server.models.admission import BYTES, Admission, Reservation
from logsteer_server.observation.logs import LogStyle, configure_logs
from logsteer_server.serving import configure_server
from logsteer_server.settings import Settings

log = logging.getLogger(__name__)

SERVICE = "logsteer"
"""The name of the application in Serve."""
WATCH_S = 1.0
SILENT_S = 2.0
ANSWER_S = 5.0
"""For what replicas and controller say of themselves."""
REPLICA_S = 10.0
"""For so long a request waits for a replica that takes it."""
KEPT_S = 15.0
"""An idle connection to a replica is dropped long before that drops it."""
MAX_TRIES = 3
"""Replicas that are tried where none takes the connection."""
POLL_S = 0.05
RETRY_S = 2.0
LOST = (httpcore.NetworkError, httpcore.RemoteProtocolError, httpcore.TimeoutException)
"""What a connection ends with whose replica is gone."""


class _NamedModel(msgspec.Struct):
    """The one field of a body that is read: all others are skipped without being built."""

    model: str | None = None


READ_JSON = msgspec.json.Decoder(_NamedModel).decode
READ_MSGPACK = msgspec.msgpack.Decoder(_NamedModel).decode


def name_deployment(group: str) -> str:
    """Return the name that Serve has for a group's servers."""
    return f"model-{group}"


def _match(path: str) -> re.Pattern[str]:
    """Return the pattern of a path of the table of endpoints."""
    pattern = path.replace("{name}", "(?:shared/)?[^/]+").replace("{model_id}", "(?P<model>.+)")
    return re.compile(pattern)


PATTERNS = [(endpoint, _match(endpoint.path)) for endpoint in ENDPOINTS.values()]


def find_endpoint(method: str, path: str) -> tuple[Endpoint | None, str | None]:
    """Return the endpoint of a request, None where there is none, and the model in its path."""
    for endpoint, pattern in PATTERNS:
        if endpoint.method == method and (found := pattern.fullmatch(path)):
            return endpoint, found.groupdict().get("model")
    return None, None


def is_repeatable(endpoint: Endpoint | None) -> bool:
    """Return whether a request may be sent twice: it stores nothing, and its body is at hand."""
    return (
        endpoint is not None
        and endpoint.upload is None
        and endpoint.scope in (None, "score", "steer")
    )


Models = Mapping[str, Mapping[str, Any]]
"""Id -> group, engine, whether it is required, and the version of its deployment."""

Reload = Callable[[Models, float], Awaitable[ReloadAnswer]]
"""Reads the configuration again, and waits so many seconds for what that changes."""


@dataclass(slots=True)
class Known:
    """A replica that has described itself."""

    address: str
    actor: Any
    fault: str
    running: int
    """Requests that it has, those of other ingresses included."""
    own: int = 0
    """Requests of this ingress that it has."""
    is_silent: bool = False
    """It did not answer lately: another one is asked."""


class LostReplicaError(Exception):
    """The replica did not answer a request to its end; `was_reached`: it may have begun."""

    def __init__(self, replica: Known, reason: object, *, was_reached: bool = True) -> None:
        super().__init__(f"replica {replica.address} is lost: {reason}")
        self.was_reached = was_reached


class Ingress:
    """The deployment that listens for callers."""

    async def __init__(  # type: ignore[misc]
        self, document: dict[str, Any], reload: Reload, _servers: Sequence[Any]
    ) -> None:
        # Serve deploys what is bound to its argument; where it is, `reconfigure` says.
        self._settings = settings = Settings(**document)
        configure_logs(LogStyle(settings.log_format, settings.log_level))
        self._reload = reload
        self._keys = KeyRing(settings)
        self._models: dict[str, dict[str, Any]] = {}
        """Id -> group, engine, whether it is required, and the version of its deployment."""
        self._handles: dict[str, Any] = {}
        self._known: dict[str, dict[str, Known]] = {}
        """Group -> its replicas that have described themselves, by id."""
        self._losses: dict[str, str] = {}
        """Group -> why it last lost a replica."""
        self._has_started = False
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEPT_S
        )
        hosts = AllowedHosts(settings, needs_key=self._keys.needs_key)
        memory = Admission(settings.max_pending_bytes, BYTES)
        app = RequestGate(self, hosts, Drain(), memory)
        self._server = uvicorn.Server(configure_server(settings, app, settings.drain_s))
        self._server.config.lifespan = "off"
        listener = listen_at(settings.host, settings.port)
        self._serving = asyncio.create_task(self._server._serve(sockets=[listener]))
        self._watching = asyncio.create_task(self._watch())

    async def reconfigure(self, models: dict[str, dict[str, Any]]) -> None:
        """Take the models that there are from now on, and where each is; called by Serve."""
        self._models = models
        groups = {model["group"]: None for model in models.values()}
        self._handles = {
            group: self._handles.get(group)
            or serve.get_deployment_handle(name_deployment(group), SERVICE)
            for group in groups
        }

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

    # ------------------------------------------------------------------ requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = Exchange(scope, receive, send)
        try:
            await exchange.until_hang_up(self._answer(exchange))
        except APIError as error:
            await exchange.fail(error)
        except HangUpError:
            pass
        except Exception:
            log.exception("request %s failed in the ingress", exchange.id)
            detail = f"A fault of the ingress, not of the request; its log has it: {exchange.id}."
            await exchange.fail(api_error("internal", detail))

    async def _answer(self, exchange: Exchange) -> None:
        endpoint, model = find_endpoint(exchange.method, exchange.path)
        caller = None
        if endpoint is not None and endpoint.scope is not None:
            # Whoever has no key gets nothing read, and learns no model's name.
            caller = self._keys.identify(
                exchange.headers.get(b"authorization", b"").decode("latin-1")
            )
        name = "" if endpoint is None else endpoint.name
        match name:
            case "models":
                await exchange.reply(await self._list_models(exchange))
            case "model" | "load_model" | "unload_model" | "drain_model":
                await self._answer_of_all(exchange, str(model))
            case "v1.models":
                await exchange.reply(await self._list_openai_models(exchange))
            case "health":
                await exchange.reply({"status": "ok", "version": __version__, "reason": None})
            case "ready" | "startup":
                await self._answer_probe(exchange, name)
            case "metrics":
                detail = "Each replica has its own metrics: /metrics/targets says where."
                raise api_error("not_found", detail)
            case "reload":
                assert caller is not None
                caller.require("admin")
                report = await self._reload(self._models, _read_wait(exchange))
                await exchange.reply(report.model_dump())
            case _ if exchange.path == "/metrics/targets":
                given = exchange.headers.get(b"authorization", b"").decode("latin-1")
                check_metrics_key(self._settings.metrics_key, given)
                await exchange.reply(self._list_targets())
            case _:
                await self._forward(exchange, endpoint, model)

    async def _forward(
        self, exchange: Exchange, endpoint: Endpoint | None, model: str | None
    ) -> None:
        """Send a request to a replica of its model; once more to another, where it may be."""
        body: bytes | None = None
        if endpoint is not None and endpoint.request is not None:
            body = await self._read_body(exchange)
        tries = 0
        group = self._find_group(exchange, endpoint, model, body)
        while True:
            replica = await self._choose(group)
            tries += 1
            repeats = tries == 1 and is_repeatable(endpoint)
            try:
                return await self._exchange(exchange, replica, body, group if repeats else "")
            except LostReplicaError as error:
                log.warning("request %s: %s", exchange.id, error)
                if error.was_reached:
                    if exchange.has_begun or not repeats:
                        raise _refuse_lost(error) from error
                elif tries == MAX_TRIES:
                    raise self._refuse_absent(group) from error

    async def _read_body(self, exchange: Exchange) -> bytes:
        """Read a body within the bounds of one, and of all. Errors: APIError."""
        chunks: list[bytes] = []
        size, limit = 0, self._settings.max_body_bytes
        memory: Reservation = exchange.scope["state"]["memory"]
        async for chunk in exchange.read():
            size += len(chunk)
            if size > limit:
                detail = (
                    f"The body is larger than {limit} bytes: split the request, send long text "
                    "to /perplexity/stream, or raise max_body_bytes."
                )
                raise api_error("payload_too_large", detail)
            memory.cover(size)
            chunks.append(chunk)
        return b"".join(chunks)

    def _find_group(
        self, exchange: Exchange, endpoint: Endpoint | None, model: str | None, body: bytes | None
    ) -> str:
        """Return the group whose replicas answer a request. Errors: APIError."""
        if endpoint is None or len(self._handles) == 1:
            return self._find_any()
        source = endpoint.request or endpoint.query
        if model is None:
            if source is None or "model" not in source.model_fields:
                return self._find_any()
            model = (
                exchange.get_query("model") if body is None else self._read_model(exchange, body)
            )
        if model is None:
            model = next((own for own, card in self._models.items() if card["default"]), None)
        if model is None:
            ids = ", ".join(self._models)
            detail = f"Several models are resident; name one of them as model: {ids}."
            raise api_error("invalid_request", detail, param="model")
        return self._locate(model)

    def _locate(self, model: str) -> str:
        """Return the group of a model. Errors: APIError `unknown_model`."""
        if model not in self._models:
            ids = ", ".join(self._models)
            detail = f"No model {model[:80]!r} is resident; these are: {ids}."
            raise api_error("unknown_model", detail, param="model")
        return str(self._models[model]["group"])

    def _find_any(self) -> str:
        """Return a group that has a replica, where there is one."""
        return next((group for group in self._handles if self._known.get(group)), "") or next(
            iter(self._handles)
        )

    def _read_model(self, exchange: Exchange, body: bytes) -> str | None:
        """Return the model that a body names. Errors: APIError where it cannot be read."""
        kind = exchange.headers.get(b"content-type", b"")
        try:
            return (READ_MSGPACK if b"msgpack" in kind else READ_JSON)(body).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            detail = f"The body cannot be read: {str(error)[:200]}."
            raise api_error("invalid_request", detail) from error

    async def _choose(self, group: str) -> Known:
        """Return the replica with the least to do, as soon as one answers. Errors: APIError."""
        deadline = time.monotonic() + REPLICA_S
        while time.monotonic() < deadline:
            sound = [one for one in self._get_known(group) if not one.is_silent]
            if sound:
                return min(sound, key=lambda one: (one.own, one.running))
            await asyncio.sleep(POLL_S)
        raise self._refuse_absent(group)

    def _refuse_absent(self, group: str) -> APIError:
        loss = self._losses.get(group, "")
        detail = f"No replica of {group} answers: it loads, or is replaced. {loss}".strip()
        return api_error("model_loading", detail, retry_after=RETRY_S)

    async def _exchange(
        self, exchange: Exchange, replica: Known, body: bytes | None, group: str
    ) -> None:
        """Send a request to a replica, and its answer to the caller.

        Where another replica of `group` may have it, an answer 503 counts as none. Errors:
        LostReplicaError.
        """
        replica.own += 1
        answer = None
        try:
            answer = await self._pool.handle_async_request(exchange.copy(replica.address, body))
            others = [one for one in self._get_known(group) if not one.is_silent]
            if answer.status == 503 and len(others) > 1:
                raise LostReplicaError(replica, "its engine does not answer")
            await exchange.start(answer.status, answer.headers)
            async for chunk in answer.aiter_stream():
                await exchange.send_body(chunk)
        except LOST as error:
            was_reached = not isinstance(error, httpcore.ConnectError | httpcore.ConnectTimeout)
            replica.is_silent = True
            raise LostReplicaError(replica, repr(error), was_reached=was_reached) from error
        except LostReplicaError:
            replica.is_silent = True
            raise
        finally:
            replica.own -= 1
            if answer is not None:
                await answer.aclose()
        await exchange.send_body(b"", more=False)

    # ------------------------------------------------------------------ all replicas

    async def _ask_all(
        self, exchange: Exchange, groups: Iterable[str], path: str = ""
    ) -> list[dict[str, Any]]:
        """Return what every replica of some groups answers to a request without a body.

        Those that do not answer are left out. With `path`, they are asked for that, and answers of
        any status count. Errors: APIError, the refusal of any.
        """

        async def ask(replica: Known) -> tuple[int, dict[str, Any]] | None:
            request = exchange.copy(replica.address, b"", path)
            if request.method == b"GET":  # a change takes what its caller waits for
                request.extensions["timeout"]["read"] = ANSWER_S
            with suppress(*LOST, orjson.JSONDecodeError):
                answer = await self._pool.handle_async_request(request)
                try:
                    return answer.status, orjson.loads(await answer.aread())
                finally:
                    await answer.aclose()
            return None

        replicas = [replica for group in groups for replica in self._get_known(group)]
        answers = await asyncio.gather(*map(ask, replicas))
        found = [answer for answer in answers if answer is not None]
        for status, document in found:
            if status != 200 and not path:
                raise _repeat_refusal(status, document)
        return [document for _, document in found]

    def _get_known(self, group: str) -> list[Known]:
        return list(self._known.get(group, {}).values())

    async def _list_models(self, exchange: Exchange) -> dict[str, Any]:
        """Return the cards of all models, each of all its replicas."""
        cards: dict[str, list[Any]] = {model_id: [] for model_id in self._models}
        for answer in await self._ask_all(exchange, self._handles):
            for card in answer["models"]:
                cards.setdefault(card["id"], []).append(card)
        return {"models": [await self._merge(own, cards[own]) for own in self._models]}

    async def _list_openai_models(self, exchange: Exchange) -> dict[str, Any]:
        answers = await self._ask_all(exchange, self._handles)
        data = {model["id"]: model for answer in answers for model in answer["data"]}
        return {"object": "list", "data": [data[own] for own in self._models if own in data]}

    async def _answer_of_all(self, exchange: Exchange, model_id: str) -> None:
        """Answer what every replica of a model is asked, by its card."""
        cards = await self._ask_all(exchange, [self._locate(model_id)])
        await exchange.reply(await self._merge(model_id, cards))

    async def _merge(self, model_id: str, cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return one card of what replicas say of a model: it is as the best of them is.

        Without any, it has what Serve says.
        """
        model = self._models[model_id]
        loss = self._losses.get(model["group"], "")
        if cards:
            best = next((card for card in cards if card["state"] == "ready"), cards[0])
            return best | {
                "detail": "; ".join(filter(None, (best["detail"], loss))),
                "replicas": [replica for card in cards for replica in card["replicas"]],
                "restarts": sum(card["restarts"] for card in cards),
            }
        state, said = "loading", "no replica answers yet"
        with suppress(Exception):  # Serve's controller is away: what is known stays
            async with asyncio.timeout(ANSWER_S):
                status = await asyncio.to_thread(serve.status)
            own = status.applications[SERVICE].deployments[name_deployment(model["group"])]
            state = "failed" if own.status == "DEPLOY_FAILED" else "loading"
            said = own.message or said
        card = {"id": model_id, "engine": model["engine"], "required": model["required"]}
        detail = "; ".join(filter(None, (said, loss)))
        return card | {"state": state, "detail": detail, "restarts": 0, "replicas": []}

    async def _answer_probe(self, exchange: Exchange, name: str) -> None:
        """Answer `/readyz` or `/startupz`: whether a replica of each required model answers."""
        states: dict[str, str] = dict.fromkeys(self._models, "loading")
        for answer in await self._ask_all(exchange, self._handles, "/readyz"):
            for model_id, state in answer.get("models", {}).items():
                if states.get(model_id, "ready") != "ready":
                    states[model_id] = state
        waiting = [
            f"{model_id} is {states[model_id]}"
            for model_id, model in self._models.items()
            if model["required"] and states[model_id] != "ready"
        ]
        reason = "; ".join(waiting) or None
        self._has_started = self._has_started or reason is None
        if name == "ready":
            document = {"ready": reason is None, "models": states, "reason": reason, "store": None}
            await exchange.reply(document, 503 if reason else 200)
        else:
            document = {"started": self._has_started, "reason": reason}
            await exchange.reply(document, 200 if self._has_started else 503)

    def _list_targets(self) -> list[dict[str, Any]]:
        """Return the replicas in the form that Prometheus' `http_sd_configs` reads."""
        return [
            {"targets": [own.address], "labels": {"group": group, "process": replica}}
            for group, replicas in self._known.items()
            for replica, own in replicas.items()
        ]

    async def _watch(self) -> None:
        """Keep up with which replicas there are, and log why one is not there any more."""
        while True:
            await asyncio.gather(*(self._look(group) for group in list(self._handles)))
            for group in self._known.keys() - self._handles.keys():
                del self._known[group]
            await asyncio.sleep(WATCH_S)

    async def _look(self, group: str) -> None:
        """Find the replicas of a group, and why one is lost."""
        earlier = self._known.get(group, {})
        now: dict[str, Known] = {}
        try:
            call = self._handles[group].broadcast("describe")
            answers = await call.results_async(return_exceptions=True, timeout_s=SILENT_S)
        except (RayError, RayServeException, TimeoutError):
            answers = []  # one of them is silent, or there is none
        for answer in answers:
            if isinstance(answer, dict):
                name = answer.pop("id")
                now[name] = replica = earlier.get(name) or Known(**answer)
                replica.fault, replica.running = answer["fault"], answer["running"]
                replica.is_silent = False
        missing = {name: replica for name, replica in earlier.items() if name not in now}
        reasons = await asyncio.gather(*(explain_loss(replica) for replica in missing.values()))
        for (name, replica), reason in zip(missing.items(), reasons, strict=True):
            if reason is None:
                now[name] = replica
            elif reason:
                self._losses[group] = f"replica {name} was lost: {reason}"
                log.error("%s: %s", group, self._losses[group])
            else:
                log.info("%s: replica %s has ended, as Serve asked it to", group, name)
        self._known[group] = now


async def explain_loss(replica: Known) -> str | None:
    """Return why a replica is dead, empty where Serve ended one that was sound; None: it is not.

    One that does not answer is silent from now on.
    """
    try:
        async with asyncio.timeout(SILENT_S):
            await replica.actor.__ray_ready__.remote()
    except RayActorError as error:
        text = " ".join(str(error).split())
        if "ray.kill" in text or "INTENDED" in text:
            return replica.fault or ("it did not answer" if replica.is_silent else "")
        return text.partition("The actor is dead because ")[2] or text
    except (RayError, TimeoutError):
        replica.is_silent = True
        return None
    replica.is_silent = False
    return None


def _read_wait(exchange: Exchange) -> float:
    """Return `wait_s` of a query. Errors: APIError."""
    try:
        return WaitQuery.model_validate({"wait_s": exchange.get_query("wait_s") or 0}).wait_s
    except ValidationError as error:
        raise api_error("invalid_request", explain(error, WaitQuery), param="wait_s") from error


def _refuse_lost(error: LostReplicaError) -> APIError:
    detail = f"The replica that had the request was lost, send it again: {error}"
    return api_error("engine_restarting", detail, retry_after=RETRY_S)


def _repeat_refusal(status: int, document: Mapping[str, Any]) -> APIError:
    """Return the error that a replica has answered with."""
    given = document.get("error", document)
    detail = given.get("detail") or given.get("message") or "a replica refused this"
    return api_error(given["code"], detail, status=status)
