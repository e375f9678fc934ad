"""What the server counts, for Prometheus, and the middleware that counts requests."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""From a request answered by the cache to the default request_timeout_s."""

METRICS_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OTHER = "other"
"""The path of requests that no route with a template took."""


@dataclass(frozen=True, slots=True)
class ModelCounters:
    """The counters of one model."""

    prompt_tokens: Counter
    scored_tokens: Counter
    prefix_cached_tokens: Counter
    cache_hits: Counter
    cache_misses: Counter


@dataclass(frozen=True, slots=True)
class ModelReading:
    """What a model is at right now."""

    model: str
    pending_tokens: int
    is_ready: bool
    restarts: int


class LiveReadings(Collector):
    """What is read when Prometheus asks, not counted as it happens."""

    def __init__(self) -> None:
        self.read_models: Callable[[], Iterable[ModelReading]] = tuple
        self.read_cache_bytes: Callable[[], int] = int
        self.read_pending_bytes: Callable[[], int] = int

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        pending = GaugeMetricFamily(
            "logsteer_pending_tokens", "Tokens of accepted unfinished work.", labels=["model"]
        )
        ready = GaugeMetricFamily(
            "logsteer_model_ready", "1 where the model answers, else 0.", labels=["model"]
        )
        restarts = CounterMetricFamily(
            "logsteer_engine_restarts", "Restarts of the model's engine.", labels=["model"]
        )
        for reading in self.read_models():
            pending.add_metric([reading.model], reading.pending_tokens)
            ready.add_metric([reading.model], float(reading.is_ready))
            restarts.add_metric([reading.model], reading.restarts)
        yield from (pending, ready, restarts)
        yield GaugeMetricFamily(
            "logsteer_pending_bytes",
            "Memory expected for requests and answers at work.",
            value=self.read_pending_bytes(),
        )
        yield GaugeMetricFamily(
            "logsteer_result_cache_bytes",
            "Memory that cached results take.",
            value=self.read_cache_bytes(),
        )


class Metrics:
    """All metrics of one application, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.live = LiveReadings()
        self._registry.register(self.live)
        self._requests = Counter(
            "logsteer_requests",
            "Requests answered, by route and status.",
            ["path", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "logsteer_request_seconds",
            "Time from a request's arrival to the end of its answer.",
            ["path"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._prompt_tokens = self._count("prompt_tokens", "Tokens that the engine was given.")
        self._scored_tokens = self._count("scored_tokens", "Tokens that the engine scored.")
        self._prefix_cached_tokens = self._count(
            "prefix_cached_tokens", "Prompt tokens that the engine's prefix cache had."
        )
        self._hits = self._count("result_cache_hits", "Sequences answered without the engine.")
        self._misses = self._count(
            "result_cache_misses", "Sequences looked up, and given to the engine."
        )

    def _count(self, name: str, text: str) -> Counter:
        return Counter(f"logsteer_{name}", text, ["model"], registry=self._registry)

    def for_model(self, model: str) -> ModelCounters:
        """Return a model's counters; they are reported from now on, at 0 where nothing happened."""
        return ModelCounters(
            self._prompt_tokens.labels(model),
            self._scored_tokens.labels(model),
            self._prefix_cached_tokens.labels(model),
            self._hits.labels(model),
            self._misses.labels(model),
        )

    def note_request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def render(self) -> bytes:
        """Everything in Prometheus' text format, of type METRICS_TYPE."""
        return generate_latest(self._registry)


class RequestMetrics:
    """ASGI middleware: counts and times every request under its route's template.

    The template, not the path, so that callers cannot make series without end.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # of an exception, which is answered outside of this

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started = time.perf_counter()
        try:
            await self._app(scope, receive, send_noting)
        finally:
            path = getattr(scope.get("route"), "path", OTHER)
            self._metrics.note_request(path, status, time.perf_counter() - started)
