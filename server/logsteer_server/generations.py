"""`/steer` and `/generate`: one request's continuations, and the documents that report them."""

from collections.abc import AsyncIterator
from typing import Any

from logsteer.schemas import GenerateRequest, PromptRequest, SteerRequest
from logsteer_server.overrides.resolve import (
    OverrideSource,
    ResolvedOverride,
    override_jobs,
    resolve_override,
)
from logsteer_server.residents import Resident, WorkClock
from logsteer_server.sampling.continuations import (
    Continuations,
    Diagnosis,
    plan_continuations,
    plan_diagnosis,
)
from logsteer_server.steering.jobs import steer_jobs, write_receipt
from logsteer_server.steering.resolve import ResolvedSteering, VectorSource, resolve_optional


class Generation:
    """The continuations of one request, from its jobs to its answer."""

    def __init__(
        self,
        answer_id: str,
        resident: Resident,
        continuations: Continuations,
        steering: ResolvedSteering | None,
        override: ResolvedOverride | None,
        diagnosed: GenerateRequest | None,
    ) -> None:
        self.id = answer_id
        self._resident = resident
        self._continuations = continuations
        self._steering = steering
        self._override = override
        self._diagnosed = diagnosed
        self._diagnosis: Diagnosis | None = None
        self._clock = WorkClock()

    @classmethod
    def plan(
        cls,
        answer_id: str,
        body: PromptRequest,
        resident: Resident,
        source: VectorSource,
        overrides: OverrideSource,
    ) -> "Generation":
        """The generation that a request asks for.

        Errors: those of `plan_continuations`, `resolve_steering`, `resolve_override` and
        `steer_jobs`.
        """
        codec, info = resident.require()
        wanted = body.steering if isinstance(body, SteerRequest | GenerateRequest) else None
        steering = resolve_optional(wanted, source, info)
        override = resolve_override(body.override, overrides, info)
        plain = override_jobs(plan_continuations(body, codec, info), override)
        baseline = plain if isinstance(body, SteerRequest) and body.baseline else []
        continuations = Continuations(steer_jobs(plain, steering), baseline, body.n)
        diagnosed = body if isinstance(body, GenerateRequest) and body.diagnostics else None
        return cls(answer_id, resident, continuations, steering, override, diagnosed)

    async def run(self) -> AsyncIterator[dict[str, Any]]:
        """Each piece as it comes, as a `SteerPiece`; then the diagnostics are made."""
        jobs = self._continuations.jobs
        async for index, piece in self._resident.generate(jobs, self._clock):
            yield self._continuations.add(index, piece)
        if self._diagnosed is not None:
            self._diagnosis = plan_diagnosis(self._diagnosed, self._continuations)
            scored = self._resident.score(self._diagnosis.jobs, self._clock, cache=False)
            async for index, output in scored:
                self._diagnosis.add(index, output)

    def head(self) -> dict[str, Any]:
        """What stands in front of an answer, and in the event that opens a stream."""
        provenance = self._resident.provenance().model_dump()
        return {"id": self.id, "model": self._resident.id, "provenance": provenance}

    def report(self) -> dict[str, Any]:
        """The whole answer, as `SteerAnswer` or `GenerateAnswer`."""
        codec, _ = self._resident.require()
        receipt = None
        if self._steering is not None:
            receipt = write_receipt(self._steering, self._continuations.steered_ends)
        return {
            **self.head(),
            "results": self._continuations.write(codec, self._diagnosis),
            "steering": receipt,
            "override": self._override.used if self._override else None,
            "usage": self._continuations.count_usage(self._diagnosis),
            "timing": self._clock.read(),
        }
