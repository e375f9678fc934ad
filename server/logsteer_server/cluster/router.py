"""Which actor of a model Ray Serve sends a call to: the one that the caller's queue has chosen."""

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from logsteer_server.cluster.actors import GoneActorError, note_actors


class ChosenActorRouter(RequestRouter):  # type: ignore[misc]
    """Sends each call to the actor that its first argument names; one that names None, to any.

    Serve has a call wait until it can be sent, and wait again if its actor dies before it has taken
    it. There is nobody else to send it to: it ends with `GoneActorError` once that actor is gone.
    """

    def initialize_state(self, model: str) -> None:
        """Take the model that it routes calls for, out of the deployment's options."""
        self._model = model
        self._there: frozenset[str] = frozenset()
        self._waiting: dict[str, set[asyncio.Task[RunningReplica]]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the actors that run now, and tell who watches them."""
        super().update_replicas(replicas)
        self._take(frozenset(own.replica_id.unique_id for own in replicas))
        note_actors(self._model, self._there)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Take it that an actor is gone before Serve's controller says so."""
        super().on_replica_actor_died(replica_id)
        self._take(self._there - {replica_id.unique_id})

    def _take(self, there: frozenset[str]) -> None:
        self._there = there
        for name in [name for name in self._waiting if name not in there]:
            for task in self._waiting[name]:
                task.cancel()

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Return where a call goes, which may take until its actor can be asked.

        Errors: GoneActorError.
        """
        choosing = super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        name = pending_request.args[0]
        if name is None:
            return await choosing
        if name not in self._there:
            choosing.close()
            raise GoneActorError(name)
        task = asyncio.ensure_future(choosing)
        self._waiting.setdefault(name, set()).add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if name in self._there:
                raise  # by the caller
            raise GoneActorError(name) from None
        finally:
            self._waiting[name].discard(task)
            if not self._waiting[name]:
                del self._waiting[name]

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
