"""`/models` and `/models/{id}`, its self-test, `/healthz`, `/readyz` and `/metrics`."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from logsteer.errors import api_error
from logsteer.schemas import (
    Health,
    ModelCard,
    ModelList,
    Readiness,
    SelftestAnswer,
    SelftestRequest,
)
from logsteer_server import __version__
from logsteer_server.http.dependencies import DrainDep, LimitedRoute, ModelsDep
from logsteer_server.http.metrics import render_metrics
from logsteer_server.http.problems import hide_paths
from logsteer_server.http.respond import respond
from logsteer_server.models.model import ResidentModel
from logsteer_server.observation.metrics import METRICS_TYPE
from logsteer_server.tasks.selftest import SelftestTask

ANSWERED_AS: dict[str, Any] = {"application/msgpack": {}, "text/event-stream": {}}
"""Media types of a self-test's answer, beside JSON."""

router = APIRouter(route_class=LimitedRoute, tags=["operations"])


@router.get("/models")
async def list_models(models: ModelsDep) -> ModelList:
    """Every configured model and its state."""
    return ModelList(models=[_describe(model) for model in models.by_id.values()])


@router.get("/models/{model_id:path}")
async def get_model(model_id: str, models: ModelsDep) -> ModelCard:
    """One model and its state."""
    return _describe(models.find(model_id))


def _describe(model: ResidentModel) -> ModelCard:
    """Describe a model; where on this machine its fault was, the log says."""
    card = model.describe()
    card.detail = hide_paths(card.detail)
    return card


@router.post(
    "/models/{model_id}/selftest",
    description=SelftestTask.__doc__,
    responses={200: {"model": SelftestAnswer, "content": ANSWERED_AS}},
)
async def selftest(
    model_id: str, body: SelftestRequest, request: Request, models: ModelsDep
) -> Response:
    """What the service promises, measured on this model."""
    return await respond(request, SelftestTask(model_id, body, models))


@router.get("/healthz")
async def healthz() -> Health:
    """The HTTP process answers."""
    return Health(status="ok", version=__version__)


@router.get("/readyz")
async def readyz(models: ModelsDep, drain: DrainDep, response: Response) -> Readiness:
    """Whether every required model answers now; status 503 where one does not, and at the end."""
    found = models.by_id.values()
    answers = all(model.is_ready or not model.settings.required for model in found)
    ready = answers and not drain.has_begun
    response.status_code = 200 if ready else 503
    return Readiness(ready=ready, models={model.id: model.status[0] for model in found})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Everything counted, in Prometheus' text format; needs the key metrics_key, if any."""
    if request.app.state.settings.metrics_port is not None:
        raise api_error("not_found", "Metrics are on a port of their own here: metrics_port.")
    return Response(await render_metrics(request), media_type=METRICS_TYPE)
