"""Traces of requests with OpenTelemetry, if enabled and installed.

OpenTelemetry's middleware creates the span of a request, as a child of the caller's. The server
adds the fields of its access log as attributes, and a child span for each phase of the request,
recorded as plain times. The standard variables (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER and others) configure export and sampling.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.types import ASGIApp

SERVICE = "logsteer"
MAX_PHASES = 128
"""Phases of one request that become spans, at most; a long text may have thousands."""
FLUSH_S = 5
"""Time to send the remaining spans at shutdown; OpenTelemetry alone would take 10 s for each
batch."""

ATTRIBUTES = {
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "request_bytes": "http.request.body.size",
    "response_bytes": "http.response.body.size",
    "code": "error.type",
    "client": "client.address",
}
"""OpenTelemetry's names for fields of the access log; all others get the service's prefix."""


class Phase(NamedTuple):
    """A phase of a request: its name, start and end in monotonic seconds."""

    name: str
    began: float
    ended: float


class RequestTracer:
    """Create spans of requests. `provider` is a `TracerProvider` of OpenTelemetry."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace

        self._provider = provider
        self._tracer = provider.get_tracer("logsteer_server")
        self._trace = trace

    @classmethod
    def open(cls) -> "RequestTracer":
        """Return a tracer configured by the environment. Errors: ImportError without packages."""
        # Names of attributes as the stable conventions have them; the instrumentation reads it.
        os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")
        import opentelemetry.instrumentation.asgi  # noqa: F401  # it is asked for later
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider, export

        name = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
        resource = Resource.create({SERVICE_NAME: name})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        kind = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
        exporter: export.SpanExporter | None = None
        if kind == "console":
            exporter = export.ConsoleSpanExporter()
        elif kind != "none":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        if exporter is not None:
            provider.add_span_processor(export.BatchSpanProcessor(exporter))
        return cls(provider)

    def instrument(self, app: ASGIApp) -> ASGIApp:
        """Wrap the application in OpenTelemetry's middleware."""
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

        wrapped: ASGIApp = OpenTelemetryMiddleware(
            app, tracer_provider=self._provider, exclude_spans=["receive", "send"]
        )
        return wrapped

    def describe(self, fields: Mapping[str, Any], phases: Sequence[Phase]) -> None:
        """Add the access log's fields to the current span, and a child for each phase."""
        span = self._trace.get_current_span()
        if not span.is_recording():
            return
        span.update_name(f"{fields['method']} {fields['route']}")
        for name, value in fields.items():
            if value is not None:
                span.set_attribute(ATTRIBUTES.get(name, f"{SERVICE}.{name}"), value)
        offset_s = time.time() - time.monotonic()
        for phase in phases[:MAX_PHASES]:
            began, ended = (int(1e9 * (moment + offset_s)) for moment in phase[1:])
            self._tracer.start_span(phase.name, start_time=began).end(ended)

    def close(self) -> None:
        """Send the remaining spans, for at most FLUSH_S. Blocks."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_S)
