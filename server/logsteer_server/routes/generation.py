"""`POST /steer` and `POST /generate`."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from logsteer.errors import APIError
from logsteer.schemas import (
    GenerateAnswer,
    GenerateRequest,
    PromptRequest,
    SteerAnswer,
    SteerRequest,
)
from logsteer_server.http.dependencies import (
    LimitedRoute,
    ResidentsDep,
    SettingsDep,
    StoresDep,
    answer,
    check_count,
    describe_answer,
    new_id,
    run_within,
    stream_events,
)
from logsteer_server.http.encoding import encode_event
from logsteer_server.interventions.changes import Stores
from logsteer_server.models.resident import Residents
from logsteer_server.settings import Settings
from logsteer_server.tasks.generations import Generation

router = APIRouter(route_class=LimitedRoute, tags=["generation"])


@router.post("/steer", responses=describe_answer(SteerAnswer))
async def steer(
    body: SteerRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    stores: StoresDep,
) -> Response:
    """Continuations of prompts under steering, with a receipt of what was done."""
    return await _answer("steer", body, request, residents, settings, stores)


@router.post("/generate", responses=describe_answer(GenerateAnswer))
async def generate(
    body: GenerateRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    stores: StoresDep,
) -> Response:
    """Continuations of prompts, with what the sampling policy saw where asked for."""
    return await _answer("generate", body, request, residents, settings, stores)


async def _answer(
    kind: str,
    body: PromptRequest,
    request: Request,
    residents: Residents,
    settings: Settings,
    stores: Stores,
) -> Response:
    given = body.prompts or body.prompt_ids or [body.messages]
    check_count("prompts x n", len(given) * body.n, settings.max_items)
    resident = residents.find(body.model)
    generation = await asyncio.to_thread(Generation.plan, new_id(kind), body, resident, stores)
    if body.stream:
        return stream_events(_stream(generation))
    work = _finish(generation)
    return answer(request, await run_within(request, settings.request_timeout_s, work))


async def _finish(generation: Generation) -> dict[str, Any]:
    async for _ in generation.run():
        pass
    return generation.report()


async def _stream(generation: Generation) -> AsyncIterator[bytes]:
    yield encode_event("start", generation.head())
    try:
        async for piece in generation.run():
            yield encode_event("piece", piece)
        yield encode_event("result", generation.report())
    except APIError as error:
        yield encode_event("error", error.problem(generation.id).model_dump())
