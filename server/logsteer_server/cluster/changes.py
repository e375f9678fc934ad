"""Changes of models as an ingress takes them: passed on to the coordinator, then followed."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from logsteer.errors import APIError, api_error
from logsteer_server.cluster.coordinator import Accepted, Change
from logsteer_server.cluster.following import WantedFollower
from logsteer_server.cluster.wanted import WantedModels
from logsteer_server.contract.jobs import JobFailure
from logsteer_server.models.changes import (
    RELOAD_RETRY_S,
    ModelChanges,
    refuse_configuration,
    wait_until,
)
from logsteer_server.models.model import ResidentModel
from logsteer_server.models.registry import ModelRegistry, Prove
from logsteer_server.models.transitions import ReloadReport
from logsteer_server.settings import ConfigurationError, Settings

log = logging.getLogger(__name__)

RETRY_S = 1.0
START_S = 30.0
"""For models that are up, on a machine that is busy as the service starts."""
POLL_S = 0.02


class ClusterChanges:
    """The `ChangesOfModels` of one ingress: what is asked here is done on all of them.

    `ingress` names this process to the coordinator, whose handle `coordinator` is; `reread` reads
    the configuration on this node. Errors of it: ConfigurationError.
    """

    def __init__(
        self,
        models: ModelRegistry,
        settings: Settings,
        *,
        reread: Callable[[], Settings],
        coordinator: Any,
        ingress: str,
    ) -> None:
        self._models = models
        self._reread = reread
        self._coordinator = coordinator
        self._ingress = ingress
        own = ModelChanges(models, settings, reread)
        self._follower = WantedFollower(models, own, self._note)
        self._revision = self._followed = 0
        self._lease_s = settings.ingress_lease_s
        self.is_away = False
        """Whether the coordinator does not answer."""
        self._watching: asyncio.Task[None] | None = None
        self._told: set[asyncio.Task[None]] = set()

    async def start(self, prove: Prove | None) -> None:
        """Start what the coordinator wants now, which may be other than at the service's start.

        Models that answer other ingresses answer here then, or have had the time for it: Serve has
        an ingress take requests as soon as it has started.
        """
        self._models.by_id.clear()
        self._models.start(prove)
        self._take(await self._watch_once())
        self._watching = asyncio.create_task(self._watch())
        await asyncio.gather(*(model.come_up(START_S) for model in self._models.by_id.values()))

    def close(self) -> None:
        """Follow no more: the process ends."""
        if self._watching is not None:
            self._watching.cancel()
        self._follower.close()

    # ------------------------------------------------------------------ what others asked for

    async def _watch(self) -> None:
        while True:
            self._take(await self._watch_once())

    async def _watch_once(self) -> WantedModels:
        """Return what is wanted, once that is new or some time has passed."""
        while True:
            try:
                # It answers within a part of that, as long as it runs.
                async with asyncio.timeout(self._lease_s):
                    wanted: WantedModels = await self._coordinator.watch.remote(
                        self._ingress, self._revision, self._followed
                    )
            except Exception as error:  # Ray's, or time: Serve starts the coordinator again
                log.warning("the coordinator does not answer: %r", error)
                self.is_away = True
                await asyncio.sleep(RETRY_S)
            else:
                self.is_away = False
                return wanted

    def _take(self, wanted: WantedModels) -> None:
        if wanted.revision != self._revision:
            self._follower.take(wanted)
            self._revision = wanted.revision

    def _note(self, revision: int) -> None:
        """Tell the coordinator that a revision is followed; the next question tells it again."""
        self._followed = max(self._followed, revision)
        task = asyncio.create_task(self._tell())
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    async def _tell(self) -> None:
        try:
            await self._coordinator.note.remote(self._ingress, self._followed)
        except Exception as error:  # as above
            log.warning("the coordinator does not answer: %r", error)

    # ------------------------------------------------------------------ what is asked here

    async def drain(self, model: ResidentModel, wait_s: float) -> None:
        """Refuse a model new requests everywhere, and wait until those at work are answered."""
        await self._change("drain", model, wait_s)

    async def unload(self, model: ResidentModel, wait_s: float) -> None:
        """Drain a model, and end its actors then: what Ray had set aside for them is free."""
        await self._change("unload", model, wait_s)

    async def load(self, model: ResidentModel, wait_s: float) -> None:
        """Have a model answer again: with new actors where it has none."""
        deadline = time.monotonic() + wait_s
        await self._change("load", model, wait_s)
        # Serve has its actors by now; this process may have yet to hear of them.
        await wait_until(
            lambda: self._models.find(model.id).status[0] in ("ready", "failed"),
            deadline - time.monotonic(),
        )

    async def _change(self, what: Change, model: ResidentModel, wait_s: float) -> None:
        await self._ask(self._coordinator.change.remote(what, model.id, wait_s))

    async def reload(self, wait_s: float = 0.0) -> ReloadReport:
        """Read the configuration on this node, and have all ingresses change to it.

        Errors: APIError `invalid_request` where it cannot be used; nothing is changed then.
        """
        try:
            new = await asyncio.to_thread(self._reread)
        except ConfigurationError as error:
            raise refuse_configuration(error) from error
        return (await self._ask(self._coordinator.reload.remote(new, wait_s))).report

    async def _ask(self, call: Any) -> Accepted:
        """Return what the coordinator says once this process follows it.

        Errors: APIError, its own or `engine_restarting` where it is lost.
        """
        try:
            found: Accepted | JobFailure = await call
        except Exception as error:  # Ray's
            log.warning("the coordinator was lost: %r", error)
            detail = (
                "The process that changes models was lost, and the change may have been cut off: "
                "ask for it again."
            )
            raise api_error("engine_restarting", detail, retry_after=RELOAD_RETRY_S) from error
        if isinstance(found, JobFailure):
            raise _refuse(found)
        while self._revision < found.revision:
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(0)
        return found


def _refuse(failure: JobFailure) -> APIError:
    retry_after = RELOAD_RETRY_S if failure.code == "overloaded" else None
    return api_error(failure.code, failure.detail, retry_after=retry_after)
