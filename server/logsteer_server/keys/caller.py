"""Who calls: what a key may do, and where the work of its request waits."""

from dataclasses import dataclass, field

from logsteer.errors import api_error
from logsteer.schemas import SCOPES, KeyScope
from logsteer_server.contract.lane import Lane
from logsteer_server.keys.limits import Allowance


@dataclass(frozen=True, slots=True)
class Requester:
    """Who sent a request, and where its work waits; one object a request.

    `namespace` is the name under which its vectors, overrides and adapters are its own; None where
    there are no keys, and all of them are everybody's.
    """

    scopes: frozenset[KeyScope] = frozenset(SCOPES)
    namespace: str | None = None
    lane: Lane = field(default_factory=Lane)
    allowance: Allowance = field(default_factory=Allowance)

    def require(self, scope: KeyScope) -> None:
        """Refuse what the key may not do. Errors: APIError `forbidden`, with the scope."""
        if scope not in self.scopes:
            has = ", ".join(sorted(self.scopes, key=SCOPES.index))
            detail = f"This takes a key with the scope {scope}; this one has {has}."
            raise api_error("forbidden", detail)
