"""Jobs that were in an engine when it died: tried one at a time, and refused after a second death.

Whoever is answered that the engine restarts sends the request again, as new jobs, so a job that
ends engines is known by its content. Beside it in the engine were jobs that did nothing. All come
back as suspects, and with two of them in the engine a second death would convict an innocent one;
so one is let in at a time, among jobs that have shown that they do no harm:

    dies with a, b, c, d      suspects: a b c d
    a  →  answered            suspects: b c d          new jobs wait while a suspect is on trial
    b  →  dies                b is refused from now on; suspects: c d
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields

import numpy as np

from logsteer_server.contract.jobs import Job
from logsteer_server.contract.plan import SteeringPlan

MAX_SUSPECTS = 65_536
TRIAL_S = 2.0
"""For so long a suspect keeps new jobs out, if it takes that long."""
SETTLE_S = 2.0
"""Jobs that have been in the engine for so long do not end it, as far as a trial is concerned."""
CHANGES = frozenset({"seed", "export", "reference"})
"""Fields that are drawn or named anew when a request is sent again."""


def identify(job: Job) -> bytes:
    """Return SHA-256 of what a job asks for, the same for the same request sent again."""
    hasher = hashlib.sha256(type(job).__name__.encode())
    for field in fields(job):
        if field.name in CHANGES:
            continue
        value = getattr(job, field.name)
        if isinstance(value, SteeringPlan):
            part = value.digest(job.prompt_len)
        elif isinstance(value, np.ndarray):
            part = value.tobytes()
        else:
            part = repr(value).encode()
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


@dataclass(slots=True)
class _Suspect:
    deaths: int
    until: float


@dataclass(frozen=True, slots=True)
class _Trial:
    job_id: int
    replica: int
    since: float


class Quarantine:
    """What is known of suspects, and which of them is in an engine.

    Each is remembered for `keep_s` seconds after the last death it was in, at most MAX_SUSPECTS.
    Replicas of an engine share what is known. One suspect is on trial at a time, in one of them,
    and keeps new jobs out of that one alone: so at most one replica dies of it.
    """

    def __init__(self, keep_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.keep_s = keep_s
        self._clock = clock
        self._suspects: dict[bytes, _Suspect] = {}
        self._trial: _Trial | None = None
        self._reserved: int | None = None
        self._reserved_at = 0.0
        self._last_sent_at: dict[int, float] = {}
        """Replica -> when it was last sent a job that is no suspect."""

    def accuse(self, jobs: Iterable[Job]) -> frozenset[bytes]:
        """Note that an engine died with these jobs; return which of them it was the second for."""
        now = self._clock()
        convicted = set()
        for name in {identify(job) for job in jobs}:
            deaths = 1 + (found.deaths if (found := self._find(name, now)) else 0)
            self._suspects.pop(name, None)
            self._suspects[name] = _Suspect(deaths, now + self.keep_s)
            if deaths > 1:
                convicted.add(name)
        while len(self._suspects) > MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        return frozenset(convicted)

    def _find(self, name: bytes, now: float) -> _Suspect | None:
        found = self._suspects.get(name)
        if found is not None and found.until <= now:
            del self._suspects[name]
            return None
        return found

    @property
    def is_quiet(self) -> bool:
        """Whether every job is sent: there are no suspects, and none is on trial."""
        return not self._suspects and self._trial is None

    def count_deaths(self, job: Job) -> int:
        """Return how many engines died with a job: one for a suspect, two and more for poison."""
        if not self._suspects:
            return 0
        found = self._find(identify(job), self._clock())
        return found.deaths if found else 0

    @property
    def is_trying(self) -> bool:
        """Whether a suspect is on trial."""
        return self._trial is not None

    def keeps_out(self, replica: int) -> bool:
        """Return whether new jobs wait because of a trial in this replica, now or to come."""
        held, since, limit_s = self._reserved, self._reserved_at, SETTLE_S
        if self._trial is not None:
            held, since, limit_s = self._trial.replica, self._trial.since, TRIAL_S
        return held == replica and self._clock() - since < limit_s

    def reserve(self, replica: int) -> None:
        """Keep new jobs out of a replica that a suspect waits for, until what it has is settled."""
        if not self.keeps_out(replica):
            self._reserved, self._reserved_at = replica, self._clock()

    def is_settled(self, replica: int) -> bool:
        """Return whether the jobs that a replica has do no harm, as far as a trial is concerned."""
        last = self._last_sent_at.get(replica, -SETTLE_S)
        return self._clock() - last >= SETTLE_S

    def note_sent(self, replica: int = 0) -> None:
        """Note that a replica was sent jobs that are no suspects."""
        self._last_sent_at[replica] = self._clock()

    def try_job(self, job_id: int, replica: int = 0) -> None:
        """Note that a replica was sent a suspect, which is on trial until that has ended."""
        self._trial = _Trial(job_id, replica, self._clock())
        self._reserved = None

    def note_ended(self, job_ids: Collection[int]) -> None:
        """Note that no engine has these jobs any longer."""
        if self._trial is not None and self._trial.job_id in job_ids:
            self._trial = None

    @property
    def has_suspects(self) -> bool:
        """Whether any job is remembered, so that those that are answered have to be acquitted."""
        return bool(self._suspects)

    def acquit(self, job: Job) -> None:
        """Forget a job that the engine has answered."""
        self._suspects.pop(identify(job), None)

    def clear_engine(self, replica: int = 0) -> None:
        """Note that a replica has no jobs any more."""
        if self._trial is not None and self._trial.replica == replica:
            self._trial = None

    def measure_wait(self, replica: int) -> float:
        """Return in how many seconds a job may be sent to a replica although nothing happens."""
        since = self._last_sent_at.get(replica, -SETTLE_S) + SETTLE_S
        if self._trial is not None:
            since = self._trial.since + TRIAL_S
        return max(0.0, since - self._clock())
