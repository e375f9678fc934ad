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
from typing import Literal

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

Verdict = Literal["send", "pass", "hold", "refuse"]
"""What becomes of a job: it is sent; others may go first; nobody goes before; it is poison."""


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


class Quarantine:
    """What is known of suspects, and which of them is in the engine.

    Each is remembered for `keep_s` seconds after the last death it was in, at most MAX_SUSPECTS.
    """

    def __init__(self, keep_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.keep_s = keep_s
        self._clock = clock
        self._suspects: dict[bytes, _Suspect] = {}
        self._on_trial: tuple[int, float] | None = None
        self._last_sent_at = -SETTLE_S

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
        return not self._suspects and self._on_trial is None

    def judge(self, job: Job, engine_is_empty: bool) -> Verdict:
        """Return what becomes of a job whose turn it is."""
        now = self._clock()
        found = self._find(identify(job), now) if self._suspects else None
        if found is None:
            in_trial = self._on_trial is not None and now - self._on_trial[1] < TRIAL_S
            return "hold" if in_trial else "send"
        if found.deaths > 1:
            return "refuse"
        if self._on_trial is not None:
            return "pass"
        return "send" if engine_is_empty or now - self._last_sent_at >= SETTLE_S else "hold"

    def note_sent(self, job_id: int, job: Job) -> None:
        """Note that the engine was sent a job."""
        now = self._clock()
        if self._suspects and self._find(identify(job), now):
            self._on_trial = (job_id, now)
        else:
            self._last_sent_at = now

    def note_ended(self, job_ids: Collection[int]) -> None:
        """Note that the engine no longer has these jobs."""
        if self._on_trial is not None and self._on_trial[0] in job_ids:
            self._on_trial = None

    @property
    def has_suspects(self) -> bool:
        """Whether any job is remembered, so that those that are answered have to be acquitted."""
        return bool(self._suspects)

    def acquit(self, job: Job) -> None:
        """Forget a job that the engine has answered."""
        self._suspects.pop(identify(job), None)

    def clear_engine(self) -> None:
        """Note that the engine has no jobs any more."""
        self._on_trial = None

    @property
    def wait_s(self) -> float:
        """Seconds until a job that is held now may be sent although nothing has happened."""
        since = self._last_sent_at + SETTLE_S
        if self._on_trial is not None:
            since = self._on_trial[1] + TRIAL_S
        return max(0.0, since - self._clock())
