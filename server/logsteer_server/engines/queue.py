"""A queue of calls in front of one engine: nobody's long call keeps those of others waiting."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from logsteer_server.contract.engine import EngineLoad, EngineRoom
from logsteer_server.engines.suspects import Quarantine
from logsteer_server.engines.turns import EngineCall, TurnQueue

LOOK_AHEAD = 16
"""Tokens that each generation may still grow by when another one is let in."""


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
            if not self._is_due(call):
                break
            if not self._may_generate(call):
                reading = True
                continue
            if self._quarantine.is_quiet and len(self._waiting) == 1 and call.only_reads:
                self._take_run(call, taken)
                continue
            job = call.job(call.unsent[0])
            verdict = self._quarantine.judge(job, engine_is_empty=not self._in_engine)
            if verdict == "hold":
                taken.wait_s = self._quarantine.wait_s
                return taken
            if verdict == "pass":
                self._waiting.pass_by(call)
                passed.add(call)
                continue
            passed.clear()
            generates = call.generates
            size = self._measure(call)
            job_id = self._waiting.pop(call)
            if verdict == "refuse":
                taken.refused.append(job_id)
                continue
            self._quarantine.note_sent(job_id, job)
            if generates:
                self._generating.add(job_id)
                self._unread_prompts += size
            self._send(call, [job_id], [size], taken)
        return taken

    def _take_run(self, call: EngineCall, taken: NextJobs) -> None:
        """Take the next jobs of the only call that waits, as many as there is room for."""
        room = self.room.ahead_tokens - self._ahead_tokens
        sizes = call.unsent_sizes
        count = max(1, bisect_right(list(accumulate(sizes)), room))
        ids = self._waiting.pop_run(call, count)
        self._quarantine.note_sent(ids[-1], call.job(ids[-1]))
        self._send(call, ids, sizes[:count], taken)

    def _send(
        self, call: EngineCall, ids: Sequence[int], sizes: Sequence[int], taken: NextJobs
    ) -> None:
        self._in_engine.update(zip(ids, sizes, strict=True))
        self._ahead_tokens += sum(sizes)
        taken.add(call, ids)

    def _measure(self, call: EngineCall) -> int:
        """Return the tokens of a call's next job that count as not begun."""
        job_id = call.unsent[0]
        if self.room.cache_tokens is None or call.only_reads:
            return call.size(job_id)
        return len(call.job(job_id).tokens)

    def _is_due(self, call: EngineCall) -> bool:
        """Return whether the engine has begun so much that it may be sent a call's next job."""
        ahead = self._ahead_tokens
        return not ahead or ahead + self._measure(call) <= self.room.ahead_tokens

    def _may_generate(self, call: EngineCall) -> bool:
        """Return whether there is room for what a call's next job generates, if it does."""
        cache_tokens, sequences = self.room.cache_tokens, self.room.sequences
        count = len(self._generating)
        if not count or not call.generates:
            return True
        if sequences is not None and count >= sequences:
            return False
        if cache_tokens is None:
            return True
        to_come = self._unread_prompts + self._measure(call) + LOOK_AHEAD * (count + 1)
        return self._held_tokens + to_come <= cache_tokens

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

    def finish(self, job_ids: Collection[int]) -> None:
        """Free the room of jobs that the engine no longer has."""
        for job_id in self._generating.intersection(job_ids) if self._generating else ():
            self._unread_prompts -= self._in_engine.get(job_id, 0)
            self._generating.discard(job_id)
        self._ahead_tokens -= sum(self._in_engine.pop(job_id, 0) for job_id in job_ids)
        self._quarantine.note_ended(job_ids)

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
