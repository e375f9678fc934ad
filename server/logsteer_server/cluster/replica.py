"""The actor of one replica of a model, with the engine below it."""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from ray import serve

from logsteer.errors import APIError
from logsteer_server.cluster.absence import GivenUpError
from logsteer_server.cluster.beats import beat_along
from logsteer_server.cluster.calls import (
    BLAMELESS,
    ENGINE_LOST,
    start_apart,
)
from logsteer_server.cluster.ledger import LedgerCalls
from logsteer_server.cluster.loads import EVERY_S, ActorLoad, post_loads
from logsteer_server.cluster.metrics import AgentExporter
from logsteer_server.cluster.ranks import Followers
from logsteer_server.contract.batches import count_expected
from logsteer_server.contract.engine import EngineInfo, EngineSpec
from logsteer_server.contract.jobs import Job, JobFailure
from logsteer_server.contract.lane import Lane
from logsteer_server.contract.results import ResultPart, find_last
from logsteer_server.engines.exchanged_files import refuse_absent
from logsteer_server.engines.replica import SupervisionLimits
from logsteer_server.engines.supervisor import LocalEngine
from logsteer_server.observation.logs import configure_logs
from logsteer_server.observation.metrics import LiveCollector, Metrics
from logsteer_server.observation.readings import EngineStatus
from logsteer_server.settings import SharedStore
from logsteer_server.stores.job_contents import JobContents, MachineContents

log = logging.getLogger(__name__)

POLL_S = 0.05
TOLD_S = 1.0
"""For so long a replica whose engine is lost is there to tell those who wait for it."""


class ModelReplica:
    """The class of a model's deployment: an actor that runs one engine, in a process below it.

    It is there once the model is loaded. With its ranks on several nodes it is on the first, and
    ends as soon as one of them is lost. The first argument of each call is the name that the router
    reads. Errors of making it: RuntimeError where the model cannot be loaded, GivenUpError where it
    was tried too often.
    """

    async def __init__(  # type: ignore[misc]
        self,
        spec: EngineSpec,
        limits: SupervisionLimits,
        ledger: Any,
        store: SharedStore | None = None,
        nodes: int = 1,
        load_every_s: float = EVERY_S,
    ) -> None:
        configure_logs(limits.style)
        self.beat_s = limits.watch.interval_s
        own = serve.get_replica_context()
        self._application, self._actor = own.app_name, own.replica_id.unique_id
        self._tokens: Counter[str] = Counter()
        """Tokens expected of unfinished jobs, by who sent them."""
        self._others: Followers | None = None
        self._is_blameless = False
        if nodes > 1:
            limits = replace(limits, max_restarts=0)
            self._others = Followers(limits, store)
            spec = await self._others.start(spec)
        contents = None
        if store is not None:
            others = self._others.contents if self._others else ()
            contents = JobContents(MachineContents(store), *others)
        self._engine = LocalEngine(spec, limits, contents=contents)
        self._engine.start()
        while self._engine.state not in ("ready", "failed"):
            await asyncio.sleep(POLL_S)
            if self._others is not None and (loss := self._others.find_loss()):
                raise GivenUpError(loss.detail) if loss.may_pass else RuntimeError(loss.detail)
        await self.check_health()
        collector = LiveCollector(Metrics())
        exporter = AgentExporter(
            self._actor, lambda: collector.collect_engines(spec.id, [self._observe()])
        )
        self._beside = [
            start_apart(post_loads(self._measure, LedgerCalls(ledger).post, load_every_s)),
            start_apart(exporter.run()),
        ]
        if self._others is not None:
            await self._others.check_same(self._engine.check_ready())
            self._beside.append(start_apart(self._end_together(self._others)))

    async def _end_together(self, others: Followers) -> None:
        """End this process, and so all of the replica, once a part of it is lost.

        Before that, whoever waits is told that the engine is lost.
        """
        while self._engine.state != "failed":
            await asyncio.sleep(POLL_S)
            if loss := others.find_loss():
                self._is_blameless = not loss.accuses
                self._engine.replicas[0].refuse(loss.detail)
        log.error("replica is lost: %s", self._engine.detail)
        await asyncio.sleep(TOLD_S)
        os._exit(1)

    def _observe(self) -> EngineStatus:
        """Return what the engine's process is at, under this actor's name."""
        (status,) = self._engine.observe()
        return replace(status, replica=self._actor)

    def _measure(self) -> ActorLoad:
        return ActorLoad(self._application, self._actor, dict(self._tokens), self._observe())

    async def check_health(self) -> None:
        """Have Serve end and replace this actor if its engine is not started any more.

        One that hangs is killed and started anew by `LocalEngine`; an actor whose event loop hangs
        does not answer this at all. Errors: RuntimeError, GivenUpError.
        """
        if self._engine.given_up:
            raise GivenUpError(self._engine.detail)
        if self._engine.state == "failed":
            raise RuntimeError(self._engine.detail)

    async def describe(self, _actor: str | None) -> EngineInfo:
        """Return what the engine is, as soon as it answers."""
        await self._engine.ready.wait()
        return self._engine.check_ready()

    @beat_along
    async def run(
        self, _actor: str, jobs: Sequence[Job], lane: Lane, caller: str
    ) -> AsyncGenerator[ResultPart | JobFailure, None]:
        """Yield the results of jobs; a failure ends them. Their times are seconds from now.

        None comes in between where nothing else does, as a sign of life.
        """
        began = time.monotonic()
        if self._engine.state == "failed":  # Serve is about to replace this actor
            yield JobFailure(BLAMELESS, self._engine.detail)
            return
        if refusal := await refuse_absent(jobs):
            yield refusal
            return
        expected = dict(enumerate(count_expected(jobs)))
        self._tokens[caller] += sum(expected.values())
        try:
            async for part in self._engine.run(jobs, lane):
                for number in find_last(part):
                    self._tokens[caller] -= expected.pop(number, 0)
                yield part._replace(taken_at=part.taken_at - began)
        except APIError as error:
            is_lost = self._is_blameless and error.code in ENGINE_LOST
            yield JobFailure(BLAMELESS if is_lost else error.code, error.detail)
        finally:
            self._tokens[caller] -= sum(expected.values())
            if not self._tokens[caller]:
                del self._tokens[caller]
