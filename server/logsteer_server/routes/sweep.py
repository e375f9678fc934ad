"""`POST /sweep`."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from logsteer.schemas import SweepAnswer, SweepRequest
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
from logsteer_server.models.resident import Resident
from logsteer_server.tasks.sweeps import Sweep, plan_sweep

router = APIRouter(route_class=LimitedRoute, tags=["steering"])


@router.post("/sweep", responses=describe_answer(SweepAnswer))
async def sweep(
    body: SweepRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    stores: StoresDep,
) -> Response:
    """How targets and texts change with the scale of a steering object, and with its layers."""
    points = 1 + len(body.scales) * len(body.layers or [None])
    count = points * (len(body.items) + len(body.texts))
    check_count("scales x layers x (items and texts)", count, settings.max_items)
    resident = residents.find(body.model)
    codec, info = resident.require()
    plan = await asyncio.to_thread(plan_sweep, body, stores, codec, info)
    work = Sweep(resident, plan, settings.max_reference_bytes, settings.scratch_directory)
    document = await run_within(request, settings.request_timeout_s, _run(resident, work))
    return answer(request, document)


async def _run(resident: Resident, sweep: Sweep) -> dict[str, Any]:
    unsteered, *points = await sweep.run()
    used = sweep.changes.report([])
    return {
        "id": new_id("sweep"),
        "model": resident.id,
        "unsteered": unsteered,
        "points": points,
        "override": used["override"],
        "adapter": used["adapter"],
        "usage": sweep.count_usage(),
        "timing": sweep.clock.read(),
        "provenance": resident.provenance().model_dump(),
    }
