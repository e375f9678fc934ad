"""Whose turn it is: calls of many callers that wait for one engine.

Turns are taken at three heights, each turn of one job:

    priority   `interactive` first; of BATCH_EVERY turns, `batch` has one where both wait
    tenant     within a priority: the one whose jobs had the fewest tokens of late
    call       within a tenant: one after another

Where no keys are in use, all calls have one tenant and one priority, and take turns.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from logsteer_server.contract.batches import ScoreJobs, count_positions, select_jobs
from logsteer_server.contract.jobs import GenerateJob, Job
from logsteer_server.contract.lane import Lane, Priority

BATCH_EVERY = 16
"""So that work of priority batch is slow where others never pause, and does not stand still."""


@dataclass(eq=False)
class EngineCall:
    """The jobs of one caller; `unsent` holds the ids of those that the engine does not have."""

    jobs: Sequence[Job]
    first_id: int
    lane: Lane = field(default_factory=Lane)
    unsent: deque[int] = field(init=False)
    _sizes: list[int] = field(init=False)
    _is_in_order: bool = field(init=False, default=True)
    """Whether `unsent` are the last of the jobs."""

    def __post_init__(self) -> None:
        self.unsent = deque(range(self.first_id, self.first_id + len(self.jobs)))
        self._sizes = count_positions(self.jobs)

    def job(self, job_id: int) -> Job:
        """Return the job of that id."""
        return self.jobs[job_id - self.first_id]

    def size(self, job_id: int) -> int:
        """Return the `num_positions` of the job of that id."""
        return self._sizes[job_id - self.first_id]

    @property
    def unsent_sizes(self) -> list[int]:
        """The `num_positions` of the jobs that no engine has, in their order."""
        if self._is_in_order:
            return self._sizes[len(self._sizes) - len(self.unsent) :]
        return [self.size(job_id) for job_id in self.unsent]

    def put_back(self, ids: Sequence[int]) -> None:
        """Have jobs that an engine had be sent again, before the others."""
        self._is_in_order = False
        self.unsent.extendleft(reversed(ids))

    def select(self, ids: Sequence[int]) -> Sequence[Job]:
        """Return the jobs of these ids."""
        return select_jobs(self.jobs, [job_id - self.first_id for job_id in ids])

    @property
    def only_reads(self) -> bool:
        """Whether none of its jobs generates, as far as is known without a look at each."""
        return isinstance(self.jobs, ScoreJobs)

    @property
    def generates(self) -> bool:
        """Whether the job that it sends in its next turn generates."""
        return not self.only_reads and isinstance(self.job(self.unsent[0]), GenerateJob)


class TenantQueue:
    """Calls of one priority. The tenant that is served next is the one with the least `served`.

    `served` counts the tokens of a tenant's jobs. One that comes, or comes back, begins where those
    stand that wait: what it left unused is not saved up, and what it took lately still counts.

        ann, jobs of 10 tokens   10       20 30       40 50
        eve, jobs of 20 tokens      20          40          60
    """

    def __init__(self) -> None:
        self._calls: dict[str, deque[EngineCall]] = {}
        self._served: dict[str, int] = {}
        self._reached = 0

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def num_jobs(self) -> int:
        """Jobs of all calls that wait."""
        return sum(len(call.unsent) for calls in self._calls.values() for call in calls)

    def put(self, call: EngineCall) -> None:
        """Append a call to those of its tenant."""
        tenant = call.lane.tenant
        if tenant not in self._calls:
            self._calls[tenant] = deque()
            self._served[tenant] = max(self._reached, self._served.get(tenant, 0))
        self._calls[tenant].append(call)

    def peek(self, reading: bool = False) -> EngineCall | None:
        """Return the call whose turn it is, if there is one; with `reading`, of those whose next
        job does not generate.
        """
        if not reading:
            return self._calls[self._choose()][0] if self._calls else None
        turns = sorted(self._calls, key=self._served.__getitem__)
        calls = (call for tenant in turns for call in self._calls[tenant])
        return next((call for call in calls if not call.generates), None)

    def _choose(self) -> str:
        if len(self._calls) == 1:
            return next(iter(self._calls))
        return min(self._calls, key=self._served.__getitem__)

    def pop(self, call: EngineCall) -> int:
        """Take the next job of the call that `peek` returned; that has its next turn later."""
        tenant = call.lane.tenant
        calls = self._calls[tenant]
        calls.remove(call)
        job_id = call.unsent.popleft()
        self._reached = max(self._reached, self._served[tenant])
        expected = call.size(job_id) if call.only_reads else call.job(job_id).num_expected
        self._served[tenant] += max(1, expected)
        if call.unsent:
            calls.append(call)
        if not calls:
            del self._calls[tenant]
        return job_id

    def pop_run(self, count: int) -> list[int]:
        """Take the next jobs, so many, of the one call that waits; return their ids."""
        ((tenant, calls),) = self._calls.items()
        call = calls[0]
        sizes = call.unsent_sizes[:count]
        ids = [call.unsent.popleft() for _ in range(count)]
        self._reached = max(self._reached, self._served[tenant])
        self._served[tenant] += sum(sizes) + sizes.count(0)
        if not call.unsent:
            calls.clear()
            del self._calls[tenant]
        return ids

    def drop(self, call: EngineCall) -> None:
        """Remove a call."""
        calls = self._calls.get(call.lane.tenant, deque())
        if call in calls:
            calls.remove(call)
            if not calls:
                del self._calls[call.lane.tenant]


class CallQueue:
    """All calls that wait for one engine, of which one has the next turn."""

    def __init__(self) -> None:
        self._queues: dict[Priority, TenantQueue] = {
            priority: TenantQueue() for priority in get_args(Priority)
        }
        self._turns_without_batch = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def num_jobs(self) -> int:
        """Jobs of all calls that wait."""
        return sum(queue.num_jobs for queue in self._queues.values())

    def put(self, call: EngineCall) -> None:
        """Append a call."""
        self._queues[call.lane.priority].put(call)

    def peek(self, reading: bool = False) -> EngineCall | None:
        """Return the call whose turn it is, if there is one; it stays so until the turn is taken.

        With `reading`, of the calls whose next job does not generate: the others keep their turns.
        """
        first, second = self._queues["interactive"], self._queues["batch"]
        if self._turns_without_batch >= BATCH_EVERY - 1:
            first, second = second, first
        return first.peek(reading) or second.peek(reading)

    def pop(self, call: EngineCall) -> int:
        """Take the next job of the call that `peek` returned, and return its id."""
        return self._take_turn(call).pop(call)

    def pop_run(self, call: EngineCall, count: int) -> list[int]:
        """Take the next jobs, so many, of the one call that waits; return their ids."""
        return self._take_turn(call).pop_run(count)

    def drop(self, call: EngineCall) -> None:
        """Remove a call, if it is there."""
        self._queues[call.lane.priority].drop(call)

    def _take_turn(self, call: EngineCall) -> TenantQueue:
        chosen, batch = self._queues[call.lane.priority], self._queues["batch"]
        if chosen is batch or not batch:
            self._turns_without_batch = 0
        else:
            self._turns_without_batch += 1
        return chosen
