"""A queue of calls in front of an engine: nobody's long call keeps those of others waiting."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from logsteer_server.contract.engine import EngineLoad, EngineRoom
from logsteer_server.engines.occupancy import Occupancy
from logsteer_server.engines.routing import BLOCK, Router, hash_blocks
from logsteer_server.engines.suspects import Quarantine
from logsteer_server.engines.turns import EngineCall, TurnQueue

Verdict = Literal["pass", "hold", "refuse"]
"""What becomes of a job that is not sent: others may go first; nobody goes before; it is poison."""
PREFIX_WORTH = 4.0


@dataclass(slots=True)
class ReplicaJobs:
    """The ids of the jobs that one replica is sent now, in order and by their calls."""

    order: list[int] = field(default_factory=list)
    by_call: dict[EngineCall, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class NextJobs:
    """The jobs that each replica is sent now, by its number, and those that no engine is given.

    With `wait_s`, jobs are held back that may be sent after so many seconds.
    """

    by_replica: dict[int, ReplicaJobs] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    wait_s: float | None = None

    def add(self, replica: int, call: EngineCall, ids: Sequence[int]) -> None:
        """Append jobs of a call."""
        own = self.by_replica.setdefault(replica, ReplicaJobs())
        own.order += ids
        own.by_call.setdefault(call, []).extend(ids)

    def wait(self, seconds: float) -> None:
        """Have the queue looked at again after so many seconds, or earlier."""
        self.wait_s = seconds if self.wait_s is None else min(self.wait_s, seconds)

    @property
    def order(self) -> list[int]:
        """The ids of all jobs that are sent, replica by replica."""
        return [job_id for own in self.by_replica.values() for job_id in own.order]


class FairQueue:
    """Give an engine's replicas the next jobs, from the calls that wait in turn, as far as there is
    room.

    A job goes where `Router` says, of the replicas that have room for it (`Occupancy`). While
    generation waits for room, jobs that are only read go past it:

        cache of 1000 tokens          held  to come
        40 prompts of 20 tokens wait     0      540   27 are sent: 27 * (20 + 16) <= 1000
        each has generated 15          945        0   none is sent: 945 + 20 + 28 * 16 > 1000
        22 have ended                  175      400   20 are sent: 175 + 20 * 20 + 25 * 16 <= 1000

    Those that were in an engine as it died are let in as `quarantine` says; where there are several
    replicas, only while two are open or the others are `gone`: never into the last one that answers
    while another may come back.
    """

    def __init__(
        self,
        room: EngineRoom | None = None,
        quarantine: Quarantine | None = None,
        replicas: int = 1,
        prefix_worth: float = PREFIX_WORTH,
    ) -> None:
        self.places = [Occupancy(number, room) for number in range(replicas)]
        self.gone: set[int] = set()
        """Numbers of replicas that are not started again."""
        self._router = Router(replicas, prefix_worth)
        self._quarantine = quarantine or Quarantine()
        self._waiting = TurnQueue()

    @property
    def num_waiting(self) -> int:
        """Jobs that no replica has been sent."""
        return self._waiting.num_jobs

    def put(self, call: EngineCall) -> None:
        """Append a call to those that take turns."""
        if call.unsent:
            self._waiting.put(call)

    def put_back(self, call: EngineCall, ids: Sequence[int], *, last: bool) -> None:
        """Have jobs of a call that a replica had wait again: as its next, or as its `last`."""
        is_waiting = bool(call.unsent)
        call.put_back(ids, last=last)
        if not is_waiting:
            self._waiting.put(call)

    def take(self) -> NextJobs:
        """Return the jobs that replicas have room for now, and count them as theirs."""
        taken = NextJobs()
        passed: set[EngineCall] = set()
        reading = False
        while (call := self._waiting.peek(reading)) is not None and call not in passed:
            due = [place for place in self.places if place.is_due(call)]
            if not due:
                break
            fit = [place for place in due if place.may_generate(call)]
            if not fit:
                reading = True
                continue
            if self._quarantine.is_quiet:
                if len(self.places) == 1 and len(self._waiting) == 1 and call.only_reads:
                    self._take_run(call, taken)
                else:
                    self._take_one(call, fit, taken)
                continue
            deaths = self._quarantine.count_deaths(call.job(call.unsent[0]))
            found = self._judge(deaths, fit, taken)
            if found == "hold":
                return taken
            if found == "pass":
                self._waiting.pass_by(call)
                passed.add(call)
                continue
            passed.clear()
            if found == "refuse":
                taken.refused.append(self._waiting.pop(call))
            else:
                self._take_one(call, found, taken, is_suspect=deaths > 0)
        return taken

    def _judge(
        self, deaths: int, fit: Sequence[Occupancy], taken: NextJobs
    ) -> Verdict | list[Occupancy]:
        """Return where a job whose turn it is may go while there are suspects, or what becomes of
        it; so many engines have died with it.
        """
        quarantine = self._quarantine
        if deaths > 1:
            return "refuse"
        if not deaths:
            free = [place for place in fit if not quarantine.keeps_out(place.number)]
            if not free:
                taken.wait(min(quarantine.measure_wait(place.number) for place in fit))
            return free or "hold"
        if quarantine.is_trying or not self._may_try():
            return "pass"
        place = min(fit, key=lambda place: (not quarantine.keeps_out(place.number), len(place)))
        if not len(place) or quarantine.is_settled(place.number):
            return [place]
        taken.wait(quarantine.measure_wait(place.number))
        if len(self.places) == 1:
            return "hold"
        quarantine.reserve(place.number)
        return "pass"

    def _may_try(self) -> bool:
        """Return whether a replica may be lost to a suspect."""
        is_open = sum(place.is_open for place in self.places)
        return is_open > 1 or is_open + len(self.gone) == len(self.places)

    def _take_one(
        self,
        call: EngineCall,
        fit: Sequence[Occupancy],
        taken: NextJobs,
        *,
        is_suspect: bool = False,
    ) -> None:
        """Take a call's next job for one of the replicas that have room for it."""
        generates, place = call.generates, fit[0]
        blocks: Sequence[int] = ()
        job_id = call.unsent[0]
        if len(self.places) > 1:
            if call.size(job_id) >= BLOCK:
                blocks = hash_blocks(call.job(job_id))
            place = self._router.choose(blocks, fit)
            self._router.note(blocks, place)
        size = place.measure(call)
        self._waiting.pop(call)
        if is_suspect:
            self._quarantine.try_job(job_id, place.number)
        else:
            self._quarantine.note_sent(place.number)
        if generates:
            job = call.job(job_id)
            place.expect(job_id, size, job.num_expected - len(job.tokens))
        place.add([job_id], [size])
        taken.add(place.number, call, [job_id])

    def _take_run(self, call: EngineCall, taken: NextJobs) -> None:
        """Take the next jobs of the only call that waits, as many as there is room for."""
        (place,) = self.places
        sizes = call.unsent_sizes
        ids = self._waiting.pop_run(call, place.count_due(sizes))
        self._quarantine.note_sent(place.number)
        place.add(ids, sizes[: len(ids)])
        taken.add(0, call, ids)

    def note_load(self, load: EngineLoad, replica: int = 0) -> None:
        """Note what generation holds in a replica, and which prompts have been read."""
        self.places[replica].note_load(load)

    def finish(self, job_ids: Collection[int], replica: int = 0) -> None:
        """Free the room of jobs that a replica no longer has."""
        self.places[replica].finish(job_ids)
        self._quarantine.note_ended(job_ids)

    def drop(self, call: EngineCall) -> list[int]:
        """Remove a call; return the ids of its jobs that replicas have.

        Those keep their room until they are finished: an engine may be at work on them.
        """
        self._waiting.drop(call)
        ids = range(call.first_id, call.first_id + len(call.jobs))
        return [job_id for job_id in ids if any(job_id in place for place in self.places)]

    def lose(self, replica: int) -> None:
        """Remove what a replica has: its process is gone."""
        self.places[replica].clear()
        self._router.forget(replica)
        self._quarantine.clear_engine(replica)

    def clear(self) -> None:
        """Remove all calls and jobs."""
        self._waiting = TurnQueue()
        for place in self.places:
            self.lose(place.number)
