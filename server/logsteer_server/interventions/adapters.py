"""A request's adapter as what engines carry out."""

from dataclasses import dataclass
from typing import Any

from logsteer.schemas import AdapterCard
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.parameters import Adapter
from logsteer_server.interventions.features import check_feature
from logsteer_server.stores.store import Store


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """An adapter, and what an answer says of it: the fields of `UsedAdapter`."""

    adapter: Adapter
    used: dict[str, Any]


def resolve_adapter(
    name: str | None, store: Store[AdapterCard], info: EngineInfo
) -> ResolvedAdapter | None:
    """Return what a request's adapter means for a model; None for a request without one.

    Errors: APIError `unknown_adapter`, `unsupported_by_engine`.
    """
    if name is None:
        return None
    check_feature("adapter", info, "adapter")
    found = store.find(name)
    used = {"name": name, "sha256": found.sha256}
    return ResolvedAdapter(Adapter(str(found.path), found.sha256), used)
