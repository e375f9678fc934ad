"""Requests that end engines: remembered by their content, and refused after a second death.

Whoever is told that the engine restarts sends the request again, as new jobs, so a job is known by
what it asks for. All that an engine had as it died is remembered, and forgotten once an engine has
answered it; what two engines have died with is refused.
"""

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import fields

import numpy as np

from logsteer_server.contract.jobs import Job
from logsteer_server.contract.plan import SteeringPlan

KEEP_S = 600.0
"""After the last death: longer than callers go on trying, short enough for one that was among the
others by chance."""
MAX_FINGERPRINTS = 65_536
DEATHS = 2
CHANGES = frozenset({"seed", "export", "reference"})
"""Fields that are drawn or named anew when a request is sent again."""


def fingerprint(job: Job) -> bytes:
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


class PoisonMemory:
    """How many engines have died with a job, of the jobs that any has died with lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.deaths: dict[bytes, tuple[int, float]] = {}
        """Fingerprint -> deaths and the time of the last one; the oldest first. While there is
        none, no job has to be looked at."""

    def record_death(self, jobs: Iterable[Job]) -> bool:
        """Remember that an engine has died with these jobs; return whether one is poison now."""
        now, most = self._clock(), 0
        for name in {fingerprint(job) for job in jobs}:
            deaths, _ = self.deaths.pop(name, (0, now))
            self.deaths[name] = deaths + 1, now
            most = max(most, deaths + 1)
        return most >= DEATHS

    def is_poison(self, job: Job) -> bool:
        """Return whether a job is refused."""
        return self._count(job) >= DEATHS

    def remembers(self, job: Job) -> bool:
        """Return whether an engine has died with a job."""
        return self._count(job) > 0

    def _count(self, job: Job) -> int:
        """Return the engines that have died with a job; those of long ago are forgotten."""
        while self.deaths:
            oldest, (_, died_at) = next(iter(self.deaths.items()))
            if len(self.deaths) <= MAX_FINGERPRINTS and self._clock() - died_at < KEEP_S:
                return self.deaths.get(fingerprint(job), (0, 0.0))[0]
            del self.deaths[oldest]
        return 0

    def forget(self, jobs: Iterable[Job]) -> None:
        """Forget jobs that an engine has answered."""
        for job in jobs:
            self.deaths.pop(fingerprint(job), None)
