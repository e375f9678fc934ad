"""Poison requests: jobs that kill engines, identified by content and refused after two deaths.

A client that sees `engine_restarting` sends its request again, as new jobs, so jobs are identified
by content. All jobs of an engine that dies are remembered until an engine has answered them.
A job that two engines died with is refused.
"""

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import fields

import numpy as np

from logsteer_server.contract.jobs import Job
from logsteer_server.contract.plan import SteeringPlan

KEEP_S = 600.0
"""How long a death is remembered: longer than clients retry, short enough for innocent jobs."""
MAX_FINGERPRINTS = 65_536
DEATHS = 2
CHANGES = frozenset({"seed", "export", "reference"})
"""Fields that differ each time a request is sent."""


def fingerprint(job: Job) -> bytes:
    """Return SHA-256 of a job's content; a request that is sent again has the same."""
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
    """The recent engine deaths of each job."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.deaths: dict[bytes, tuple[int, float]] = {}
        """Fingerprint -> deaths and the time of the last one, oldest first. Empty: all jobs pass
        unchecked."""

    def record_death(self, jobs: Iterable[Job]) -> bool:
        """Record an engine's death with these jobs; return whether one is now poison."""
        now, most = self._clock(), 0
        for name in {fingerprint(job) for job in jobs}:
            deaths, _ = self.deaths.pop(name, (0, now))
            self.deaths[name] = deaths + 1, now
            most = max(most, deaths + 1)
        return most >= DEATHS

    def is_poison(self, job: Job) -> bool:
        """Return whether a job must be refused."""
        return self._count(job) >= DEATHS

    def remembers(self, job: Job) -> bool:
        """Return whether an engine has died with a job."""
        return self._count(job) > 0

    def _count(self, job: Job) -> int:
        """Return how many engines died with a job, after dropping old records."""
        while self.deaths:
            oldest, (_, died_at) = next(iter(self.deaths.items()))
            if len(self.deaths) <= MAX_FINGERPRINTS and self._clock() - died_at < KEEP_S:
                return self.deaths.get(fingerprint(job), (0, 0.0))[0]
            del self.deaths[oldest]
        return 0

    def forget(self, jobs: Iterable[Job]) -> None:
        """Drop the records of jobs that an engine has answered."""
        for job in jobs:
            self.deaths.pop(fingerprint(job), None)
