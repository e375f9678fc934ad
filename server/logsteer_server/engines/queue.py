"""A queue of calls in front of one engine: nobody's long call keeps those of others waiting."""

from logsteer_server.contract.jobs import Job
from logsteer_server.engines.turns import EngineCall, TurnQueue


class FairQueue:
    """Give the engine the next jobs, from the calls that wait in turn, within a token budget.

    The engine holds at most `max_tokens` tokens of unfinished jobs, and always at least one job.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._waiting = TurnQueue()
        self._sent_tokens: dict[int, int] = {}
        self._tokens_in_engine = 0

    def put(self, call: EngineCall) -> None:
        """Append a call to those that take turns."""
        if call.unsent:
            self._waiting.put(call)

    def take(self) -> list[tuple[int, Job]]:
        """Return the jobs that the engine has room for now, and count them as its own."""
        taken: list[tuple[int, Job]] = []
        while self._waiting and self._has_room(self._waiting.peek()):
            job_id, job = self._waiting.pop()
            self._sent_tokens[job_id] = job.num_positions
            self._tokens_in_engine += job.num_positions
            taken.append((job_id, job))
        return taken

    def _has_room(self, call: EngineCall) -> bool:
        size = call.job(call.unsent[0]).num_positions
        return not self._sent_tokens or self._tokens_in_engine + size <= self._max_tokens

    def finish(self, job_id: int) -> None:
        """Free the room of a job that the engine no longer has."""
        self._tokens_in_engine -= self._sent_tokens.pop(job_id, 0)

    def drop(self, call: EngineCall) -> list[int]:
        """Remove a call; return the ids of its jobs that the engine has."""
        self._waiting.drop(call)
        ids = range(call.first_id, call.first_id + len(call.jobs))
        sent = [job_id for job_id in ids if job_id in self._sent_tokens]
        for job_id in sent:
            self.finish(job_id)
        return sent

    def clear(self) -> None:
        """Remove all calls and jobs: the engine is gone."""
        self._waiting = TurnQueue()
        self._sent_tokens.clear()
        self._tokens_in_engine = 0
