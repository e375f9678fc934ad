"""The times of one request, as its answer reports them."""

from logsteer_server.runtime.supervisor import now


class WorkTimer:
    """Times of one request: accepted when made, then when the engine took the first job.

    `batch_taken` is when it took the first job of the latest batch; `begin_batch` forgets it.
    """

    def __init__(self) -> None:
        self.accepted = now()
        self.batch_taken: float | None = None
        self._taken: float | None = None

    def begin_batch(self) -> None:
        """Have what is noted from now on count for the next batch, too."""
        self.batch_taken = None

    def note(self, taken_at: float) -> bool:
        """Count finished jobs in, which the engine took then; return whether they are the first."""
        is_first = self._taken is None
        self._taken = taken_at if self._taken is None else min(self._taken, taken_at)
        own = self.batch_taken
        self.batch_taken = taken_at if own is None else min(own, taken_at)
        return is_first

    @property
    def queue_s(self) -> float:
        """Seconds until the engine took the first job; 0 where it took none."""
        return 0.0 if self._taken is None else max(0.0, self._taken - self.accepted)

    @property
    def engine_s(self) -> float | None:
        """Seconds since then; None where it took no job."""
        return None if self._taken is None else now() - self._taken

    def read(self) -> dict[str, float]:
        """Return the fields of `Timing`."""
        return {
            "queue_ms": round(1e3 * self.queue_s, 3),
            "engine_ms": round(1e3 * (self.engine_s or 0.0), 3),
        }
