"""`POST /logprob`."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from logsteer.schemas import DiagnosticsRequest, LogprobAnswer, LogprobRequest
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
)
from logsteer_server.interventions.changes import Changes, Stores
from logsteer_server.models.resident import Resident, Residents, WorkClock, collect
from logsteer_server.settings import Settings
from logsteer_server.tasks.targets import assemble_targets, plan_targets
from logsteer_server.text.sums import sum_usage

router = APIRouter(route_class=LimitedRoute, tags=["scoring"])


@router.post("/logprob", responses=describe_answer(LogprobAnswer))
async def logprob(
    body: LogprobRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    stores: StoresDep,
) -> Response:
    """Exact log-probability of every target given its context."""
    return await _answer(body, request, residents, settings, stores)


@router.post("/diagnostics", responses=describe_answer(LogprobAnswer))
async def diagnostics(
    body: DiagnosticsRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    stores: StoresDep,
) -> Response:
    """Targets as a sampling policy saw them: every column of each token, and aggregates."""
    return await _answer(body, request, residents, settings, stores)


async def _answer(
    body: LogprobRequest,
    request: Request,
    residents: Residents,
    settings: Settings,
    stores: Stores,
) -> Response:
    check_count("items", len(body.items), settings.max_items)
    targets = sum(len(item.targets or item.target_ids or ()) for item in body.items)
    check_count("items[].targets", targets, settings.max_targets)
    resident = residents.find(body.model)
    work = _score(body, resident, stores)
    return answer(request, await run_within(request, settings.request_timeout_s, work))


async def _score(body: LogprobRequest, resident: Resident, stores: Stores) -> dict[str, Any]:
    clock = WorkClock()
    codec, info = resident.require()
    changes = await asyncio.to_thread(Changes.resolve, body, stores, info)
    plan = await asyncio.to_thread(plan_targets, body, codec, info)
    outputs = await collect(resident.score(changes.apply(plan.jobs), clock, body.cache))
    results = await asyncio.to_thread(assemble_targets, plan, outputs, codec)
    return {
        "id": new_id("logprob"),
        "model": resident.id,
        "results": results,
        **changes.report(outputs),
        "usage": sum_usage(plan.jobs, outputs) | {"cached_results": clock.cached_results},
        "timing": clock.read(),
        "provenance": resident.provenance(precision=body.precision).model_dump(),
    }
