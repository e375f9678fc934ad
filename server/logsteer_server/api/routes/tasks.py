"""The endpoints that run a task, made from the table of endpoints and the tasks' classes."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Response
from fastapi.exceptions import RequestValidationError
from starlette.types import Receive, Scope, Send

from logsteer._endpoints import ENDPOINTS
from logsteer_server.api.dependencies import expand_model
from logsteer_server.api.encoding import SAFETENSORS
from logsteer_server.api.respond import respond
from logsteer_server.api.routing import KeyedRoute, LimitedRequest
from logsteer_server.interventions.interventions import Stores
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.observation.requests import find_record
from logsteer_server.tasks.activations import ActivationsTask
from logsteer_server.tasks.divergence import DivergenceTask
from logsteer_server.tasks.generation import GenerateTask, SteerTask
from logsteer_server.tasks.gradient import GradientTask
from logsteer_server.tasks.labels import LabelTask
from logsteer_server.tasks.lens import LensTask
from logsteer_server.tasks.logprob import DiagnosticsTask, LogprobTask
from logsteer_server.tasks.openai import ChatCompletionTask, CompletionTask
from logsteer_server.tasks.patch import PatchTask
from logsteer_server.tasks.perplexity import PerplexityTask
from logsteer_server.tasks.run import Task
from logsteer_server.tasks.sweep import SweepTask
from logsteer_server.tasks.training import TrainTask

MakeTask = Callable[[Any, ModelRegistry, Stores], Task]

TASKS: Mapping[str, MakeTask] = {
    "logprob": LogprobTask,
    "diagnostics": DiagnosticsTask,
    "divergence": DivergenceTask,
    "perplexity": PerplexityTask,
    "generate": GenerateTask,
    "steer": SteerTask,
    "sweep": SweepTask,
    "patch": PatchTask,
    "lens": LensTask,
    "gradient": GradientTask,
    "activations": ActivationsTask,
    "vectors.train": TrainTask,
    "v1.completions": CompletionTask,
    "v1.chat.completions": ChatCompletionTask,
    "v1.score": LabelTask,
}
"""Name of an endpoint -> the constructor of its task."""

OPENAI = "openai"
"""The tag of endpoints that answer in OpenAI's shape."""


class TaskRoute(KeyedRoute):
    """A route that reads its body, creates the task of TASKS for it, and runs that.

    FastAPI's further steps for a request would take longer than the work of a short one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._make_task = TASKS[self.name.replace("_", ".")]
        self._is_openai = OPENAI in self.tags

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose caller may send it."""
        if scope["method"] != self._method:  # which FastAPI refuses
            await super().answer(scope, receive, send)
            return
        request = LimitedRequest(scope, receive)
        if "json" not in request.headers.get("content-type", ""):
            raise RequestValidationError([{"type": "model_type", "loc": ("body",), "msg": ""}])
        body = await request.json()
        state = scope["app"].state
        stores = await state.namespaces.find(request.state.caller)
        variant = None
        if body.model is not None and body.model not in state.models.by_id:
            body, variant = await expand_model(request, body)
        if "name" in type(body).model_fields:
            find_record(scope).stored = body.name
        task = self._make_task(body, state.models, stores)
        task.variant = variant
        response = await respond(request, task, openai=self._is_openai)
        await response(scope, receive, send)


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

        async def stand_for(body: Any) -> Response:
            """Show FastAPI what the body is; `TaskRoute` answers."""
            raise NotImplementedError

        stand_for.__annotations__["body"] = endpoint.request
        router.add_api_route(
            endpoint.path,
            stand_for,
            methods=[endpoint.method],
            name=name.replace(".", "_"),
            tags=[endpoint.tag],
            description=(make_task.__doc__ or "").partition("\n\n")[0],
            responses={200: answer},
        )
    return router


router = make_router()
