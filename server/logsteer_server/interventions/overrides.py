"""A request's override as what engines carry out."""

from dataclasses import dataclass
from typing import Any

from logsteer.schemas import OverrideCard, ParameterOverride
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.parameters import Direction, Override
from logsteer_server.interventions.features import check_feature
from logsteer_server.stores.store import Store


@dataclass(frozen=True, slots=True)
class ResolvedOverride:
    """An override, and what an answer says of it: the fields of `UsedOverride`."""

    override: Override
    used: dict[str, Any]


def resolve_override(
    given: ParameterOverride | None, store: Store[OverrideCard], info: EngineInfo
) -> ResolvedOverride | None:
    """Return what a request's override means for a model; None for a request without one.

    Errors: APIError `unknown_override`, `unsupported_by_engine`.
    """
    if given is None:
        return None
    check_feature("override", info, "override")
    return _resolve(given.name, given.eta, store)


def resolve_direction(name: str | None, store: Store[OverrideCard]) -> ResolvedOverride | None:
    """Return the direction of a name, at eta 0; None for None. Errors: `unknown_override`."""
    return None if name is None else _resolve(name, 0.0, store)


def _resolve(name: str, eta: float, store: Store[OverrideCard]) -> ResolvedOverride:
    found = store.find(name)
    used = {"name": name, "sha256": found.sha256, "eta": eta}
    return ResolvedOverride(Override(Direction(str(found.path), found.sha256), eta), used)
