"""A model's engine as an ingress sees it: one queue, and replicas that come and go with Serve."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from logsteer.schemas import ModelState
from logsteer_server.cluster.calls import ReplicaCalls, start_apart
from logsteer_server.cluster.loads import ActorLoad
from logsteer_server.cluster.remote_replica import RemoteReplica
from logsteer_server.contract.engine import EngineInfo, EngineSpec
from logsteer_server.engines.replica import SupervisionLimits
from logsteer_server.engines.supervisor import LocalEngine

log = logging.getLogger(__name__)

Watch = Callable[[Callable[[frozenset[str]], None]], Callable[[], None]]
"""Begins to tell a function which actors run, and returns what ends that."""
Explain = Callable[[], Awaitable[str | None]]
"""Says why an actor that is due has not come; None where nobody knows."""
IsUp = Callable[[], bool]
"""Says whether an actor of the model answers, whoever it is that it answers."""
FIRST_CALL_RETRY_S = 1.0
EXPLAIN_EVERY_S = 5.0


class RemoteEngine(LocalEngine):
    """The `EngineHandle` of a model whose replicas are actors of Ray Serve.

    Queue, turns, routing by shared prefix and load, and what becomes of jobs whose replica is lost
    are those of one machine. `least` and `most` are the bounds of the number of actors. There are
    twice as many places: actors that Serve takes away answer what they have while others come.
    """

    def __init__(
        self,
        spec: EngineSpec,
        limits: SupervisionLimits,
        calls: ReplicaCalls,
        watch: Watch,
        explain: Explain | None = None,
        is_up: IsUp = lambda: False,
        *,
        least: int,
        most: int,
    ) -> None:
        self._calls = calls
        self._watch = watch
        self._explain = explain
        self._is_up = is_up
        self._explaining: asyncio.Task[None] | None = None
        self._least = least
        self._actors: frozenset[str] = frozenset()
        self._unwatch: Callable[[], None] | None = None
        self._first: asyncio.Task[None] | None = None
        self._why_failed: str | None = None
        make = partial(RemoteReplica, calls=calls, take_free=self._settle)
        super().__init__(replace(spec, replicas=2 * most, devices="auto"), limits, make)
        self.places: list[RemoteReplica] = [
            place for place in self.replicas if isinstance(place, RemoteReplica)
        ]

    def start(self) -> None:
        """Begin to take actors; call it from the event loop that will use the handle."""
        super().start()
        self._settle()
        self._unwatch = self._watch(self._take_actors)
        self._first = start_apart(self._call_first())
        self._explaining = start_apart(self._explain_absence())

    async def _explain_absence(self) -> None:
        """Say of actors that are due why they have not come, until cancelled."""
        while self._explain is not None:
            await asyncio.sleep(EXPLAIN_EVERY_S)
            if not any(place.is_due for place in self.places):
                continue
            try:
                why = await self._explain()
            except Exception as error:  # Serve's or the network's: it is asked again
                log.warning("why model %s has no actor is not known: %r", self.spec.id, error)
                continue
            if why is not None:
                for place in [place for place in self.places if place.is_due]:
                    place.detail = why

    async def _call_first(self) -> None:
        """Make one call to any replica: Serve makes a router, which knows them, with the first."""
        while True:
            try:
                await self._calls.describe(None)
                return
            except Exception as error:  # whatever it is, Serve may have replaced the actor since
                log.warning("model %s does not answer: %r", self.spec.id, error)
                await asyncio.sleep(FIRST_CALL_RETRY_S)

    def _take_actors(self, actors: frozenset[str]) -> None:
        """Take it that these actors run, and no others."""
        if self._closing:
            return
        gone, new = self._actors - actors, actors - self._actors
        self._actors = actors
        for place in self.places:
            if place.actor in gone:
                self._queue.places[place.number].is_open = False
                place.retire()
        # Of actors with equally much to do the first place is taken, and ingresses hear late of one
        # another's jobs: in one order, all would send theirs to the same actor.
        for actor in random.sample(sorted(new), len(new)):
            free = [place for place in self.places if place.actor is None]
            if not free:
                log.error(
                    "model %s has more actors than places: %s is not used", self.spec.id, actor
                )
                continue
            min(free, key=lambda place: place.state != "restarting").take(actor)
        self._settle()

    def take_load(self, load: ActorLoad, caller: str) -> None:
        """Note what an actor has of other ingresses than the one of this name."""
        for place in self.places:
            if place.actor == load.actor:
                place.status = load.status
                others = [n for name, n in load.tokens.items() if name != caller and n > 0]
                self._queue.places[place.number].note_others(sum(others), len(others))
                self._send_jobs()

    def forget_loads(self) -> None:
        """Take it that no other ingress has sent anything."""
        for place in self.places:
            place.status = None
            self._queue.places[place.number].note_others(0, 0)

    def _settle(self) -> None:
        """Say of places without an actor whether one is due, and of all whether to wait for it."""
        if self._closing:
            return
        taken = [place for place in self.places if place.actor is not None and not place.retires]
        due = self._least - len(taken)
        for place in self.places:
            if place.actor is None:
                self._queue.places[place.number].is_open = False
                self._queue.places[place.number].note_others(0, 0)
                place.expect(is_due=due > 0)
                due -= 1
        if not any(place.state == "ready" for place in self.places):
            self.ready.clear()
            for place in taken:
                if place.state == "failed" and place.actor is not None:
                    place.take(place.actor)  # nothing is left that it differs from
        idle = {place.number for place in self.places if place.state in ("unloaded", "failed")}
        self._queue.gone = idle

    @property
    def _shown(self) -> list[RemoteReplica]:
        """The places with an actor, or that one is due at; where there are none, as many places."""
        shown = [place for place in self.places if place.state != "unloaded"]
        return shown or self.places[: self._least]

    def give_up(self, why: str) -> None:
        """Be an engine that failed: its actors could not be started."""
        self._why_failed = why
        for place in self.places[: self._least]:
            place.state, place.detail = "failed", why

    def check_ready(self) -> EngineInfo:
        """Return what the engine is. Errors: APIError, the one that a caller gets now."""
        if self._why_failed is not None:
            raise self._refuse_failed()
        return super().check_ready()

    @property
    def state(self) -> ModelState:
        """The state of the replica that is furthest, unless all were given up."""
        return super().state if self._why_failed is None else "failed"

    @property
    def detail(self) -> str:
        """What the engine does, or what is wrong with it."""
        if self._why_failed is not None:
            return self._why_failed
        return super().detail

    @property
    def answers_elsewhere(self) -> bool:
        """Whether an actor of the model has told of itself lately."""
        return self._is_up()

    def stop(self) -> None:
        """Take no more calls; those that still wait get an error."""
        super().stop()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        for task in (self._first, self._explaining):
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """Take no more calls, and forget the actors, which Serve ends."""
        await super().close()
        await self._calls.close()
