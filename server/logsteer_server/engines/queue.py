"""A queue of calls in front of one engine: nobody's long call keeps those of others waiting."""

from dataclasses import dataclass, field

from logsteer_server.contract.jobs import Job
from logsteer_server.engines.suspects import Quarantine
from logsteer_server.engines.turns import EngineCall, TurnQueue


@dataclass(slots=True)
class NextJobs:
    """What the engine is sent now, and jobs that no engine is given.

    With `wait_s`, jobs are held back that may be sent after so many seconds.
    """

    jobs: list[tuple[int, Job]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    wait_s: float | None = None


class FairQueue:
    """Give the engine the next jobs, from the calls that wait in turn, within a token budget.

    The engine holds at most `max_tokens` tokens of unfinished jobs, and always at least one job.
    Those that were in an engine as it died are let in as `quarantine` says.
    """

    def __init__(self, max_tokens: int, quarantine: Quarantine | None = None) -> None:
        self._max_tokens = max_tokens
        self._quarantine = quarantine or Quarantine()
        self._waiting = TurnQueue()
        self._sent_tokens: dict[int, int] = {}
        self._tokens_in_engine = 0

    def put(self, call: EngineCall) -> None:
        """Append a call to those that take turns."""
        if call.unsent:
            self._waiting.put(call)

    def take(self) -> NextJobs:
        """Return the jobs that the engine has room for now, and count them as its own."""
        taken = NextJobs()
        passed = 0
        while passed < len(self._waiting) and self._has_room(self._waiting.peek()):
            call = self._waiting.peek()
            job = call.job(call.unsent[0])
            verdict = self._quarantine.judge(job, engine_is_empty=not self._sent_tokens)
            if verdict == "hold":
                taken.wait_s = self._quarantine.wait_s
                return taken
            if verdict == "pass":
                self._waiting.pass_by()
                passed += 1
                continue
            passed = 0
            job_id, job = self._waiting.pop()
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
        self._waiting.drop(call)
        ids = range(call.first_id, call.first_id + len(call.jobs))
        return [job_id for job_id in ids if job_id in self._sent_tokens]

    def clear(self) -> None:
        """Remove all calls and jobs: the engine is gone."""
        self._waiting = TurnQueue()
        self._sent_tokens.clear()
        self._tokens_in_engine = 0
        self._quarantine.clear_engine()
