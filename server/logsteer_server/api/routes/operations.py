"""`/models` and `/models/{id}`, its self-test and what changes it; probes, `/metrics`; `/v1/models`
and `/tokenizer_info`, in OpenAI's shape.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse

from logsteer.schemas import (
    Health,
    ModelCard,
    ModelList,
    Readiness,
    ReloadAnswer,
    SelftestAnswer,
    SelftestRequest,
    Startup,
    VariantCard,
)
from logsteer.schemas.openai import TokenizerInfo
from logsteer.schemas.vectors import WaitQuery
from logsteer_server import __version__
from logsteer_server.api.dependencies import (
    ChangesDep,
    DrainDep,
    ModelsDep,
    ObjectsDep,
    VariantsDep,
    find_base,
)
from logsteer_server.api.respond import EventStream, answer, run_within
from logsteer_server.api.routing import KeyedRoute
from logsteer_server.api.selftest import stream_selftest
from logsteer_server.keys.keyring import check_metrics_key
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.observation.metrics import METRICS_TYPE
from logsteer_server.observation.requests import find_record
from logsteer_server.tasks.run import Event

ANSWERED_AS: dict[str, Any] = {"application/msgpack": {}, "text/event-stream": {}}
"""Media types of a self-test's answer, beside JSON."""

WaitDep = Annotated[WaitQuery, Query()]

router = APIRouter(route_class=KeyedRoute, tags=["operations"])
openai_router = APIRouter(route_class=KeyedRoute, tags=["openai"])
"""What OpenAI's clients and vLLM's ask about models."""


@router.get("/models")
async def list_models(models: ModelsDep, variants: VariantsDep) -> ModelList:
    """Every configured model and its state, and variants."""
    cards = [model.describe() for model in models.by_id.values()]
    return ModelList(models=cards, variants=variants)


@router.get("/models/{model_id:path}")
async def get_model(model_id: str, request: Request, models: ModelsDep) -> ModelCard:
    """One model and its state; of a variant those of its model."""
    return await _describe(model_id, request, models)


async def _describe(name: str, request: Request, models: ModelRegistry) -> ModelCard:
    base = await find_base(request, name)
    return name_variant(models.find(base).describe(), name)


def name_variant(card: ModelCard, name: str) -> ModelCard:
    """Return a model's card under the name of a variant of it; unchanged under its own."""
    if name == card.id:
        return card
    return card.model_copy(update={"id": name, "variant_of": card.id})


@router.post(
    "/models/{model_id}/selftest",
    responses={200: {"model": SelftestAnswer, "content": ANSWERED_AS}},
)
async def selftest(
    model_id: str, body: SelftestRequest, request: Request, models: ModelsDep
) -> Response:
    """What the service promises, measured on this model, each promise with a verdict.

    The same tokens are scored alone, in batches, shuffled, from the prefix cache and in chunks;
    continuations are scored as they were sampled, steered and not; and where a second model is
    named, both score the same. In under a minute on a small model; other requests are answered
    meanwhile, and share its batches. `logsteer selftest URL` measures the same from anywhere.
    """
    model, record = models.find(model_id), find_record(request.scope)
    model.require()
    record.model = model.id
    events = stream_selftest(request.app, request.state.caller, model.id, body)
    timeout_s: float | None = request.app.state.settings.request_timeout_s
    if body.stream:
        opening = await run_within(request, timeout_s, anext(events))
        return EventStream(opening.document["id"], opening, events, record, openai=False)

    async def finish() -> Event:
        return [event async for event in events][-1]

    return answer(request, (await run_within(request, timeout_s, finish())).document)


@router.post("/models/{model_id}/load")
async def load(model_id: str, query: WaitDep, models: ModelsDep, changes: ChangesDep) -> ModelCard:
    """Start a model that was unloaded, drained or has failed."""
    await changes.load(models.find(model_id), query.wait_s)
    return models.find(model_id).describe()


@router.post("/models/{model_id}/unload")
async def unload(
    model_id: str, query: WaitDep, models: ModelsDep, changes: ChangesDep
) -> ModelCard:
    """Finish a model's running requests, then end its engine; `load` starts it again.

    New requests get `model_loading`. A required model that is unloaded fails `/readyz`.
    """
    await changes.unload(models.find(model_id), query.wait_s)
    return models.find(model_id).describe()


@router.post("/models/{model_id}/drain")
async def drain_model(
    model_id: str, query: WaitDep, models: ModelsDep, changes: ChangesDep
) -> ModelCard:
    """Finish a model's running requests and refuse new ones, until `load`."""
    await changes.drain(models.find(model_id), query.wait_s)
    return models.find(model_id).describe()


@router.post("/admin/reload")
async def reload(query: WaitDep, changes: ChangesDep) -> ReloadAnswer:
    """Read the configuration again; add, remove and replace models while others answer.

    An invalid configuration changes nothing. During another change it is refused as `overloaded`.
    """
    return await changes.reload(query.wait_s)


@router.get("/healthz")
async def healthz(models: ModelsDep, response: Response) -> Health:
    """Whether the process is healthy: a liveness probe. Status 503 where only a restart helps."""
    given_up = models.find_given_up()
    if given_up is None:
        return Health(status="ok", version=__version__)
    response.status_code = 503
    reason = f"the required model {given_up.id} was given up: {given_up.handle.detail}"
    return Health(status="failing", version=__version__, reason=reason)


@router.get("/readyz")
async def readyz(
    models: ModelsDep, drain: DrainDep, objects: ObjectsDep, response: Response
) -> Readiness:
    """Whether every required model answers now: a readiness probe. Status 503 where one does not,
    and at the end.
    """
    store = None if objects.is_local else ("away" if objects.trouble else "answers")
    reason = "the server is shutting down" if drain.has_begun else name_waiting(models)
    response.status_code = 503 if reason else 200
    states = {model.id: model.status[0] for model in models.by_id.values()}
    return Readiness(ready=reason is None, models=states, reason=reason, store=store)


@router.get("/startupz")
async def startupz(models: ModelsDep, response: Response) -> Startup:
    """Whether every required model has answered once: a startup probe. Status 503 until then."""
    if models.has_started:
        return Startup(started=True)
    response.status_code = 503
    return Startup(started=False, reason=name_waiting(models))


def name_waiting(models: ModelRegistry) -> str | None:
    """Name the required models that do not answer, and why; None where all do."""
    waiting = [model for model in models.required if not model.is_ready]
    told = (f"{model.id} is {model.status[0]}: {model.status[1]}" for model in waiting)
    return "; ".join(told) or None


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Everything counted, in Prometheus' text format; needs the key metrics_key, if any."""
    state = request.app.state
    check_metrics_key(state.settings.metrics_key, request.headers.get("authorization", ""))
    return Response(state.metrics.render(), media_type=METRICS_TYPE)


@openai_router.get("/v1/models", name="list_models")
async def list_openai_models(models: ModelsDep, variants: VariantsDep) -> dict[str, Any]:
    """The models that answer now, then variants of them."""
    return list_as_openai([model.describe() for model in models.by_id.values()], variants)


@openai_router.get("/v1/models/{model_id:path}", name="get_openai_model")
async def get_openai_model(model_id: str, request: Request, models: ModelsDep) -> dict[str, Any]:
    """One model, which answers now."""
    card = await _describe(model_id, request, models)
    models.find(card.variant_of or card.id).require()
    return _write_as_openai(card)


def list_as_openai(cards: Sequence[ModelCard], variants: Iterable[VariantCard]) -> dict[str, Any]:
    """Return the models that answer now, then variants of them, in OpenAI's shape."""
    ready = {card.id: card for card in cards if card.state == "ready"}
    named = [name_variant(ready[one.model], one.name) for one in variants if one.model in ready]
    return {"object": "list", "data": [_write_as_openai(c) for c in [*ready.values(), *named]]}


def _write_as_openai(card: ModelCard) -> dict[str, Any]:
    shape = {"object": "model", "created": 0, "owned_by": "logsteer"}
    of = {"root": card.variant_of or card.id, "parent": card.variant_of}  # as vLLM's adapters have
    return {"id": card.id, **shape, **of, "max_model_len": card.context_length}


@openai_router.get("/tokenizer_info")
async def tokenizer_info(
    request: Request, models: ModelsDep, model: str | None = None
) -> TokenizerInfo:
    """Special tokens and chat template of a model."""
    codec, info = models.find(await find_base(request, model)).require()
    return TokenizerInfo(model_max_length=info.context_length, **codec.describe())
