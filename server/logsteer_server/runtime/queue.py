"""A queue of calls in front of an engine: nobody's long call keeps those of others waiting."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from logsteer_server.contract.engine import EngineLoad, EngineRoom
from logsteer_server.runtime.occupancy import FULL, Loads, Occupancy, Tokens, is_full
from logsteer_server.runtime.routing import BLOCK, Router, hash_blocks
from logsteer_server.runtime.suspects import Quarantine
from logsteer_server.runtime.turns import EngineCall, TurnQueue

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
        self._loads = Loads(replicas)
        self.places = [Occupancy(number, room, self._loads) for number in range(replicas)]
        self.gone: set[int] = set()
        """Numbers of replicas that are not started again."""
        self._router = Router(replicas, prefix_worth)
        self._quarantine = quarantine or Quarantine()
        self._waiting = TurnQueue()
        self._sent: dict[int, int] = {}
        """Job -> the replica that has it."""

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
            work = self._find_work(call)
            if is_full(work):
                break
            if call.generates:
                self._leave_out_crowded(call, work)
                if is_full(work):
                    reading = True
                    continue
            if self._quarantine.is_quiet:
                if len(self.places) == 1 and len(self._waiting) == 1 and call.only_reads:
                    self._take_run(call, taken)
                else:
                    self._take_one(call, work, taken)
                continue
            deaths = self._quarantine.count_deaths(call.job(call.unsent[0]))
            found = self._judge(deaths, work, taken)
            if isinstance(found, np.ndarray):
                passed.clear()
                self._take_one(call, found, taken, is_suspect=deaths > 0)
            elif found == "hold":
                return taken
            elif found == "pass":
                self._waiting.pass_by(call)
                passed.add(call)
            else:
                passed.clear()
                taken.refused.append(self._waiting.pop(call))
        return taken

    def _find_work(self, call: EngineCall) -> Tokens:
        """Return the work of each replica, FULL of those that may not be sent a call's next job;
        of all but the one that the call names, which may always be sent it while it is open.
        """
        number = call.lane.replica
        if number is None or not self.places[number].is_open:
            return self._loads.find(call)
        return keep_only([number], self._loads.work)

    def _leave_out_crowded(self, call: EngineCall, work: Tokens) -> None:
        """Set to FULL the work of replicas without room for what a call's next job generates."""
        for number in np.flatnonzero(work < FULL).tolist():
            if not self.places[number].may_generate(call):
                work[number] = FULL

    def _judge(self, deaths: int, work: Tokens, taken: NextJobs) -> Verdict | Tokens:
        """Return where a job whose turn it is may go while there are suspects, as `work` says it,
        or what becomes of it; so many engines have died with it.
        """
        quarantine = self._quarantine
        if deaths > 1:
            return "refuse"
        fit = [self.places[number] for number in np.flatnonzero(work < FULL).tolist()]
        if not deaths:
            free = [place.number for place in fit if not quarantine.keeps_out(place.number)]
            if not free:
                taken.wait(min(quarantine.measure_wait(place.number) for place in fit))
                return "hold"
            return keep_only(free, work)
        if quarantine.is_trying or not self._may_try():
            return "pass"
        place = min(fit, key=lambda place: (not quarantine.keeps_out(place.number), len(place)))
        if not len(place) or quarantine.is_settled(place.number):
            return keep_only([place.number], work)
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
        work: Tokens,
        taken: NextJobs,
        *,
        is_suspect: bool = False,
    ) -> None:
        """Take a call's next job for one of the replicas whose work is below FULL."""
        generates, place = call.generates, self.places[0]
        blocks: Sequence[int] = ()
        job_id = call.unsent[0]
        if len(self.places) > 1:
            if call.size(job_id) >= BLOCK:
                blocks = hash_blocks(call.job(job_id))
            place = self.places[self._router.choose(blocks, work)]
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
        self._sent[job_id] = place.number
        taken.add(place.number, call, [job_id])

    def _take_run(self, call: EngineCall, taken: NextJobs) -> None:
        """Take the next jobs of the only call that waits, as many as there is room for."""
        (place,) = self.places
        sizes = call.unsent_sizes
        ids = self._waiting.pop_run(call, place.count_due(sizes))
        self._quarantine.note_sent(place.number)
        place.add(ids, sizes[: len(ids)])
        self._sent |= dict.fromkeys(ids, 0)
        taken.add(0, call, ids)

    def note_load(self, load: EngineLoad, replica: int = 0) -> None:
        """Note what generation holds in a replica, and which prompts have been read."""
        self.places[replica].note_load(load)

    def finish(self, job_ids: Collection[int], replica: int = 0) -> None:
        """Free the room of jobs that a replica no longer has."""
        self._forget(job_ids, replica)
        self.places[replica].finish(job_ids)
        self._quarantine.note_ended(job_ids)

    def _forget(self, job_ids: Iterable[int], replica: int) -> None:
        for job_id in job_ids:
            if self._sent.get(job_id) == replica:  # else another one has been given it since
                del self._sent[job_id]

    def drop(self, call: EngineCall) -> dict[int, list[int]]:
        """Remove a call; return the ids of its jobs that replicas have, by the replica's number.

        Those keep their room until they are finished: an engine may be at work on them.
        """
        self._waiting.drop(call)
        found: dict[int, list[int]] = {}
        for job_id in range(call.first_id, call.first_id + len(call.jobs)):
            if (replica := self._sent.get(job_id)) is not None:
                found.setdefault(replica, []).append(job_id)
        return found

    def lose(self, replica: int) -> None:
        """Remove what a replica has: its process is gone."""
        self._forget(self.places[replica].ids, replica)
        self.places[replica].clear()
        self._router.forget(replica)
        self._quarantine.clear_engine(replica)

    def clear(self) -> None:
        """Remove all calls and jobs."""
        self._waiting = TurnQueue()
        for place in self.places:
            self.lose(place.number)


def keep_only(numbers: Sequence[int], work: Tokens) -> Tokens:
    """Return the work of these replicas, and FULL for all others."""
    kept = np.full_like(work, FULL)
    kept[numbers] = work[numbers]
    return kept
