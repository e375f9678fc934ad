"""What the server counts and what is read when Prometheus asks, as metrics of the catalog."""

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from logsteer_server import __version__
from logsteer_server.contract.engine import EngineReading, StepCounts
from logsteer_server.observation.catalog import METRICS, PREFIX
from logsteer_server.observation.processes import read_family
from logsteer_server.observation.readings import EngineStatus, ModelReading, ServerReading
from logsteer_server.observation.tallies import SECONDS, KeyTally, ModelTally, Spread

METRICS_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MAX_METRIC_KEYS = 100
OTHER_KEYS = "other"
"""The label of keys that have no series of their own."""
_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Metrics:
    """All that one application counts, and where it reads what it does not count.

    It is written to from the event loop alone. `read_models` and `read_server` are asked in
    `render`.
    """

    def __init__(self, max_keys: int = MAX_METRIC_KEYS) -> None:
        self.in_flight = 0
        self.requests: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.errors: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.seconds: defaultdict[str, Spread] = defaultdict(Spread)
        self.models: dict[str, ModelTally] = {}
        self.keys: dict[str, KeyTally] = {}
        self.read_models: Callable[[], Iterable[ModelReading]] = tuple
        self.read_server: Callable[[], ServerReading] = ServerReading
        self._max_keys = max_keys
        self._registry = CollectorRegistry()
        self._registry.register(LiveCollector(self))
        ProcessCollector(registry=self._registry)

    def for_model(self, model: str) -> ModelTally:
        """Return a model's counts; they are reported from now on, at 0 where nothing happened."""
        return self.models.setdefault(model, ModelTally())

    def note_request(self, path: str, status: int, seconds: float, code: str = "") -> None:
        """Count an answered request, with the code of its problem where it ended with one."""
        self.requests[path, status] += 1
        self.seconds[path].note(seconds)
        if code:
            self.errors[path, code] += 1

    def note_key(
        self, key: str, failed: bool, prompt_tokens: int, scored_tokens: int, generated_tokens: int
    ) -> None:
        """Count a request of a key, and what was computed for it."""
        tally = self.keys.get(key)
        if tally is None:
            name = key if len(self.keys) < self._max_keys else OTHER_KEYS
            tally = self.keys.setdefault(name, KeyTally())
        tally.requests += 1
        tally.errors += failed
        tally.prompt_tokens += prompt_tokens
        tally.scored_tokens += scored_tokens
        tally.generated_tokens += generated_tokens

    def collect(self) -> Iterator[Metric]:
        """Yield everything as it is now, family by family."""
        return iter(self._registry.collect())

    def render(self) -> bytes:
        """Return everything in Prometheus' text format, of type METRICS_TYPE."""
        return generate_latest(self._registry)


class LiveCollector(Collector):
    """Makes metrics of what `Metrics` has, when Prometheus asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._families: dict[str, Metric] = {}

    def describe(self) -> list[Metric]:
        """Return nothing, so that nothing is collected when this is registered."""
        return []

    def collect_engines(self, model: str, engines: Iterable[EngineStatus]) -> Iterator[Metric]:
        """Yield what is known of a model's engines, and nothing else."""
        self._begin()
        for engine in engines:
            self._add_engine(model, engine)
        yield from self._families.values()

    def _begin(self) -> None:
        self._families = {
            row.name: _FAMILIES[row.kind](PREFIX + row.name, row.text, labels=row.labels)
            for row in METRICS.values()
        }

    def collect(self) -> Iterator[Metric]:
        """Yield every family of the catalog, those without a sample too."""
        self._begin()
        self._add("build_info", 1, __version__, platform.python_version())
        self._add_requests()
        for model, tally in self._metrics.models.items():
            self._add_model(model, tally)
        for reading in self._metrics.read_models():
            self._add_state(reading)
            for engine in reading.engines:
                self._add_engine(reading.model, engine)
        self._add_server(self._metrics.read_server())
        for key, used in self._metrics.keys.items():
            self._add("key_requests", used.requests, key)
            self._add("key_errors", used.errors, key)
            for kind in ("prompt", "scored", "generated"):
                self._add("key_tokens", getattr(used, f"{kind}_tokens"), key, kind)
        yield from self._families.values()

    def _add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample of a counter or gauge; nothing where there is none."""
        if value is not None:
            self._families[name].add_metric(labels, value)  # type: ignore[attr-defined]

    def _spread(self, name: str, spread: Spread | StepCounts, *labels: str) -> None:
        """Add a histogram."""
        bounds = [*map(floatToGoString, SECONDS), "+Inf"]
        total = spread.total if isinstance(spread, Spread) else spread.total_s
        buckets = list(zip(bounds, map(float, accumulate(spread.counts)), strict=True))
        self._families[name].add_metric(labels, buckets, total)  # type: ignore[attr-defined]

    def _add_requests(self) -> None:
        metrics = self._metrics
        self._add("requests_in_flight", metrics.in_flight)
        for (path, status), count in metrics.requests.items():
            self._add("requests", count, path, str(status))
        for (path, code), count in metrics.errors.items():
            self._add("errors", count, path, code)
        for path, spread in metrics.seconds.items():
            self._spread("request_seconds", spread, path)

    def _add_model(self, model: str, tally: ModelTally) -> None:
        self._add("prompt_tokens", tally.prompt_tokens, model)
        self._add("scored_tokens", tally.scored_tokens, model)
        self._add("generated_tokens", tally.generated_tokens, model)
        self._add("prefix_cached_tokens", tally.prefix_cached_tokens, model)
        self._add("steered_tokens", tally.steered_tokens, model)
        self._add("result_cache_hits", tally.cache_hits, model)
        self._add("result_cache_misses", tally.cache_misses, model)
        self._spread("queue_seconds", tally.queue, model)
        self._spread("engine_seconds", tally.engine, model)
        self._spread("time_to_first_token_seconds", tally.first_token, model)
        self._spread("time_between_tokens_seconds", tally.between_tokens, model)

    def _add_state(self, reading: ModelReading) -> None:
        self._add("model_ready", float(reading.is_ready), reading.model)
        self._add("pending_tokens", reading.pending_tokens, reading.model)
        self._add("pending_tokens_limit", reading.pending_limit, reading.model)

    def _add_engine(self, model: str, engine: EngineStatus) -> None:
        labels = model, engine.replica
        self._add("engine_restarts", engine.restarts, *labels)
        self._add("engine_heartbeat_age_seconds", engine.heartbeat_age_s, *labels)
        self._add("engine_sequences_queued", engine.queued, *labels)
        if engine.steps is not None:
            self._spread("engine_step_seconds", engine.steps, *labels)
        if engine.reading is not None:
            self._add_reading(engine.reading, *labels)
        process = None if engine.pid is None else read_family(engine.pid)
        if process is not None:
            self._add("engine_process_cpu_seconds", process.cpu_s, *labels)
            self._add("engine_process_resident_memory_bytes", process.resident_bytes, *labels)

    def _add_reading(self, reading: EngineReading, *labels: str) -> None:
        self._add("engine_sequences_running", reading.running, *labels)
        self._add("engine_sequences_waiting", reading.waiting, *labels)
        self._add("kv_cache_blocks", reading.cache_blocks, *labels)
        self._add("kv_cache_blocks_used", reading.cache_blocks_used, *labels)
        self._add("engine_preemptions", reading.preemptions, *labels)
        self._add("steering_slots", reading.steering_slots, *labels)
        self._add("steering_slots_used", reading.steering_slots_used, *labels)
        self._add("adapter_slots", reading.adapter_slots, *labels)
        self._add("adapter_slots_used", reading.adapter_slots_used, *labels)
        for memory in reading.memory:
            self._add("gpu_memory_held_bytes", memory.held_bytes, *labels, memory.device)
            self._add("gpu_memory_free_bytes", memory.free_bytes, *labels, memory.device)
            self._add("gpu_memory_bytes", memory.size_bytes, *labels, memory.device)

    def _add_server(self, server: ServerReading) -> None:
        self._add("pending_bytes", server.pending_bytes)
        self._add("pending_bytes_limit", server.pending_bytes_limit)
        self._add("result_cache_bytes", server.cache_bytes)
        self._add("result_cache_limit_bytes", server.cache_limit_bytes)
        self._add("result_cache_file_bytes", server.disk.cache_file_bytes)
        for store in server.disk.stores:
            self._add("store_bytes", store.shared_bytes, store.kind, "shared")
            self._add("store_bytes", store.keys_bytes, store.kind, "keys")
            self._add("store_limit_bytes", store.limit_bytes, store.kind)
        self._add("store_disk_free_bytes", server.disk.free_bytes)
        self._add("store_disk_bytes", server.disk.size_bytes)
        for part, is_away in server.away.items():
            self._add("cluster_part_away", float(is_away), part)
