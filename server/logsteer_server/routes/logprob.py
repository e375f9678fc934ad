"""`POST /logprob`."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from logsteer.schemas import DiagnosticsRequest, LogprobAnswer, LogprobRequest
from logsteer_server.deps import (
    LimitedRoute,
    OverridesDep,
    ResidentsDep,
    SettingsDep,
    StoreDep,
    answer,
    check_count,
    describe_answer,
    new_id,
    run_within,
)
from logsteer_server.overrides.resolve import override_jobs, resolve_override
from logsteer_server.overrides.store import OverrideStore
from logsteer_server.residents import Resident, Residents, WorkClock, collect
from logsteer_server.scoring.sums import sum_usage
from logsteer_server.scoring.targets import assemble_targets, plan_targets
from logsteer_server.settings import Settings
from logsteer_server.steering.jobs import steer_jobs, write_receipt
from logsteer_server.steering.resolve import resolve_optional
from logsteer_server.steering.store import VectorStore

router = APIRouter(route_class=LimitedRoute, tags=["scoring"])


@router.post("/logprob", responses=describe_answer(LogprobAnswer))
async def logprob(
    body: LogprobRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    store: StoreDep,
    overrides: OverridesDep,
) -> Response:
    """Exact log-probability of every target given its context."""
    return await _answer(body, request, residents, settings, store, overrides)


@router.post("/diagnostics", responses=describe_answer(LogprobAnswer))
async def diagnostics(
    body: DiagnosticsRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    store: StoreDep,
    overrides: OverridesDep,
) -> Response:
    """Targets as a sampling policy saw them: every column of each token, and aggregates."""
    return await _answer(body, request, residents, settings, store, overrides)


async def _answer(
    body: LogprobRequest,
    request: Request,
    residents: Residents,
    settings: Settings,
    store: VectorStore,
    overrides: OverrideStore,
) -> Response:
    check_count("items", len(body.items), settings.max_items)
    targets = sum(len(item.targets or item.target_ids or ()) for item in body.items)
    check_count("items[].targets", targets, settings.max_targets)
    resident = residents.find(body.model)
    work = _score(body, resident, store, overrides)
    return answer(request, await run_within(request, settings.request_timeout_s, work))


async def _score(
    body: LogprobRequest, resident: Resident, store: VectorStore, overrides: OverrideStore
) -> dict[str, Any]:
    clock = WorkClock()
    codec, info = resident.require()
    steering = await asyncio.to_thread(resolve_optional, body.steering, store, info)
    override = await asyncio.to_thread(resolve_override, body.override, overrides, info)
    plan = await asyncio.to_thread(plan_targets, body, codec, info)
    jobs = override_jobs(steer_jobs(plan.jobs, steering), override)
    outputs = await collect(resident.score(jobs, clock, body.cache))
    results = await asyncio.to_thread(assemble_targets, plan, outputs, codec)
    return {
        "id": new_id("logprob"),
        "model": resident.id,
        "results": results,
        "steering": write_receipt(steering, outputs) if steering else None,
        "override": override.used if override else None,
        "usage": sum_usage(plan.jobs, outputs) | {"cached_results": clock.cached_results},
        "timing": clock.read(),
        "provenance": resident.provenance().model_dump(),
    }
