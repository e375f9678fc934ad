"""`POST /logprob` and `POST /diagnostics`."""

from fastapi import APIRouter, Request, Response

from logsteer.schemas import DiagnosticsRequest, LogprobAnswer, LogprobRequest
from logsteer_server.http.dependencies import (
    LimitedRoute,
    ModelsDep,
    StoresDep,
    describe_answer,
)
from logsteer_server.http.respond import respond
from logsteer_server.tasks.logprob import LogprobTask

router = APIRouter(route_class=LimitedRoute, tags=["scoring"])


@router.post("/logprob", responses=describe_answer(LogprobAnswer))
async def logprob(
    body: LogprobRequest, request: Request, models: ModelsDep, stores: StoresDep
) -> Response:
    """Exact log-probability of every target given its context."""
    return await respond(request, LogprobTask(body, models.find(body.model), stores))


@router.post("/diagnostics", responses=describe_answer(LogprobAnswer))
async def diagnostics(
    body: DiagnosticsRequest, request: Request, models: ModelsDep, stores: StoresDep
) -> Response:
    """Targets as a sampling policy saw them: every column of each token, and aggregates."""
    return await respond(request, LogprobTask(body, models.find(body.model), stores))
