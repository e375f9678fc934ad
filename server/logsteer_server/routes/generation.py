"""`POST /steer` and `POST /generate`."""

from fastapi import APIRouter, Request, Response

from logsteer.schemas import GenerateAnswer, GenerateRequest, SteerAnswer, SteerRequest
from logsteer_server.http.dependencies import (
    LimitedRoute,
    ModelsDep,
    StoresDep,
    describe_answer,
)
from logsteer_server.http.respond import respond
from logsteer_server.tasks.generation import GenerateTask, SteerTask

router = APIRouter(route_class=LimitedRoute, tags=["generation"])


@router.post("/steer", responses=describe_answer(SteerAnswer))
async def steer(
    body: SteerRequest, request: Request, models: ModelsDep, stores: StoresDep
) -> Response:
    """Continuations of prompts under steering, with a receipt of what was done."""
    task = SteerTask(body, models.find(body.model), stores)
    return await respond(request, task, body.stream)


@router.post("/generate", responses=describe_answer(GenerateAnswer))
async def generate(
    body: GenerateRequest, request: Request, models: ModelsDep, stores: StoresDep
) -> Response:
    """Continuations of prompts, with what the sampling policy saw where asked for."""
    task = GenerateTask(body, models.find(body.model), stores)
    return await respond(request, task, body.stream)
