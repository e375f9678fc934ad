"""Which actor of a model Ray Serve sends a call to: the one that the caller's queue has chosen."""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from logsteer_server.cluster.actors import note_actors


class ChosenActorRouter(RequestRouter):  # type: ignore[misc]
    """Sends each call to the actor that its first argument names; one that names None, to any."""

    def initialize_state(self, model: str) -> None:
        """Take the model that it routes calls for, out of the deployment's options."""
        self._model = model

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the actors that run now, and tell who watches them."""
        super().update_replicas(replicas)
        note_actors(self._model, frozenset(own.replica_id.unique_id for own in replicas))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Sequence[Sequence[Any]]:
        """Return where a call may go; Serve asks again, later and later, while there is nothing."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        name = pending_request.args[0]
        if name is None:
            return [candidate_replicas]
        return [[own for own in candidate_replicas if own.replica_id.unique_id == name]]
