"""A queue of calls in front of one engine: nobody's long call keeps those of others waiting.

Turns are taken at three heights, each turn of one job:

    priority   `interactive` first; of BATCH_EVERY turns, `batch` has one where both wait
    tenant     the one whose jobs had the fewest tokens of late, within its priority
    call       one after another, within its tenant

Where no keys are in use, all calls have one tenant and one priority, and take turns.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from logsteer_server.contract.jobs import Job
from logsteer_server.contract.lane import Lane, Priority

BATCH_EVERY = 16
"""So that work of priority batch is slow where others never pause, and does not stand still."""
REMEMBERED_TENANTS = 1024


@dataclass(eq=False)
class EngineCall:
    """The jobs of one caller; `unsent` holds the ids of those that the engine does not have."""

    jobs: Sequence[Job]
    first_id: int
    lane: Lane = field(default_factory=Lane)
    unsent: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        self.unsent = deque(range(self.first_id, self.first_id + len(self.jobs)))

    def job(self, job_id: int) -> Job:
        """Return the job of that id."""
        return self.jobs[job_id - self.first_id]


class TenantQueue:
    """Calls of one priority. The tenant that is served next is the one with the least `served`.

    `served` counts the tokens of a tenant's jobs. One that comes, or comes back, begins where those
    stand that wait: what it left unused is not saved up, and what it took lately still counts.

        tokens a job   served after each turn
        ann  10        10   10   20   20   30   30
        bob  10         0   10   10   20   20   30    as often
        eve  30        30   30   30   30   30   30    a third as often
    """

    def __init__(self) -> None:
        self._calls: dict[str, deque[EngineCall]] = {}
        self._served: dict[str, int] = {}
        self._reached = 0

    def __bool__(self) -> bool:
        return bool(self._calls)

    def put(self, call: EngineCall) -> None:
        """Append a call to those of its tenant."""
        tenant = call.lane.tenant
        if tenant not in self._calls:
            self._calls[tenant] = deque()
            self._served[tenant] = max(self._reached, self._served.get(tenant, 0))
        self._calls[tenant].append(call)

    def peek(self) -> EngineCall:
        """Return the call whose turn it is."""
        return self._calls[self._choose()][0]

    def _choose(self) -> str:
        if len(self._calls) == 1:
            return next(iter(self._calls))
        return min(self._calls, key=self._served.__getitem__)

    def pop(self) -> tuple[int, Job]:
        """Take the next job, of the call that `peek` returns; that has its next turn later."""
        tenant = self._choose()
        calls = self._calls[tenant]
        call = calls.popleft()
        job_id = call.unsent.popleft()
        job = call.job(job_id)
        self._reached = max(self._reached, self._served[tenant])
        self._served[tenant] += max(1, job.num_positions)
        if call.unsent:
            calls.append(call)
        if not calls:
            self._forget(tenant)
        return job_id, job

    def drop(self, call: EngineCall) -> None:
        """Remove a call."""
        calls = self._calls.get(call.lane.tenant, deque())
        if call in calls:
            calls.remove(call)
            if not calls:
                self._forget(call.lane.tenant)

    def _forget(self, tenant: str) -> None:
        """Let a tenant go that waits for nothing, and all those whose turns are long past."""
        del self._calls[tenant]
        if len(self._served) > REMEMBERED_TENANTS:
            self._served = {
                name: count
                for name, count in self._served.items()
                if name in self._calls or count > self._reached
            }


class FairQueue:
    """Give the engine the next jobs, in turn, within a token budget.

    The engine holds at most `max_tokens` tokens of unfinished jobs, and always at least one job.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._sent_tokens: dict[int, int] = {}
        self._tokens_in_engine = 0
        self._make_queues()

    def _make_queues(self) -> None:
        self._queues: dict[Priority, TenantQueue] = {
            priority: TenantQueue() for priority in get_args(Priority)
        }
        self._turns_without_batch = 0

    def put(self, call: EngineCall) -> None:
        """Append a call to those that take turns."""
        if call.unsent:
            self._queues[call.lane.priority].put(call)

    def take(self) -> list[tuple[int, Job]]:
        """Return the jobs that the engine has room for now, and count them as its own."""
        taken: list[tuple[int, Job]] = []
        while (queue := self._choose()) and self._has_room(queue.peek()):
            job_id, job = queue.pop()
            if queue is self._queues["batch"]:
                self._turns_without_batch = 0
            elif self._queues["batch"]:
                self._turns_without_batch += 1
            self._sent_tokens[job_id] = job.num_positions
            self._tokens_in_engine += job.num_positions
            taken.append((job_id, job))
        return taken

    def _choose(self) -> TenantQueue:
        """Return the queue whose turn it is; an empty one where nothing waits."""
        interactive, batch = self._queues["interactive"], self._queues["batch"]
        is_due = batch and self._turns_without_batch >= BATCH_EVERY - 1
        return batch if is_due or not interactive else interactive

    def _has_room(self, call: EngineCall) -> bool:
        size = call.job(call.unsent[0]).num_positions
        return not self._sent_tokens or self._tokens_in_engine + size <= self._max_tokens

    def finish(self, job_id: int) -> None:
        """Free the room of a job that the engine no longer has."""
        self._tokens_in_engine -= self._sent_tokens.pop(job_id, 0)

    def drop(self, call: EngineCall) -> list[int]:
        """Remove a call; return the ids of its jobs that the engine has."""
        self._queues[call.lane.priority].drop(call)
        ids = range(call.first_id, call.first_id + len(call.jobs))
        sent = [job_id for job_id in ids if job_id in self._sent_tokens]
        for job_id in sent:
            self.finish(job_id)
        return sent

    def clear(self) -> None:
        """Remove all calls and jobs: the engine is gone."""
        self._make_queues()
        self._sent_tokens.clear()
        self._tokens_in_engine = 0
