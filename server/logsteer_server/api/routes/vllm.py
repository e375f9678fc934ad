"""What programs written for vLLM's server ask of it beside `/v1`, in the shapes of vLLM 0.32."""

import os
import platform
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from logsteer.schemas.vectors import ServerInfoQuery, WorldSizeQuery
from logsteer_server import __version__
from logsteer_server.api.dependencies import ChangesDep, DrainDep, ModelsDep, find_base
from logsteer_server.api.routes.operations import name_waiting
from logsteer_server.api.routing import KeyedRoute

VLLM_VERSION = "0.32.0"
"""The version of vLLM whose interface is answered."""

router = APIRouter(route_class=KeyedRoute, tags=["openai"])


@router.get("/health", response_class=Response)
@router.get("/ping", response_class=Response)
@router.post("/ping", response_class=Response)
async def health(models: ModelsDep, drain: DrainDep) -> Response:
    """Status 200 while every required model answers, else 503; no body."""
    return Response(status_code=503 if drain.has_begun or name_waiting(models) else 200)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of vLLM whose interface is answered, and the server's own."""
    return {"version": VLLM_VERSION, "logsteer": __version__}


@router.get("/server_info")
async def server_info(
    query: Annotated[ServerInfoQuery, Query()], request: Request, models: ModelsDep
) -> dict[str, Any]:
    """A model's configuration under vLLM's names, and what it runs on."""
    model = models.find(await find_base(request, query.model))
    _, info = model.require()
    config = {
        "model_config": {
            "model": info.model_path,
            "served_model_name": model.id,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "max_model_len": info.context_length,
            "enforce_eager": not model.settings.compile,
        },
        "parallel_config": {
            "tensor_parallel_size": info.tensor_parallel,
            "pipeline_parallel_size": info.pipeline_parallel,
            "data_parallel_size": model.settings.replicas,
            "world_size": info.tensor_parallel * info.pipeline_parallel,
        },
    }
    shown = {n: v for n, v in os.environ.items() if n.startswith("VLLM_") and "KEY" not in n}
    system = {"python_version": platform.python_version(), "os": platform.platform()}
    engine = {"engine": model.settings.engine, "engine_version": info.engine_version}
    return {
        "vllm_config": config if query.config_format == "json" else str(config),
        "vllm_env": shown,
        "system_env": system | engine | {"device": info.device},
    }


@router.get("/get_world_size")
async def get_world_size(
    query: Annotated[WorldSizeQuery, Query()], request: Request, models: ModelsDep
) -> dict[str, int]:
    """How many ranks a model has: of one replica, or of all."""
    own = models.find(await find_base(request, query.model)).settings
    size = own.tensor_parallel * own.pipeline_parallel
    return {"world_size": size * own.replicas if query.include_dp else size}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(models: ModelsDep, changes: ChangesDep) -> dict[str, bool]:
    """Requests from now on use no prefix and no result of earlier ones, of any model."""
    for model in list(models.by_id.values()):
        await changes.reset_prefix_cache(model)
    return {"success": True}
