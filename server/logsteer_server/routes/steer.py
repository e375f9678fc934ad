"""`POST /steer`."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from logsteer.errors import APIError
from logsteer.schemas import SteerAnswer, SteerRequest
from logsteer_server.deps import (
    LimitedRoute,
    ResidentsDep,
    SettingsDep,
    StoreDep,
    answer,
    check_count,
    describe_answer,
    new_id,
    run_within,
    stream_events,
)
from logsteer_server.encoding import encode_event
from logsteer_server.residents import Resident, WorkClock
from logsteer_server.sampling.continuations import Continuations, plan_continuations
from logsteer_server.steering.jobs import steer_jobs, write_receipt
from logsteer_server.steering.resolve import ResolvedSteering, VectorSource, resolve_steering

router = APIRouter(route_class=LimitedRoute, tags=["steering"])


class Run:
    """The generation of one request, and the documents that report it."""

    def __init__(
        self, resident: Resident, steering: ResolvedSteering, continuations: Continuations
    ) -> None:
        self.id = new_id("steer")
        self._resident = resident
        self._steering = steering
        self._continuations = continuations
        self._clock = WorkClock()

    async def generate(self) -> AsyncIterator[dict[str, Any]]:
        """Each piece as it comes, as a `SteerPiece`."""
        jobs = self._continuations.jobs
        async for index, piece in self._resident.generate(jobs, self._clock):
            yield self._continuations.add(index, piece)

    def head(self) -> dict[str, Any]:
        """What stands in front of an answer, and in the event that opens a stream."""
        provenance = self._resident.provenance().model_dump()
        return {"id": self.id, "model": self._resident.id, "provenance": provenance}

    def report(self) -> dict[str, Any]:
        """The whole answer, as `SteerAnswer`."""
        codec, _ = self._resident.require()
        return {
            **self.head(),
            "results": self._continuations.write(codec),
            "steering": write_receipt(self._steering, self._continuations.steered_ends),
            "usage": self._continuations.count_usage(),
            "timing": self._clock.read(),
        }


@router.post("/steer", responses=describe_answer(SteerAnswer))
async def steer(
    body: SteerRequest,
    request: Request,
    residents: ResidentsDep,
    settings: SettingsDep,
    store: StoreDep,
) -> Response:
    """Continuations of prompts under steering, with a receipt of what was done."""
    given = body.prompts or body.prompt_ids or [body.messages]
    count = len(given) * body.n * (1 + body.baseline)
    check_count("prompts x n (x 2 with baseline)", count, settings.max_items)
    run = await asyncio.to_thread(_plan, body, residents.find(body.model), store)
    if body.stream:
        return stream_events(_stream(run))
    return answer(request, await run_within(request, settings.request_timeout_s, _finish(run)))


def _plan(body: SteerRequest, resident: Resident, store: VectorSource) -> Run:
    codec, info = resident.require()
    steering = resolve_steering(body.steering, store, info)
    plain = plan_continuations(body, codec, info)
    return Run(resident, steering, Continuations(body, steer_jobs(plain, steering), plain))


async def _finish(run: Run) -> dict[str, Any]:
    async for _ in run.generate():
        pass
    return run.report()


async def _stream(run: Run) -> AsyncIterator[bytes]:
    yield encode_event("start", run.head())
    try:
        async for piece in run.generate():
            yield encode_event("piece", piece)
        yield encode_event("result", run.report())
    except APIError as error:
        yield encode_event("error", error.problem(run.id).model_dump())
