"""The times of one request, as its answer reports them."""

from logsteer_server.engines.supervisor import now


class WorkTimer:
    """Times of one request: accepted when made, then when the engine took the first job."""

    def __init__(self) -> None:
        self._accepted = now()
        self._taken: float | None = None

    def note(self, taken_at: float) -> None:
        """Count finished jobs in, which the engine took then."""
        self._taken = taken_at if self._taken is None else min(self._taken, taken_at)

    def read(self) -> dict[str, float]:
        """Return the fields of `Timing`."""
        if self._taken is None:
            return {"queue_ms": 0.0, "engine_ms": 0.0}
        taken = self._taken
        return {
            "queue_ms": round(1e3 * max(0.0, taken - self._accepted), 3),
            "engine_ms": round(1e3 * (now() - taken), 3),
        }
