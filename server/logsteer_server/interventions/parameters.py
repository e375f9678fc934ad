"""A request's override and adapter as what jobs carry; what an engine cannot do."""

from dataclasses import dataclass
from typing import Any

from logsteer.errors import api_error
from logsteer.schemas import AdapterCard, OverrideCard, ParameterOverride
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Feature
from logsteer_server.contract.parameters import Adapter, Direction, Override
from logsteer_server.stores.namespace import Namespace


def check_feature(feature: Feature, info: EngineInfo, param: str | None) -> None:
    """Make sure that the model's engine has a feature.

    Errors: APIError `unsupported_by_engine`, with what to do instead.
    """
    if detail := info.lacks.get(feature):
        raise api_error("unsupported_by_engine", f"{detail[0].upper()}{detail[1:]}.", param=param)


@dataclass(frozen=True, slots=True)
class ResolvedOverride:
    """An override, and what an answer says of it: the fields of `UsedOverride`."""

    override: Override
    used: dict[str, Any]


def resolve_override(
    given: ParameterOverride | None, store: Namespace[OverrideCard], info: EngineInfo
) -> ResolvedOverride | None:
    """Return what a request's override means for a model; None for a request without one.

    Errors: APIError `unknown_override`, `unsupported_by_engine`.
    """
    if given is None:
        return None
    check_feature("override", info, "override")
    return _resolve(given, store)


def resolve_direction(name: str | None, store: Namespace[OverrideCard]) -> ResolvedOverride | None:
    """Return the direction of a name, at eta 0; None for None. Errors: `unknown_override`."""
    return None if name is None else _resolve(ParameterOverride(name=name, eta=0.0), store)


def _resolve(given: ParameterOverride, store: Namespace[OverrideCard]) -> ResolvedOverride:
    _, found = store.look_up(given.name)
    used = {"sha256": found.sha256, **given.model_dump()}
    direction = Direction(found.source, found.sha256)
    return ResolvedOverride(Override(direction, given.eta, given.cast), used)


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """An adapter, and what an answer says of it: the fields of `UsedAdapter`."""

    adapter: Adapter
    used: dict[str, Any]


def resolve_adapter(
    name: str | None, store: Namespace[AdapterCard], info: EngineInfo
) -> ResolvedAdapter | None:
    """Return what a request's adapter means for a model; None for a request without one.

    Errors: APIError `unknown_adapter`, `unsupported_by_engine`.
    """
    if name is None:
        return None
    check_feature("adapter", info, "adapter")
    _, found = store.look_up(name)
    used = {"name": name, "sha256": found.sha256}
    return ResolvedAdapter(Adapter(found.source, found.sha256), used)
