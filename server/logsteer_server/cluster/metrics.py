"""Metrics through Ray: a process hands its samples to the agent of its node, which is scraped.

Every sample goes as a gauge of the same name: a counter's `_total`, a histogram's `_bucket`, `_sum`
and `_count`. So values are those of `/metrics` to the last digit, where Ray's own histograms would
make up values within buckets, and a process that has ended leaves nothing behind, where Ray's
counters stay. Ray writes `ray_` before each name; `deploy/ray/prometheus.yml` takes it off.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

from prometheus_client.metrics_core import Metric
from ray.util.metrics import Gauge

from logsteer_server.observation.catalog import METRICS, PREFIX

log = logging.getLogger(__name__)

EXPORT_EVERY_S = 2.0
"""Shorter than Ray's own metrics_report_interval_ms, after twice of which a gauge is forgotten."""
PROCESS = "process"
"""The label that tells processes apart: ingresses and actors, by their names."""
KEPT_HERE = ("engine_restarts", "engine_sequences_queued")
"""What an ingress knows of replicas beside what they know of themselves."""
OF_ACTORS = frozenset(
    PREFIX + name
    for name, row in METRICS.items()
    if "replica" in row.labels and name not in KEPT_HERE
)
"""Names of families that actors export, and ingresses do not."""


class AgentExporter:
    """Gives all samples of one process, but those of families left out, to Ray's agent."""

    def __init__(
        self,
        process: str,
        collect: Callable[[], Iterable[Metric]],
        left_out: Collection[str] = (),
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._process = process
        self._collect = collect
        self._left_out = left_out
        self._refresh = refresh
        self._gauges: dict[tuple[str, tuple[str, ...]], Gauge] = {}

    def export(self) -> None:
        """Give what the process counts now."""
        for family in self._collect():
            if family.name in self._left_out:
                continue
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                tags = sample.labels | {PROCESS: self._process}
                place = sample.name, tuple(tags)
                if (gauge := self._gauges.get(place)) is None:
                    gauge = Gauge(sample.name, family.documentation, tuple(tags))
                    self._gauges[place] = gauge
                gauge.set(sample.value, tags)

    async def run(self) -> None:
        """Export until cancelled."""
        while True:
            try:
                if self._refresh is not None:
                    await self._refresh()
                self.export()
            except Exception:  # metrics are not worth a request
                log.exception("metrics could not be given to Ray's agent")
            await asyncio.sleep(EXPORT_EVERY_S)
