"""The endpoints that run a task, made from the table of endpoints and the tasks' classes."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from logsteer._endpoints import ENDPOINTS, Endpoint
from logsteer_server.api.access import TaskRoute
from logsteer_server.api.encoding import SAFETENSORS
from logsteer_server.api.respond import NAMED_EVENTS, OPENAI_CHUNKS, respond
from logsteer_server.interventions.interventions import Stores
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.observation.requests import find_record
from logsteer_server.tasks.activations import ActivationsTask
from logsteer_server.tasks.generation import GenerateTask, SteerTask
from logsteer_server.tasks.gradient import GradientTask
from logsteer_server.tasks.labels import LabelTask
from logsteer_server.tasks.logprob import DiagnosticsTask, LogprobTask
from logsteer_server.tasks.openai import ChatCompletionTask, CompletionTask
from logsteer_server.tasks.perplexity import PerplexityTask
from logsteer_server.tasks.run import Task
from logsteer_server.tasks.sweep import SweepTask
from logsteer_server.tasks.training import TrainTask

MakeTask = Callable[[Any, ModelRegistry, Stores], Task]

TASKS: Mapping[str, MakeTask] = {
    "logprob": LogprobTask,
    "diagnostics": DiagnosticsTask,
    "perplexity": PerplexityTask,
    "generate": GenerateTask,
    "steer": SteerTask,
    "sweep": SweepTask,
    "gradient": GradientTask,
    "activations": ActivationsTask,
    "vectors.train": TrainTask,
    "v1.completions": CompletionTask,
    "v1.chat.completions": ChatCompletionTask,
    "v1.score": LabelTask,
}
"""Name of an endpoint -> what makes its task from a request."""

OPENAI = "openai"
"""The tag of endpoints that answer in OpenAI's shape."""


def make_router() -> APIRouter:
    """Return a router with every endpoint of TASKS."""
    router = APIRouter(route_class=TaskRoute)
    for name, make_task in TASKS.items():
        endpoint = ENDPOINTS[name]
        others = [] if endpoint.tag == OPENAI else ["application/msgpack"]
        if getattr(make_task, "has_file", False):
            others.append(SAFETENSORS)
        if endpoint.request is not None and "stream" in endpoint.request.model_fields:
            others.append("text/event-stream")
        content: dict[str, Any] = {name: {} for name in others}
        answer: dict[str, Any] = {"model": endpoint.answer, "content": content}
        router.add_api_route(
            endpoint.path,
            _make_handler(endpoint, make_task),
            methods=[endpoint.method],
            name=name.replace(".", "_"),
            tags=[endpoint.tag],
            description=(make_task.__doc__ or "").partition("\n\n")[0],
            responses={200: answer},
        )
    return router


def _make_handler(endpoint: Endpoint, make_task: MakeTask) -> Callable[..., Awaitable[Response]]:
    """Return the function that FastAPI calls; its annotations say what is parsed."""
    shape = OPENAI_CHUNKS if endpoint.tag == OPENAI else NAMED_EVENTS
    has_name = endpoint.request is not None and "name" in endpoint.request.model_fields

    async def handle(body: BaseModel, request: Request) -> Response:
        state = request.app.state
        models: ModelRegistry = state.models
        stores: Stores = await state.namespaces.find(request.state.caller)
        if has_name:
            find_record(request.scope).stored = body.name  # type: ignore[attr-defined]
        return await respond(request, make_task(body, models, stores), shape)

    handle.__annotations__["body"] = endpoint.request
    return handle


router = make_router()
