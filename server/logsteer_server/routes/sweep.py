"""`POST /sweep`."""

from fastapi import APIRouter, Request, Response

from logsteer.schemas import SweepAnswer, SweepRequest
from logsteer_server.http.dependencies import (
    LimitedRoute,
    ModelsDep,
    StoresDep,
    describe_answer,
)
from logsteer_server.http.respond import respond
from logsteer_server.tasks.sweep import SweepTask

router = APIRouter(route_class=LimitedRoute, tags=["steering"])


@router.post("/sweep", responses=describe_answer(SweepAnswer))
async def sweep(
    body: SweepRequest, request: Request, models: ModelsDep, stores: StoresDep
) -> Response:
    """How targets and texts change with the scale of a steering object, and with its layers."""
    return await respond(request, SweepTask(body, models.find(body.model), stores))
