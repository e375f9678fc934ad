"""`/steer` and `/generate`: one request's continuations, and the documents that report them."""

from collections.abc import AsyncIterator
from typing import Any

from logsteer.schemas import GenerateRequest, PromptRequest, SteerRequest
from logsteer_server.interventions.changes import Changes, Stores
from logsteer_server.models.resident import Resident, WorkClock
from logsteer_server.tasks.continuations import (
    Continuations,
    Diagnosis,
    plan_continuations,
    plan_diagnosis,
)


class Generation:
    """The continuations of one request, from its jobs to its answer."""

    def __init__(
        self,
        answer_id: str,
        resident: Resident,
        continuations: Continuations,
        changes: Changes,
        diagnosed: GenerateRequest | None,
    ) -> None:
        self.id = answer_id
        self._resident = resident
        self._continuations = continuations
        self._changes = changes
        self._diagnosed = diagnosed
        self._diagnosis: Diagnosis | None = None
        self._clock = WorkClock()

    @classmethod
    def plan(
        cls, answer_id: str, body: PromptRequest, resident: Resident, stores: Stores
    ) -> "Generation":
        """The generation that a request asks for.

        Errors: those of `plan_continuations`, `Changes.resolve` and `Changes.apply`.
        """
        codec, info = resident.require()
        changes = Changes.resolve(body, stores, info)
        plain = plan_continuations(body, codec, info)
        has_baseline = isinstance(body, SteerRequest) and body.baseline
        baseline = changes.unsteered.apply(plain) if has_baseline else []
        continuations = Continuations(changes.apply(plain), baseline, body.n)
        diagnosed = body if isinstance(body, GenerateRequest) and body.diagnostics else None
        return cls(answer_id, resident, continuations, changes, diagnosed)

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
        precision = self._diagnosed.precision if self._diagnosed else "float32"
        provenance = self._resident.provenance(precision=precision).model_dump()
        return {"id": self.id, "model": self._resident.id, "provenance": provenance}

    def report(self) -> dict[str, Any]:
        """The whole answer, as `SteerAnswer` or `GenerateAnswer`."""
        codec, _ = self._resident.require()
        return {
            **self.head(),
            "results": self._continuations.write(codec, self._diagnosis),
            **self._changes.report(self._continuations.steered_ends),
            "usage": self._continuations.count_usage(self._diagnosis),
            "timing": self._clock.read(),
        }
