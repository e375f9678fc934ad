"""What a request changes of the model that answers it: activations, parameters, or both."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from logsteer.schemas import AdapterCard, ModelChanges, OverrideCard, ParameterChanges
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import GenerateJob, GradientJob, ScoreJob
from logsteer_server.interventions.adapters import ResolvedAdapter, resolve_adapter
from logsteer_server.interventions.overrides import ResolvedOverride, resolve_override
from logsteer_server.interventions.receipt import ChangedOutput, Receipt, check_reach
from logsteer_server.interventions.steering import ResolvedSteering, VectorSource, resolve_steering
from logsteer_server.stores.store import Store

J = TypeVar("J", ScoreJob, GenerateJob, GradientJob)


@dataclass(frozen=True, slots=True)
class Stores:
    """Where the names in a request are looked up."""

    vectors: VectorSource
    overrides: Store[OverrideCard]
    adapters: Store[AdapterCard]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a request changes, resolved for a model."""

    steering: ResolvedSteering | None = None
    override: ResolvedOverride | None = None
    adapter: ResolvedAdapter | None = None

    @classmethod
    def resolve(cls, asked: ParameterChanges, stores: Stores, info: EngineInfo) -> "Changes":
        """What the fields of a request mean; it blocks.

        Errors: APIError `unknown_vector`, `invalid_vector`, `unknown_override`, `unknown_adapter`,
        `unsupported_by_engine`.
        """
        steering = asked.steering if isinstance(asked, ModelChanges) else None
        return cls(
            None if steering is None else resolve_steering(steering, stores.vectors, info),
            resolve_override(asked.override, stores.overrides, info),
            resolve_adapter(asked.adapter, stores.adapters, info),
        )

    @property
    def unsteered(self) -> "Changes":
        """The same without steering."""
        return replace(self, steering=None)

    def check_reach(self, jobs: Sequence[ScoreJob | GenerateJob | GradientJob]) -> None:
        """Errors: APIError `invalid_request` where no token of any job would be steered."""
        if self.steering is not None:
            check_reach(self.steering, jobs)

    def apply(self, jobs: Sequence[J]) -> list[J]:
        """The jobs on the changed model. Errors: as `check_reach`."""
        self.check_reach(jobs)
        return [self.change(job) for job in jobs]

    def change(self, job: J) -> J:
        """The job on the changed model."""
        if self == UNCHANGED:
            return job
        return replace(
            job,
            plan=self.steering.plan if self.steering else None,
            override=self.override.override if self.override else None,
            adapter=self.adapter.adapter if self.adapter else None,
        )

    def report(self, outputs: Sequence[ChangedOutput]) -> dict[str, Any]:
        """The fields of `UsedChanges`, for the (last) outputs of the changed jobs."""
        report = Report(self)
        for output in outputs:
            report.add(output)
        return report.write()


UNCHANGED = Changes()
"""The model as it is."""


class Report:
    """What an answer says of the changes that it was computed under."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._receipt = Receipt(changes.steering) if changes.steering else None

    def add(self, output: ChangedOutput) -> None:
        """Count the (last) output of a changed job in."""
        if self._receipt is not None:
            self._receipt.add(output)

    def write(self) -> dict[str, Any]:
        """The fields of `UsedChanges`. Errors: as `Receipt.write`."""
        override, adapter = self._changes.override, self._changes.adapter
        return {
            "steering": self._receipt.write() if self._receipt else None,
            "override": override.used if override else None,
            "adapter": adapter.used if adapter else None,
        }
