"""`POST /gradient`."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from logsteer.schemas import GradientAnswer, GradientRequest
from logsteer_server.contract.jobs import GradientJob
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
from logsteer_server.interventions.features import check_feature
from logsteer_server.interventions.overrides import resolve_direction
from logsteer_server.models.resident import Resident, WorkClock, collect
from logsteer_server.tasks.gradients import GradientPlan, assemble_gradients, plan_gradients
from logsteer_server.text.sums import sum_usage

router = APIRouter(route_class=LimitedRoute, tags=["gradients"])


class _Plan:
    """Everything that one request asks for, resolved."""

    def __init__(
        self, body: GradientRequest, resident: Resident, stores: Stores, max_numbers: int
    ) -> None:
        codec, info = resident.require()
        check_feature("gradient", info, None)
        self.changes: Changes = Changes.resolve(body, stores, info)
        along = resolve_direction(body.wrt.override, stores.overrides)
        direction = along.override.direction if along else None
        self.gradients: GradientPlan = plan_gradients(body, direction, codec, info, max_numbers)
        self.jobs: list[GradientJob] = self.changes.apply(self.gradients.jobs)
        self.along = along


@router.post("/gradient", responses=describe_answer(GradientAnswer))
async def gradient(
    body: GradientRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    stores: StoresDep,
) -> Response:
    """Derivatives of every target's log-probability, by activations or along an override."""
    check_count("items", len(body.items), settings.max_items)
    targets = sum(len(item.targets or item.target_ids or ()) for item in body.items)
    check_count("items[].targets", targets, settings.max_targets)
    resident = residents.find(body.model)
    limit = settings.max_gradient_numbers
    plan = await asyncio.to_thread(_Plan, body, resident, stores, limit)
    work = _differentiate(plan, resident)
    return answer(request, await run_within(request, settings.request_timeout_s, work))


async def _differentiate(plan: _Plan, resident: Resident) -> dict[str, Any]:
    clock = WorkClock()
    outputs = await collect(resident.differentiate(plan.jobs, clock))
    results = await asyncio.to_thread(assemble_gradients, plan.gradients, outputs)
    return {
        "id": new_id("gradient"),
        "model": resident.id,
        "results": results,
        **plan.changes.report(outputs),
        "along": plan.along.used if plan.along else None,
        "usage": sum_usage(plan.jobs, outputs),
        "timing": clock.read(),
        "provenance": resident.provenance().model_dump(),
    }
