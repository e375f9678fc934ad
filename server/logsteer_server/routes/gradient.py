"""`POST /gradient`."""

from fastapi import APIRouter, Request, Response

from logsteer.schemas import GradientAnswer, GradientRequest
from logsteer_server.http.dependencies import (
    LimitedRoute,
    ModelsDep,
    StoresDep,
    describe_answer,
)
from logsteer_server.http.respond import respond
from logsteer_server.tasks.gradient import GradientTask

router = APIRouter(route_class=LimitedRoute, tags=["gradients"])


@router.post("/gradient", responses=describe_answer(GradientAnswer))
async def gradient(
    body: GradientRequest, request: Request, models: ModelsDep, stores: StoresDep
) -> Response:
    """Derivatives of every target's log-probability, by activations or along an override."""
    return await respond(request, GradientTask(body, models.find(body.model), stores))
