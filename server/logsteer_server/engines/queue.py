"""A queue of calls in front of one engine: a long call does not keep short ones waiting."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from logsteer_server.contract.jobs import Job
from logsteer_server.engines.suspects import Quarantine


@dataclass(eq=False)
class EngineCall:
    """The jobs of one caller; `unsent` holds the ids of those that the engine does not have."""

    jobs: Sequence[Job]
    first_id: int
    unsent: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        self.unsent = deque(range(self.first_id, self.first_id + len(self.jobs)))

    def job(self, job_id: int) -> Job:
        """Return the job of that id."""
        return self.jobs[job_id - self.first_id]


@dataclass(slots=True)
class NextJobs:
    """What the engine is sent now, and jobs that no engine is given.

    With `wait_s`, jobs are held back that may be sent after so many seconds.
    """

    jobs: list[tuple[int, Job]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    wait_s: float | None = None


class FairQueue:
    """Give the engine the next jobs, one from each waiting call in turn, within a token budget.

    The engine holds at most `max_tokens` tokens of unfinished jobs, and always at least one job.
    Those that were in an engine as it died are let in as `quarantine` says.
    """

    def __init__(self, max_tokens: int, quarantine: Quarantine | None = None) -> None:
        self._max_tokens = max_tokens
        self._quarantine = quarantine or Quarantine()
        self._waiting: deque[EngineCall] = deque()
        self._sent_tokens: dict[int, int] = {}
        self._tokens_in_engine = 0

    def put(self, call: EngineCall) -> None:
        """Append a call to those that take turns."""
        if call.unsent:
            self._waiting.append(call)

    def take(self) -> NextJobs:
        """Return the jobs that the engine has room for now, and count them as its own."""
        taken = NextJobs()
        passed = 0
        while passed < len(self._waiting) and self._has_room(self._waiting[0]):
            call = self._waiting[0]
            job_id = call.unsent[0]
            job = call.job(job_id)
            verdict = self._quarantine.judge(job, engine_is_empty=not self._sent_tokens)
            if verdict == "hold":
                taken.wait_s = self._quarantine.wait_s
                return taken
            self._waiting.popleft()
            if verdict == "pass":
                self._waiting.append(call)
                passed += 1
                continue
            passed = 0
            call.unsent.popleft()
            if call.unsent:
                self._waiting.append(call)
            if verdict == "refuse":
                taken.refused.append(job_id)
                continue
            self._quarantine.note_sent(job_id, job)
            self._sent_tokens[job_id] = job.num_positions
            self._tokens_in_engine += job.num_positions
            taken.jobs.append((job_id, job))
        return taken

    def _has_room(self, call: EngineCall) -> bool:
        size = call.job(call.unsent[0]).num_positions
        return not self._sent_tokens or self._tokens_in_engine + size <= self._max_tokens

    def finish(self, job_id: int) -> None:
        """Free the room of a job that the engine no longer has."""
        self._tokens_in_engine -= self._sent_tokens.pop(job_id, 0)
        self._quarantine.note_ended(job_id)

    def drop(self, call: EngineCall) -> list[int]:
        """Remove a call; return the ids of its jobs that the engine has.

        Those keep their room until they are finished: the engine may be at work on them.
        """
        if call in self._waiting:
            self._waiting.remove(call)
        ids = range(call.first_id, call.first_id + len(call.jobs))
        return [job_id for job_id in ids if job_id in self._sent_tokens]

    def clear(self) -> None:
        """Remove all calls and jobs: the engine is gone."""
        self._waiting.clear()
        self._sent_tokens.clear()
        self._tokens_in_engine = 0
        self._quarantine.clear_engine()
