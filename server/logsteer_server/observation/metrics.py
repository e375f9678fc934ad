"""The metrics of `/metrics`: counters of this process, and values read at each scrape.

Each metric is defined once: counters as objects of prometheus_client in the application's registry,
values read at a scrape as rows of the tables below. The documentation page is generated from both.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import Any

import prometheus_client
import psutil
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
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
from logsteer_server.contract.engine import TIME_BOUNDS_S, EngineReading, StepCounts


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The status of one engine process.

    `replica` identifies an engine of a model. `pid` is None while no process runs,
    `heartbeat_age_s` until the first heartbeat. `queued`: jobs waiting in this process. `steps` are
    those of the current process.
    """

    replica: str
    restarts: int
    queued: int
    pid: int | None = None
    heartbeat_age_s: float | None = None
    reading: EngineReading | None = None
    steps: StepCounts | None = None


@dataclass(frozen=True, slots=True)
class ModelReading:
    """The current reading of a model; `pending_limit` bounds `pending_tokens`."""

    model: str
    pending_tokens: int
    pending_limit: int
    is_ready: bool
    engines: Sequence[EngineStatus] = ()


@dataclass(frozen=True, slots=True)
class DiskReading:
    """Disk usage; None before the first reading, or without a store.

    `held`: kind -> owner (`shared` or `keys`) -> bytes; `limit_bytes`: limit of each kind's
    shared store.
    """

    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    limit_bytes: int = 0
    free_bytes: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """Processor seconds and resident bytes; a family's may include shared pages."""

    cpu_s: float
    resident_bytes: int


def read_family(pid: int) -> ProcessReading | None:
    """Measure a process and its descendants; None if the process does not exist."""
    found = ProcessReading(0.0, 0)
    try:
        parent = psutil.Process(pid)
        for member in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error), member.oneshot():
                times, memory = member.cpu_times(), member.memory_info()
                found = ProcessReading(
                    found.cpu_s + times.user + times.system, found.resident_bytes + memory.rss
                )
    except psutil.Error:
        return None
    return found if found.resident_bytes else None


METRICS_TYPE = CONTENT_TYPE_PLAIN_0_0_4
PREFIX = "logsteer_"
MAX_KEYS = 100
"""Keys with their own series, of which each has five; a key file may have thousands of keys."""
OTHER_KEYS = "other"
"""The label of keys without their own series."""
MODEL = ("model",)
ENGINE = ("model", "replica")
DEVICE = ("model", "replica", "device")
VLLM_ENGINE = ("model_name", "engine")
VLLM = "vllm:"
"""What the names of vLLM's own metrics begin with."""

# A second series for each counter, with the time of its first increment, which nobody queries.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class LiveMetric:
    """A metric whose value `read` returns at a scrape.

    None means no value: the sample is then absent rather than 0. A name with a colon is whole.
    """

    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    labels: tuple[str, ...]
    read: Callable[[Any], float | None]
    text: str


_gauge = partial(LiveMetric, GaugeMetricFamily)
_counter = partial(LiveMetric, CounterMetricFamily)

OF_MODELS = (
    _gauge("model_ready", MODEL, lambda m: m.is_ready, "1 where the model answers, else 0."),
    _gauge("pending_tokens", MODEL, lambda m: m.pending_tokens,
           "Tokens of accepted unfinished work."),
    _gauge("pending_tokens_limit", MODEL, lambda m: m.pending_limit,
           "Limit of logsteer_pending_tokens: max_pending_tokens for each replica."),
)  # fmt: skip
"""Read from a `ModelReading`."""

OF_ENGINES = (
    _counter("engine_restarts", ENGINE, lambda e: e.restarts, "Restarts of the engine's process."),
    _gauge("engine_heartbeat_age_seconds", ENGINE, lambda e: e.heartbeat_age_s,
           "Time since the engine's last heartbeat, one of which comes a second; absent while it "
           "loads."),
    _gauge("engine_sequences_queued", ENGINE, lambda e: e.queued,
           "Sequences that wait before the engine, in the order of keys and priorities."),
    _gauge(f"{VLLM}num_requests_waiting", VLLM_ENGINE,
           lambda e: e.queued + (e.reading.waiting if e.reading else 0),
           "vLLM's name for sequences that wait, before the engine or in it."),
)  # fmt: skip
"""Read from an `EngineStatus`."""

OF_HEARTBEATS = (
    _gauge("engine_sequences_running", ENGINE, lambda r: r.running,
           "Sequences in the engine's batch."),
    _gauge("engine_sequences_waiting", ENGINE, lambda r: r.waiting,
           "Sequences that the engine has and has not begun."),
    _gauge("kv_cache_blocks", ENGINE, lambda r: r.cache_blocks,
           "Blocks of the key-value cache; only vLLM has them."),
    _gauge("kv_cache_blocks_used", ENGINE, lambda r: r.cache_blocks_used,
           "Blocks that sequences hold; one that only the prefix cache has is free."),
    _counter("engine_preemptions", ENGINE, lambda r: r.preemptions,
             "Sequences that had to give their blocks back and are computed again, each time; "
             "only vLLM has them."),
    _gauge("steering_slots", ENGINE, lambda r: r.steering_slots,
           "Different steering plans that can run at once: steering_slots; only vLLM has them."),
    _gauge("steering_slots_used", ENGINE, lambda r: r.steering_slots_used,
           "Steering plans that run."),
    _gauge("adapter_slots", ENGINE, lambda r: r.adapter_slots,
           "Different adapters that can run at once: adapter_slots; only vLLM has them."),
    _gauge("adapter_slots_used", ENGINE, lambda r: r.adapter_slots_used, "Adapters that run."),
    _gauge(f"{VLLM}num_requests_running", VLLM_ENGINE, lambda r: r.running,
           "vLLM's name for logsteer_engine_sequences_running."),
    _gauge(f"{VLLM}kv_cache_usage_perc", VLLM_ENGINE,
           lambda r: r.cache_blocks_used / r.cache_blocks if r.cache_blocks else None,
           "vLLM's name for the share of the key-value cache's blocks that sequences hold, 0 to "
           "1."),
    _counter(f"{VLLM}num_preemptions", VLLM_ENGINE, lambda r: r.preemptions,
             "vLLM's name for logsteer_engine_preemptions_total."),
)  # fmt: skip
"""Read from an `EngineReading`, which comes with the engine's heartbeats."""

OF_PROCESSES = (
    _counter("engine_process_cpu_seconds", ENGINE, lambda p: p.cpu_s,
             "Processor time of the engine's process and those of its ranks, since it started."),
    _gauge("engine_process_resident_memory_bytes", ENGINE, lambda p: p.resident_bytes,
           "Resident memory of these processes; what they share counts for each."),
)  # fmt: skip
"""Read from a `ProcessReading`."""

OF_DEVICES = (
    _gauge("gpu_memory_held_bytes", DEVICE, lambda d: d.held_bytes,
           "Memory of a GPU that the engine holds; absent without a GPU. Its name is that of "
           "CUDA_VISIBLE_DEVICES, or its index."),
    _gauge("gpu_memory_free_bytes", DEVICE, lambda d: d.free_bytes,
           "Memory of the GPU that is free."),
    _gauge("gpu_memory_bytes", DEVICE, lambda d: d.size_bytes, "Memory of the GPU."),
)  # fmt: skip
"""Read from a `DeviceMemory`."""

OF_DISK = (
    _gauge("store_disk_free_bytes", (), lambda d: d.free_bytes,
           "Free bytes of the disk that the stores lie on."),
    _gauge("store_disk_bytes", (), lambda d: d.size_bytes, "Size of that disk."),
)  # fmt: skip
"""Read from a `DiskReading`."""

VLLM_NAMES = {
    "prompt_tokens": "prompt_tokens",
    "generated_tokens": "generation_tokens",
    "prefix_cached_tokens": "prompt_tokens_cached",
    "queue_seconds": "request_queue_time_seconds",
    "engine_seconds": "request_inference_time_seconds",
    "answer_seconds": "e2e_request_latency_seconds",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "time_between_tokens_seconds": "inter_token_latency_seconds",
}
"""Counters and histograms of models -> vLLM's names for them, under which they stand, too."""

STEP_SECONDS = "engine_step_seconds"
STEP_SECONDS_TEXT = "Time of one step of the engine, of the process that runs now."
STORE_BYTES = (
    "Bytes of stored vectors, overrides and adapters, read now and then; owner: shared, or keys "
    "for those of all keys together."
)
STORE_LIMIT = "Limit of the shared store for a kind."


@dataclass(slots=True, eq=False)
class ModelMetrics:
    """The counters and histograms of one model."""

    prompt_tokens: Counter
    scored_tokens: Counter
    generated_tokens: Counter
    prefix_cached_tokens: Counter
    steered_tokens: Counter
    cache_hits: Counter
    cache_misses: Counter
    queue_s: Histogram
    engine_s: Histogram
    answer_s: Histogram
    first_token_s: Histogram
    between_tokens_s: Histogram


@dataclass(slots=True, eq=False)
class TokenTimes:
    """Token times of one streamed call: time to first token, and time between tokens.

    `accepted`: when the call was accepted, on the clock of `record`.
    """

    metrics: ModelMetrics
    accepted: float
    _latest: dict[int, float] = field(default_factory=dict)

    def record(self, number: int, tokens: int, now: float) -> None:
        """Record new tokens of one of the call's sequences."""
        latest = self._latest
        before = latest.get(number)
        if before is not None:
            for _ in range(tokens):
                self.metrics.between_tokens_s.observe((now - before) / tokens)
        elif not latest:
            self.metrics.first_token_s.observe(now - self.accepted)
        latest[number] = now


class Metrics:
    """All metrics of one application, in its own registry.

    `read_models` and `read_disk` are called at each scrape. `labels`: label names by metric, for
    the documentation.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self.read_models: Callable[[], Iterable[ModelReading]] = tuple
        self.read_disk: Callable[[], DiskReading] = DiskReading
        self.labels: dict[str, tuple[str, ...]] = {}
        self.registry = CollectorRegistry()
        self._max_keys = max_keys
        self._keys: set[str] = set()
        self._counter = partial(self._make, Counter)
        self._gauge = partial(self._make, Gauge)
        self._seconds = partial(self._make, Histogram, buckets=TIME_BOUNDS_S)
        self._define_shared()
        self._find_route, self._find_error = self._define_requests()
        self._of_model = self._define_models()
        self._find_key = self._define_keys()
        self.registry.register(LiveCollector(self))
        ProcessCollector(registry=self.registry)

    def _define_shared(self) -> None:
        gauge = self._gauge
        build = gauge("build_info", ("version", "python"), "1; the labels say what runs.")
        build.labels(__version__, platform.python_version()).set(1)
        self.in_flight: Gauge = gauge(
            "requests_in_flight", (), "Requests that have arrived and are not completely answered."
        )
        self.pending_bytes: Gauge = gauge(
            "pending_bytes", (), "Memory expected for running requests and answers."
        )
        self.pending_bytes_limit: Gauge = gauge(
            "pending_bytes_limit", (), "Limit of logsteer_pending_bytes: max_pending_bytes."
        )
        self.cache_bytes: Gauge = gauge(
            "result_cache_bytes", (), "Memory that cached results take."
        )
        self.cache_bytes_limit: Gauge = gauge(
            "result_cache_limit_bytes", (), "Limit of logsteer_result_cache_bytes: cache_bytes."
        )

    def _define_requests(self) -> tuple[Any, Any]:
        """Return cached lookups: counter and histogram by path and status, errors by path and code.
        A child's lookup by labels takes longer than counting with it.
        """
        requests = self._counter(
            "requests", ("path", "status"), "Requests answered, by route and status."
        )
        seconds = self._seconds(
            "request_seconds", ("path",), "Time from a request's arrival to the end of its answer."
        )
        errors = self._counter(
            "errors",
            ("path", "code"),
            "Requests that ended with a problem, and its code; in a stream, too.",
        )

        @cache
        def find_route(path: str, status: str) -> tuple[Counter, Histogram]:
            return requests.labels(path, status), seconds.labels(path)

        return find_route, errors.labels

    def _define_models(self) -> tuple[Any, ...]:
        """Create the metrics of models, in the order of the fields of `ModelMetrics`."""
        counter, seconds = self._counter, self._seconds
        return (
            counter("prompt_tokens", MODEL, "Tokens that the engine was given."),
            counter("scored_tokens", MODEL, "Tokens that the engine scored."),
            counter("generated_tokens", MODEL, "Tokens that the engine generated."),
            counter("prefix_cached_tokens", MODEL,
                    "Prompt tokens that the engine's prefix cache had."),
            counter("steered_tokens", MODEL,
                    "Tokens whose activations were steered, as receipts report them."),
            counter("result_cache_hits", MODEL, "Sequences answered without the engine."),
            counter("result_cache_misses", MODEL, "Sequences looked up, and given to the engine."),
            seconds("queue_seconds", MODEL,
                    "Time from a request's acceptance until the engine took its first job; of "
                    "requests that reached the engine."),
            seconds("engine_seconds", MODEL, "Time from then until the request's last result."),
            seconds("answer_seconds", MODEL,
                    "Time from a request's acceptance to its answer's end, of those answered."),
            seconds("time_to_first_token_seconds", MODEL,
                    "Time from a streamed request's acceptance to its first generated token."),
            seconds("time_between_tokens_seconds", MODEL,
                    "Time between two generated tokens of a streamed sequence; each token counts."),
        )  # fmt: skip

    def _define_keys(self) -> Any:
        """Return a lookup of a key's counters: requests, errors, three kinds of tokens."""
        requests = self._counter(
            "key_requests",
            ("key",),
            f"Requests of a key, by name; beyond {MAX_KEYS} names: key {OTHER_KEYS}.",
        )
        errors = self._counter(
            "key_errors", ("key",), "Requests of a key that ended with a problem."
        )
        tokens = self._counter(
            "key_tokens",
            ("key", "kind"),
            "Tokens of a key's answers, those of known results too; kind: prompt, scored, "
            "generated.",
        )

        @cache
        def find_key(key: str) -> tuple[Counter, ...]:
            kinds = (tokens.labels(key, kind) for kind in ("prompt", "scored", "generated"))
            return requests.labels(key), errors.labels(key), *kinds

        return find_key

    def _make(
        self, kind: Callable[..., Any], name: str, labels: tuple[str, ...], text: str, **more: Any
    ) -> Any:
        self.labels[PREFIX + name] = labels
        return kind(PREFIX + name, text, labels, registry=self.registry, **more)

    def rename(self) -> Iterator[Metric]:
        """Yield counters and histograms of models once more, under vLLM's names and labels."""
        for metric in self._of_model:
            (own,) = metric.collect()
            if (other := VLLM_NAMES.get(own.name.removeprefix(PREFIX))) is None:
                continue
            family = Metric(VLLM + other, f"vLLM's name for {own.name}.", own.type)
            for sample in own.samples:
                labels = {"model_name": sample.labels["model"], "engine": "0"}
                labels |= {name: sample.labels[name] for name in ("le",) if name in sample.labels}
                name = family.name + sample.name.removeprefix(own.name)
                family.add_sample(name, labels, sample.value)
            yield family

    def for_model(self, model: str) -> ModelMetrics:
        """Return a model's metrics, which are exposed from now on, initially 0."""
        return ModelMetrics(*(metric.labels(model) for metric in self._of_model))

    def record_request(self, path: str, status: int, seconds: float, code: str = "") -> None:
        """Count an answered request, with the code of its problem, if any."""
        requests, times = self._find_route(path, str(status))
        requests.inc()
        times.observe(seconds)
        if code:
            self._find_error(path, code).inc()

    def record_key(self, key: str, failed: bool, tokens: Sequence[int]) -> None:
        """Count a request of a key, and its prompt, scored and generated tokens."""
        if key not in self._keys and len(self._keys) >= self._max_keys:
            key = OTHER_KEYS
        self._keys.add(key)
        requests, errors, *counters = self._find_key(key)
        requests.inc()
        errors.inc(failed)
        for counter, count in zip(counters, tokens, strict=True):
            counter.inc(count)

    def render(self) -> bytes:
        """Render all metrics in Prometheus' text format, of type METRICS_TYPE."""
        return generate_latest(self.registry)


class LiveCollector(Collector):
    """Read models, engines and the disk at each scrape.

    Every family is exposed at each scrape, also without samples.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        for row in (*OF_MODELS, *OF_ENGINES, *OF_HEARTBEATS, *OF_PROCESSES, *OF_DEVICES, *OF_DISK):
            metrics.labels[_spell_name(row)] = row.labels
        metrics.labels |= {VLLM + name: VLLM_ENGINE for name in VLLM_NAMES.values()}
        metrics.labels[PREFIX + STEP_SECONDS] = ENGINE
        metrics.labels[PREFIX + "store_bytes"] = ("kind", "owner")
        metrics.labels[PREFIX + "store_limit_bytes"] = ("kind",)

    def describe(self) -> list[Metric]:
        """Return no families, so that registration collects nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every family with its current values."""
        models = list(self._metrics.read_models())
        engines = [((m.model, e.replica), e) for m in models for e in m.engines]
        heartbeats = [(labels, e.reading) for labels, e in engines if e.reading is not None]
        disk = self._metrics.read_disk()
        yield from _read(OF_MODELS, [((m.model,), m) for m in models])
        yield from _read(OF_ENGINES, engines)
        yield _read_steps(engines)
        yield from _read(OF_HEARTBEATS, heartbeats)
        yield from _read(
            OF_PROCESSES,
            [
                (labels, process)
                for labels, e in engines
                if e.pid is not None and (process := read_family(e.pid)) is not None
            ],
        )
        yield from _read(
            OF_DEVICES,
            [((*labels, memory.device), memory) for labels, r in heartbeats for memory in r.memory],
        )
        yield from _read(OF_DISK, [((), disk)])
        yield from _read_stores(disk)
        yield from self._metrics.rename()


def _spell_name(row: LiveMetric) -> str:
    return row.name if VLLM in row.name else PREFIX + row.name


def _read(
    rows: Iterable[LiveMetric], sources: Sequence[tuple[tuple[str, ...], Any]]
) -> Iterator[Metric]:
    """Yield a family for each row, with a sample for each source that has a value."""
    for row in rows:
        family = row.family(_spell_name(row), row.text, labels=row.labels)
        for labels, source in sources:
            if (value := row.read(source)) is not None:
                family.add_metric(labels, float(value))
        yield family


def _read_steps(engines: Iterable[tuple[tuple[str, str], EngineStatus]]) -> Metric:
    family = HistogramMetricFamily(PREFIX + STEP_SECONDS, STEP_SECONDS_TEXT, labels=ENGINE)
    bounds = [*map(floatToGoString, TIME_BOUNDS_S), "+Inf"]
    for labels, engine in engines:
        if (steps := engine.steps) is not None:
            buckets = list(zip(bounds, map(float, accumulate(steps.counts)), strict=True))
            family.add_metric(labels, buckets, steps.total_s)
    return family


def _read_stores(disk: DiskReading) -> Iterator[Metric]:
    held = GaugeMetricFamily(PREFIX + "store_bytes", STORE_BYTES, labels=("kind", "owner"))
    limit = GaugeMetricFamily(PREFIX + "store_limit_bytes", STORE_LIMIT, labels=("kind",))
    for kind, by_owner in disk.held.items():
        for owner, num_bytes in by_owner.items():
            held.add_metric((kind, owner), num_bytes)
        limit.add_metric((kind,), disk.limit_bytes)
    yield held
    yield limit
