"""A model's engine as an ingress sees it: one queue, and replicas that come and go with Serve."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from logsteer_server.cluster.replica import RemoteReplica, ReplicaCalls, start_apart
from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines.handle import ReplicaReading
from logsteer_server.engines.replica import SupervisionLimits
from logsteer_server.engines.supervisor import LocalEngine
from logsteer_server.observation.readings import EngineStatus

log = logging.getLogger(__name__)

Watch = Callable[[Callable[[frozenset[str]], None]], Callable[[], None]]
"""Begins to tell a function which actors run, and returns what ends that."""
FIRST_CALL_RETRY_S = 1.0


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
        *,
        least: int,
        most: int,
    ) -> None:
        self._calls = calls
        self._watch = watch
        self._least = least
        self._actors: frozenset[str] = frozenset()
        self._unwatch: Callable[[], None] | None = None
        self._first: asyncio.Task[None] | None = None
        make = partial(RemoteReplica, calls=calls, take_free=self._settle)
        super().__init__(replace(spec, replicas=2 * most, devices="auto"), limits, make)
        self.places: list[RemoteReplica] = [
            place for place in self.replicas if isinstance(place, RemoteReplica)
        ]
        self._settle()

    def start(self) -> None:
        """Begin to take actors; call it from the event loop that will use the handle."""
        super().start()
        self._unwatch = self._watch(self._take_actors)
        self._first = start_apart(self._call_first())

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
        for actor in sorted(new):
            free = [place for place in self.places if place.actor is None]
            if not free:
                log.error(
                    "model %s has more actors than places: %s is not used", self.spec.id, actor
                )
                continue
            min(free, key=lambda place: place.state != "restarting").take(actor)
        self._settle()

    def _settle(self) -> None:
        """Say of places without an actor whether one is due, and of all whether to wait for it."""
        taken = [place for place in self.places if place.actor is not None and not place.retires]
        due = self._least - len(taken)
        for place in self.places:
            if place.actor is None:
                self._queue.places[place.number].is_open = False
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
        return [place for place in self.places if place.state != "unloaded"]

    @property
    def detail(self) -> str:
        """What the engine does, or what is wrong with it."""
        behind = [place for place in self._shown if place.state != "ready"]
        if not behind:
            return "answers"
        told = "; ".join(f"{place.number} is {place.state}: {place.detail}" for place in behind)
        return f"{len(self._shown) - len(behind)} of {len(self._shown)} replicas answer; {told}"

    def read(self) -> Sequence[ReplicaReading]:
        """Return what each replica that is there or due is at right now."""
        return [place.read() for place in self._shown]

    def observe(self) -> Sequence[EngineStatus]:
        """Return what is known of each replica; what waits here is told with the first one."""
        waiting = [self._queue.num_waiting, *[0] * len(self._shown)]
        return [place.observe(queued) for place, queued in zip(self._shown, waiting, strict=False)]

    def stop(self) -> None:
        """Take no more calls; those that still wait get an error."""
        super().stop()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self._first is not None:
            self._first.cancel()
