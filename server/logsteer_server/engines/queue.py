"""A queue of calls in front of one engine: nobody's long call keeps those of others waiting."""

from dataclasses import dataclass, field

from logsteer_server.contract.engine import EngineLoad, EngineRoom
from logsteer_server.contract.jobs import GenerateJob, Job
from logsteer_server.engines.suspects import Quarantine
from logsteer_server.engines.turns import EngineCall, TurnQueue

LOOK_AHEAD = 16
"""Tokens that each generation may still grow by when another one is let in."""


@dataclass(slots=True)
class NextJobs:
    """What the engine is sent now, and jobs that no engine is given.

    With `wait_s`, jobs are held back that may be sent after so many seconds.
    """

    jobs: list[tuple[int, Job]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    wait_s: float | None = None


class FairQueue:
    """Give the engine the next jobs, from the calls that wait in turn, as far as it has room.

    Of what it has not begun, the engine has at most `room.ahead_tokens`, or one job. Where it says
    what generation holds (`note_load`), a job that generates counts there with its prompt, until
    that has been read. A further one is let in while the prompts to come fit into the cache beside
    what is held now, and all may grow by LOOK_AHEAD. The engine preempts some where they grow more.
    While generation waits for such room, jobs that are only read go past it:

        cache of 1000 tokens          held  to come
        40 prompts of 20 tokens wait     0      540   27 are sent: 27 * (20 + 16) <= 1000
        each has generated 15          945        0   none is sent: 945 + 20 + 28 * 16 > 1000
        22 have ended                  175      400   20 are sent: 175 + 20 * 20 + 25 * 16 <= 1000

    Those that were in an engine as it died are let in as `quarantine` says.
    """

    def __init__(
        self, room: EngineRoom | None = None, quarantine: Quarantine | None = None
    ) -> None:
        self.room = room or EngineRoom()
        self._quarantine = quarantine or Quarantine()
        self._waiting = TurnQueue()
        self._in_engine: dict[int, int] = {}
        """Job -> its tokens that count as not begun."""
        self._ahead_tokens = 0
        self._generating: set[int] = set()
        self._unread_prompts = 0
        self._held_tokens = 0

    def put(self, call: EngineCall) -> None:
        """Append a call to those that take turns."""
        if call.unsent:
            self._waiting.put(call)

    def take(self) -> NextJobs:
        """Return the jobs that the engine has room for now, and count them as its own."""
        taken = NextJobs()
        passed: set[EngineCall] = set()
        reading = False
        while (call := self._waiting.peek(reading)) is not None and call not in passed:
            job = call.next_job
            if not self._is_due(job):
                break
            if not self._may_generate(job):
                reading = True
                continue
            verdict = self._quarantine.judge(job, engine_is_empty=not self._in_engine)
            if verdict == "hold":
                taken.wait_s = self._quarantine.wait_s
                return taken
            if verdict == "pass":
                self._waiting.pass_by(call)
                passed.add(call)
                continue
            passed.clear()
            job_id, job = self._waiting.pop(call)
            if verdict == "refuse":
                taken.refused.append(job_id)
                continue
            self._quarantine.note_sent(job_id, job)
            self._count(job_id, job)
            taken.jobs.append((job_id, job))
        return taken

    def _measure(self, job: Job) -> int:
        """Return the tokens that count as not begun."""
        return job.num_positions if self.room.cache_tokens is None else len(job.tokens)

    def _is_due(self, job: Job) -> bool:
        """Return whether the engine has begun so much that it may be sent a job."""
        ahead = self._ahead_tokens
        return not ahead or ahead + self._measure(job) <= self.room.ahead_tokens

    def _may_generate(self, job: Job) -> bool:
        """Return whether there is room for what a job generates, if it does."""
        cache_tokens, sequences = self.room.cache_tokens, self.room.sequences
        count = len(self._generating)
        if not isinstance(job, GenerateJob) or not count:
            return True
        if sequences is not None and count >= sequences:
            return False
        if cache_tokens is None:
            return True
        to_come = self._unread_prompts + len(job.tokens) + LOOK_AHEAD * (count + 1)
        return self._held_tokens + to_come <= cache_tokens

    def _count(self, job_id: int, job: Job) -> None:
        size = self._measure(job)
        self._in_engine[job_id] = size
        self._ahead_tokens += size
        if isinstance(job, GenerateJob):
            self._generating.add(job_id)
            self._unread_prompts += size

    def note_load(self, load: EngineLoad) -> None:
        """Note what generation holds, and which prompts have been read."""
        for job_id in load.started:
            if job_id in self._generating:
                self._begin(job_id)
                self._in_engine[job_id] = 0
        self._held_tokens = load.held_tokens

    def _begin(self, job_id: int) -> None:
        """Count a job's tokens no longer as not begun."""
        size = self._in_engine.get(job_id, 0)
        self._ahead_tokens -= size
        if job_id in self._generating:
            self._unread_prompts -= size

    def finish(self, job_id: int) -> None:
        """Free the room of a job that the engine no longer has."""
        self._begin(job_id)
        self._in_engine.pop(job_id, None)
        self._generating.discard(job_id)
        self._quarantine.note_ended(job_id)

    def drop(self, call: EngineCall) -> list[int]:
        """Remove a call; return the ids of its jobs that the engine has.

        Those keep their room until they are finished: the engine may be at work on them.
        """
        self._waiting.drop(call)
        ids = range(call.first_id, call.first_id + len(call.jobs))
        return [job_id for job_id in ids if job_id in self._in_engine]

    def clear(self) -> None:
        """Remove all calls and jobs: the engine is gone."""
        self._waiting = TurnQueue()
        self._in_engine.clear()
        self._generating.clear()
        self._ahead_tokens = self._unread_prompts = self._held_tokens = 0
        self._quarantine.clear_engine()
