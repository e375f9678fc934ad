"""OpenAI's shape: `/v1/models` and `/tokenizer_info`."""

from typing import Any

from fastapi import APIRouter

from logsteer.schemas.openai import TokenizerInfo
from logsteer_server.api.dependencies import ModelsDep
from logsteer_server.api.routing import KeyedRoute

router = APIRouter(route_class=KeyedRoute, tags=["openai"])


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
