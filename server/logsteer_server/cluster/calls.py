"""Calls of a model's actors, by those who ask them."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextvars import Context
from typing import Any, Protocol, TypeVar

from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import Job, JobFailure
from logsteer_server.contract.lane import Lane
from logsteer_server.contract.results import ResultPart

T = TypeVar("T")

BLAMELESS = "model_loading"
ENGINE_LOST = {"engine_restarting", BLAMELESS}
"""Codes with which a replica says that its engine ended with what it had; the second one where that
was not of what it had, or it had not begun it."""


def start_apart(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Start work in a task that is not part of the request in which it is started.

    Serve gives all calls of one request the same id, and its router takes two of them that wait at
    once for the same.
    """
    return asyncio.create_task(work, context=Context())


class ReplicaCalls(Protocol):
    """What is asked of a model's actors, each by its name."""

    async def describe(self, actor: str | None) -> EngineInfo:
        """Return what an actor's engine is; None: whichever answers first."""
        ...

    def run(
        self, actor: str, jobs: Sequence[Job], lane: Lane
    ) -> AsyncGenerator[ResultPart | JobFailure | None, None]:
        """Yield what comes of jobs in an actor, and its signs of life."""
        ...

    async def close(self) -> None:
        """Ask nothing more."""
        ...


class HandleCalls:
    """The `ReplicaCalls` of a deployment of `ModelReplica`, made by an ingress of a name."""

    def __init__(self, handle: Any, caller: str) -> None:
        # By gRPC: at the end of a call by Ray's own means an actor waits, all of its calls with it,
        # until its caller has confirmed what it got, and the caller's node may be gone. What goes
        # there is of classes that both sides import: pickle does, in a fifth of cloudpickle's time.
        self._handle = handle.options(
            _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        self._describe = self._handle.options(method_name="describe")
        self._run = self._handle.options(method_name="run", stream=True)
        self._caller = caller

    async def describe(self, actor: str | None) -> EngineInfo:
        """Return what an actor's engine is."""
        info: EngineInfo = await self._describe.remote(actor)
        return info

    async def run(
        self, actor: str, jobs: Sequence[Job], lane: Lane
    ) -> AsyncGenerator[ResultPart | JobFailure | None, None]:
        """Yield what comes of jobs in an actor; leaving early cancels them there."""
        response = self._run.remote(actor, jobs, lane, self._caller)
        ended = False
        try:
            async for part in response:
                yield part
            ended = True
        finally:
            if not ended:
                _cancel(response)

    async def close(self) -> None:
        """End what Serve keeps in this process for calls of the deployment."""
        await self._handle.shutdown_async()


def _cancel(response: Any) -> None:
    """Cancel a call, whether or not it has reached its actor."""
    response.cancel()
    # Serve's router on the caller's own loop may have sent it, and the response not have seen that:
    # then its cancel leaves the call to run, and to hold its tokens, for ever.
    sent = response._replica_result_future
    if sent.done() and not sent.cancelled() and sent.exception() is None:
        sent.result().cancel()
