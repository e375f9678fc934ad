"""What came of a simulated run: counts, waiting times and latencies."""

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Counts:
    """What has been counted, in tokens unless the name says something else."""

    texts: int = 0
    scored: int = 0
    shareable: int = 0
    read: int = 0
    cached: int = 0
    repeated_texts: int = 0
    repeated: int = 0
    failures: int = 0
    changes: int = 0
    most_waiting: int = 0
    steps: int = 0
    busy_s: float = 0.0
    http_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a run. Waiting is until a request's first text is read; latency until its last
    is answered; both are arrays in seconds, one entry a request, the first ones left out.
    """

    replicas: int
    span_s: float
    answered: int
    unanswered: int
    counts: Counts
    waits: np.ndarray
    latencies: np.ndarray

    @property
    def scored_per_s(self) -> float:
        """Tokens scored a second, from the first arrival until the last answer."""
        return self.counts.scored / self.span_s

    @property
    def utilisation(self) -> float:
        """Share of the replicas' time in which they worked."""
        return self.counts.busy_s / (self.span_s * self.replicas)

    @property
    def hit_share(self) -> float:
        """Share of the tokens of shared prefixes, whole blocks alone, that were not read again."""
        return self.counts.cached / max(1, self.counts.shareable)


def summarize(report: Report) -> dict[str, float]:
    """Return the figures of a run: rates in tokens a second, times in seconds."""
    counts = report.counts
    return {
        "scored_per_s": report.scored_per_s,
        "utilisation": report.utilisation,
        **{f"wait_p{p}_s": _find_percentile(report.waits, p) for p in (50, 95, 99)},
        **{f"latency_p{p}_s": _find_percentile(report.latencies, p) for p in (50, 95, 99)},
        "hit_share": report.hit_share,
        "read_per_s": counts.read / report.span_s,
        "lost": float(report.unanswered),
        "repeated": counts.repeated / max(1, counts.read),
        "failures": float(counts.failures),
        "most_waiting": float(counts.most_waiting),
        "http_cores": counts.http_s / report.span_s,
    }


def _find_percentile(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0
