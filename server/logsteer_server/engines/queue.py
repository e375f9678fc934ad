"""A queue of calls in front of one engine: nobody's long call keeps those of others waiting."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from logsteer_server.engines.suspects import Quarantine
from logsteer_server.engines.turns import EngineCall, TurnQueue


@dataclass(slots=True)
class NextJobs:
    """The ids of the jobs that the engine is sent now, in order and by their calls, and of those
    that no engine is given.

    With `wait_s`, jobs are held back that may be sent after so many seconds.
    """

    order: list[int] = field(default_factory=list)
    by_call: dict[EngineCall, list[int]] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    wait_s: float | None = None

    def add(self, call: EngineCall, ids: Sequence[int]) -> None:
        """Append jobs of a call."""
        self.order += ids
        self.by_call.setdefault(call, []).extend(ids)


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
            job_id = call.unsent[0]
            if self._quarantine.is_quiet and len(self._waiting) == 1:
                self._take_run(call, taken)
                continue
            job = call.job(job_id)
            verdict = self._quarantine.judge(job, engine_is_empty=not self._sent_tokens)
            if verdict == "hold":
                taken.wait_s = self._quarantine.wait_s
                return taken
            if verdict == "pass":
                self._waiting.pass_by()
                passed += 1
                continue
            passed = 0
            self._waiting.pop()
            if verdict == "refuse":
                taken.refused.append(job_id)
                continue
            self._quarantine.note_sent(job_id, job)
            self._send(call, [job_id], taken)
        return taken

    def _take_run(self, call: EngineCall, taken: NextJobs) -> None:
        """Take the next jobs of the only call that waits, as many as there is room for."""
        room = self._max_tokens - self._tokens_in_engine
        count = max(1, bisect_right(list(accumulate(map(call.size, call.unsent))), room))
        ids = self._waiting.pop_run(count)
        self._quarantine.note_sent(ids[-1], call.job(ids[-1]))
        self._send(call, ids, taken)

    def _send(self, call: EngineCall, ids: Sequence[int], taken: NextJobs) -> None:
        sizes = [call.size(job_id) for job_id in ids]
        self._sent_tokens.update(zip(ids, sizes, strict=True))
        self._tokens_in_engine += sum(sizes)
        taken.add(call, ids)

    def _has_room(self, call: EngineCall) -> bool:
        size = call.size(call.unsent[0])
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
