"""OpenAI's shape: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/tokenizer_info`."""

from typing import Any

from fastapi import APIRouter, Request, Response

from logsteer.schemas.openai import (
    ChatCompletionAnswer,
    ChatCompletionRequest,
    CompletionAnswer,
    CompletionRequest,
    TokenizerInfo,
)
from logsteer_server.http.dependencies import LimitedRoute, ModelsDep, StoresDep
from logsteer_server.http.respond import OPENAI_CHUNKS, respond
from logsteer_server.tasks.openai import ChatCompletionTask, CompletionTask

router = APIRouter(route_class=LimitedRoute, tags=["openai"])


@router.get("/v1/models")
async def list_models(models: ModelsDep) -> dict[str, Any]:
    """The models that answer now."""
    ready = [model for model in models.by_id.values() if model.is_ready]
    cards = [
        {
            "id": model.id,
            "object": "model",
            "created": 0,
            "owned_by": "logsteer",
            "max_model_len": model.require()[1].context_length,
        }
        for model in ready
    ]
    return {"object": "list", "data": cards}


@router.get("/tokenizer_info")
async def tokenizer_info(models: ModelsDep, model: str | None = None) -> TokenizerInfo:
    """Special tokens and chat template of a model."""
    codec, info = models.find(model).require()
    return TokenizerInfo(model_max_length=info.context_length, **codec.describe())


@router.post("/v1/completions", responses={200: {"model": CompletionAnswer}})
async def completions(
    body: CompletionRequest, request: Request, models: ModelsDep, stores: StoresDep
) -> Response:
    """Continuations of prompts; `echo` with `logprobs` scores the prompts as well."""
    task = CompletionTask(body, models.find(body.model), stores)
    return await respond(request, task, body.is_streamed, OPENAI_CHUNKS)


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletionAnswer}})
async def chat_completions(
    body: ChatCompletionRequest, request: Request, models: ModelsDep, stores: StoresDep
) -> Response:
    """The assistant's next turn in a conversation."""
    task = ChatCompletionTask(body, models.find(body.model), stores)
    return await respond(request, task, body.is_streamed, OPENAI_CHUNKS)
