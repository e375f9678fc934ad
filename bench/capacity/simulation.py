"""A fleet, event by event: the queue and routing of the service itself in front of engines whose
steps take as long as was measured.

What is real: calls and jobs, `FairQueue` with its turns, `Occupancy`, `Router` and `Quarantine`,
driven by the simulation's clock, and what is done with them as an engine ends (as in
`LocalEngine._lose`). What is simulated: arrivals, the time of the HTTP process, engines and their
prefix caches, and failures. On Ray, several ingresses have a queue each and do not know of one
another's work; an actor has a queue of its own behind them.
"""

import heapq
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.capacity.engine import EngineShape, SimulatedEngine, Step
from bench.capacity.report import Counts, Report
from bench.capacity.traffic import Request
from logsteer_server.contract.engine import EngineRoom
from logsteer_server.contract.jobs import Job
from logsteer_server.engines.queue import PREFIX_WORTH, FairQueue
from logsteer_server.engines.routing import BLOCK
from logsteer_server.engines.suspects import Quarantine
from logsteer_server.engines.turns import EngineCall

STEPS_AHEAD = 8
"""As vLLM's engine says of its room: prompts of so many steps wait in it."""


@dataclass(frozen=True, slots=True)
class FleetShape:
    """A fleet. Times in seconds.

    `http_request_s` and `http_text_s` are of an ingress' CPU, which has one core; `route_s` what it
    takes to choose a place for a text. Replicas fail by themselves every `fails_every_s` in the
    mean (0: never), each on its own, and are back after `restart_s` with an empty cache. With
    `changes_at` they are replaced from then on, one after another, each when it has done its work.
    """

    engine: EngineShape
    replicas: int = 1
    ingresses: int = 1
    on_ray: bool = False
    ahead_tokens: int | None = None
    """None: as vLLM's engine says."""
    http_request_s: float = 0.0
    http_text_s: float = 0.0
    route_s: float = 0.0
    prefix_worth: float = PREFIX_WORTH
    fails_every_s: float = 0.0
    restart_s: float = 10.0
    changes_at: float | None = None

    @property
    def room(self) -> EngineRoom:
        """What a replica takes in before it answers."""
        shape = self.engine
        ahead = min(STEPS_AHEAD * shape.step_tokens, shape.cache_tokens // 2)
        ahead = self.ahead_tokens if self.ahead_tokens is not None else ahead
        return EngineRoom(ahead, shape.cache_tokens)


@dataclass(eq=False, slots=True)
class _Call:
    """A request on its way: which of its texts have not been answered."""

    came_at: float
    call: EngineCall
    ingress: int
    missing: int
    shared_tokens: int
    begun_at: float | None = None


class _Place:
    """A replica: its engine, and on Ray the queue of its actor."""

    def __init__(self, number: int, shape: FleetShape) -> None:
        self.number = number
        self.engine = SimulatedEngine(shape.engine)
        self.queue = FairQueue(shape.room) if shape.on_ray else None
        self.has: dict[tuple[int, int], _Call] = {}
        """Ingress and id of a job that it has -> whose that is."""
        self.keys: dict[int, tuple[int, int]] = {}
        """On Ray: id of a job in the actor's queue -> its key."""
        self.step: Step | None = None
        self.life = 0
        """Counts its ends, so that a step of an earlier life is known."""
        self.is_up = True
        self.retires = False


class Fleet:
    """Run requests through a fleet; `seed` is that of the failures."""

    def __init__(self, shape: FleetShape, seed: int = 0, warm_up: float = 0.1) -> None:
        self.shape = shape
        self.now = 0.0
        self.counts = Counts()
        self._warm_up = warm_up
        self._rng = np.random.default_rng(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._serial = itertools.count()
        self._ids = 0
        self._places = [_Place(number, shape) for number in range(shape.replicas)]
        room = shape.room
        if shape.on_ray:  # as `RemoteReplica` has it: the actor lets generation in
            ahead = room.ahead_tokens + (room.cache_tokens or 0)
            room = replace(room, ahead_tokens=ahead, cache_tokens=None)
        self._queues = [
            FairQueue(
                room,
                Quarantine(clock=lambda: self.now),
                replicas=shape.replicas,
                prefix_worth=shape.prefix_worth,
            )
            for _ in range(shape.ingresses)
        ]
        self._seats = [self._seat() for _ in range(shape.ingresses)]
        self._free_at = [0.0] * shape.ingresses
        self._calls: dict[tuple[int, int], _Call] = {}
        """Ingress and a call's first id -> the call."""
        self._ended: list[tuple[float, float, float]] = []
        self._coming: Iterator[Request] = iter(())
        self._arrives = False

    def _seat(self) -> list[int]:
        """Return which replica each place of an ingress' queue is for: on Ray, every ingress has an
        order of its own, so that not all take the same one of equals.
        """
        count = self.shape.replicas
        return self._rng.permutation(count).tolist() if self.shape.on_ray else list(range(count))

    def _find_seats(self, place: "_Place") -> Iterator[tuple[FairQueue, int]]:
        """Yield each ingress' queue, and the number that a replica has in it."""
        for queue, seats in zip(self._queues, self._seats, strict=True):
            yield queue, seats.index(place.number)

    def run(self, requests: Iterator[Request]) -> Report:
        """Let all requests come, and go on until each is answered."""
        self._coming, self._arrives = requests, True
        self._arrive_next()
        if self.shape.fails_every_s:
            for place in self._places:
                self._fail_later(place)
        if self.shape.changes_at is not None:
            self._later(self.shape.changes_at, self._change, 0)
        while self._events and (self._arrives or self._calls):
            self.now, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
        return self._report()

    def _report(self) -> Report:
        ended = sorted(self._ended)[int(self._warm_up * len(self._ended)) :]
        came, begun, done = np.array(ended).T if ended else np.zeros((3, 0))
        return Report(
            self.shape.replicas, self.now, len(self._ended), len(self._calls), self.counts,
            begun - came, done - came,
        )  # fmt: skip

    def _later(self, at: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (at, next(self._serial), act, arguments))

    # Requests and their ingress

    def _arrive_next(self) -> None:
        request = next(self._coming, None)
        if request is None:
            self._arrives = False
        else:
            self._later(request.at, self._arrive, request)

    def _arrive(self, request: Request) -> None:
        """Have an ingress read a request: it does one thing after another."""
        shape, texts = self.shape, len(request.jobs)
        number = int(np.argmin(self._free_at))
        taken = shape.http_request_s + texts * (shape.http_text_s + shape.route_s)
        self.counts.http_s += taken
        self._free_at[number] = max(self.now, self._free_at[number]) + taken
        call = EngineCall(request.jobs, self._ids)
        self._ids += texts
        own = _Call(self.now, call, number, texts, request.shared_tokens)
        self._calls[number, call.first_id] = own
        self.counts.texts += texts
        self.counts.scored += int(request.jobs.num_targets.sum())
        self.counts.shareable += texts * (request.shared_tokens // BLOCK * BLOCK)
        self._later(self._free_at[number], self._put, own)
        self._arrive_next()

    def _put(self, own: _Call) -> None:
        self._queues[own.ingress].put(own.call)
        self._send(own.ingress)

    def _send(self, ingress: int) -> None:
        """Give replicas what the queue of an ingress has for them."""
        queue = self._queues[ingress]
        for number, jobs in queue.take().by_replica.items():
            place = self._places[self._seats[ingress][number]]
            for call, ids in jobs.by_call.items():
                own = self._calls[ingress, call.first_id]
                place.has |= {(ingress, job_id): own for job_id in ids}
            if place.queue is None:
                chosen = [(ingress, job_id) for job_id in jobs.order]
                place.engine.add(chosen, [place.has[key].call.job(key[1]) for key in chosen])
            else:
                for call, ids in jobs.by_call.items():
                    self._put_in_actor(place, ingress, call, ids)
            self._work(place)
        self.counts.most_waiting = max(self.counts.most_waiting, queue.num_waiting)

    def _put_in_actor(
        self, place: _Place, ingress: int, call: EngineCall, ids: Sequence[int]
    ) -> None:
        assert place.queue is not None
        inner = EngineCall(call.select(ids), self._ids)
        self._ids += len(ids)
        place.keys |= {inner.first_id + n: (ingress, job_id) for n, job_id in enumerate(ids)}
        place.queue.put(inner)

    # Engines

    def _work(self, place: _Place) -> None:
        """Begin a step, if the engine rests and has something to do."""
        if place.queue is not None:
            for number in place.queue.take().order:
                key = place.keys[number]
                place.engine.add([(number, key)], [self._find_job(place, key)])
        if place.step is not None or not place.is_up or not place.engine.busy:
            return
        step = place.step = place.engine.step()
        for key in map(self._outer, step.begun):
            own = place.has[key]
            if own.begun_at is None:
                own.begun_at = self.now
        self.counts.cached += step.cached_tokens
        self._later(self.now + step.seconds, self._end_step, place, place.life)

    def _find_job(self, place: _Place, key: tuple[int, int]) -> Job:
        return place.has[key].call.job(key[1])

    def _outer(self, key: Hashable) -> tuple[int, int]:
        """Return ingress and id of a job, by the key that an engine has it under."""
        assert isinstance(key, tuple)
        return key[1] if isinstance(key[1], tuple) else key

    def _end_step(self, place: _Place, life: int) -> None:
        """Answer what a step has ended, and let what waits come after it."""
        if life != place.life or place.step is None:
            return
        step, place.step = place.step, None
        self.counts.steps += 1
        self.counts.busy_s += step.seconds
        self.counts.read += step.read_tokens
        ended: dict[int, list[int]] = {}
        inner = []
        for key in step.ended:
            ingress, job_id = self._outer(key)
            ended.setdefault(ingress, []).append(job_id)
            if place.queue is not None:
                inner.append(key[0])  # type: ignore[index]
        if place.queue is not None:
            place.queue.finish(inner)
            for number in inner:
                del place.keys[number]
        for ingress, ids in ended.items():
            self._queues[ingress].finish(ids, self._seats[ingress].index(place.number))
            for job_id in ids:
                self._note_answer(ingress, place.has.pop((ingress, job_id)))
        for ingress in ended:
            self._send(ingress)
        self._work(place)
        if place.retires:
            self._replace_when_done(place)

    def _note_answer(self, ingress: int, own: _Call) -> None:
        own.missing -= 1
        if own.missing:
            return
        self._queues[ingress].drop(own.call)
        del self._calls[ingress, own.call.first_id]
        assert own.begun_at is not None
        self._ended.append((own.came_at, own.begun_at, self.now))

    # Failures and changes

    def _fail_later(self, place: _Place) -> None:
        at = self.now + self._rng.exponential(self.shape.fails_every_s)
        self._later(at, self.fail, place.number)

    def fail(self, number: int) -> None:
        """End a replica: others do what it had, and it comes back."""
        place = self._places[number]
        if place.is_up:
            self.counts.failures += 1
            self._end(place)
            self._later(self.now + self.shape.restart_s, self._open, place)
        if self.shape.fails_every_s:
            self._fail_later(place)

    def _end(self, place: _Place) -> None:
        lost, place.has = place.has, {}
        place.keys.clear()
        place.is_up = place.retires = False
        place.life += 1
        place.step = None
        place.engine.clear()
        if place.queue is not None:
            place.queue.clear()
        again: dict[_Call, list[int]] = {}
        for (_, job_id), own in lost.items():
            again.setdefault(own, []).append(job_id)
            self.counts.repeated_texts += 1
            self.counts.repeated += len(own.call.job(job_id).tokens)
        for queue, number in self._find_seats(place):
            queue.places[number].is_open = False
            queue.lose(number)
        for own, ids in again.items():
            self._queues[own.ingress].put_back(own.call, ids, last=False)
        self._send_all()

    def _send_all(self, ingresses: Collection[int] | None = None) -> None:
        for ingress in range(len(self._queues)) if ingresses is None else ingresses:
            self._send(ingress)

    def _open(self, place: _Place) -> None:
        place.is_up = True
        for queue, seat in self._find_seats(place):
            queue.places[seat].is_open = True
        self._send_all()

    def _change(self, number: int) -> None:
        """Take a replica away once it has done what it has; then the next one."""
        if number >= len(self._places):
            return
        place = self._places[number]
        if not place.is_up:  # it has just failed: it comes back new
            self._later(self.now + self.shape.restart_s, self._change, number + 1)
            return
        for queue, seat in self._find_seats(place):
            queue.places[seat].is_open = False
        place.retires = True
        self._replace_when_done(place)

    def _replace_when_done(self, place: _Place) -> None:
        if place.has or not place.retires:
            return
        self.counts.changes += 1
        self._end(place)
        back = self.now + self.shape.restart_s
        self._later(back, self._open, place)
        self._later(back, self._change, place.number + 1)
