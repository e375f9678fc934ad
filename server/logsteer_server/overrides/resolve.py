"""A request's override as what engines carry out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from logsteer.errors import api_error
from logsteer.schemas import ParameterOverride
from logsteer_server.engines.base import (
    EngineInfo,
    GenerateJob,
    GradientJob,
    Override,
    ScoreJob,
    explain_missing,
)
from logsteer_server.overrides.store import StoredOverride

J = TypeVar("J", ScoreJob, GenerateJob, GradientJob)


class OverrideSource(Protocol):
    """Where directions are kept. Errors: APIError `unknown_override`."""

    def find(self, name: str) -> StoredOverride:
        """The direction of a name."""
        ...


@dataclass(frozen=True, slots=True)
class ResolvedOverride:
    """An override, and what an answer says of it: the fields of `UsedOverride`."""

    override: Override
    used: dict[str, Any]


def resolve_override(
    given: ParameterOverride | None, source: OverrideSource, info: EngineInfo
) -> ResolvedOverride | None:
    """What a request's override means for a model; None for a request without one.

    Errors: APIError `unknown_override`, `unsupported_by_engine`.
    """
    if given is None:
        return None
    check_feature("override", info, "override")
    return _resolve(given.name, given.eta, source)


def resolve_direction(name: str | None, source: OverrideSource) -> ResolvedOverride | None:
    """The direction of that name, at eta 0; None for None. Errors: APIError `unknown_override`."""
    return None if name is None else _resolve(name, 0.0, source)


def _resolve(name: str, eta: float, source: OverrideSource) -> ResolvedOverride:
    direction = source.find(name).direction
    used = {"name": name, "sha256": direction.sha256, "eta": eta}
    return ResolvedOverride(Override(direction, eta), used)


def check_feature(feature: str, info: EngineInfo, param: str | None) -> None:
    """Errors: APIError `unsupported_by_engine` where the model's engine lacks a feature."""
    if feature not in info.features:
        detail = explain_missing(feature, info.engine)
        raise api_error("unsupported_by_engine", f"{detail[0].upper()}{detail[1:]}.", param=param)


def override_jobs(jobs: Sequence[J], resolved: ResolvedOverride | None) -> list[J]:
    """The jobs under an override, or as they are under none."""
    if resolved is None:
        return list(jobs)
    return [replace(job, override=resolved.override) for job in jobs]
