"""Traces of requests for OpenTelemetry, where they are asked for and its packages are there.

A request is one span with a child for each of its phases, which are noted on the way as plain times
and become spans once it has ended. The standard variables (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and their kin) say where spans go and which are kept.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.types import Scope

log = logging.getLogger(__name__)

SERVICE = "logsteer"
MAX_PHASES = 128
"""Phases of one request that become spans: a long text may have thousands."""
FLUSH_S = 5
"""For spans that wait to be sent when the server ends."""

ATTRIBUTES = {
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "request_bytes": "http.request.body.size",
    "response_bytes": "http.response.body.size",
    "code": "error.type",
    "client": "client.address",
}
"""Fields of the access log that OpenTelemetry has names for; all others begin with the service."""


class Phase(NamedTuple):
    """What a request was at, from when to when: monotonic seconds."""

    name: str
    began: float
    ended: float


class MissingTracingError(Exception):
    """Traces were asked for, and what makes them is not installed."""


class RequestTracer:
    """Makes spans of requests. `provider` is a `TracerProvider` of OpenTelemetry's."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import propagate, trace

        self._provider = provider
        self._tracer = provider.get_tracer("logsteer_server")
        self._extract = propagate.extract
        self._trace = trace
        self._kind = trace.SpanKind.SERVER
        self._error = trace.Status(trace.StatusCode.ERROR)

    @classmethod
    def open(cls) -> "RequestTracer":
        """Return a tracer as the environment describes it. Errors: MissingTracingError."""
        try:
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import (
                BatchSpanProcessor,
                ConsoleSpanExporter,
                SpanExporter,
            )

            name = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
            provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
            exporter: SpanExporter | None = None
            kind = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
            if kind == "console":
                exporter = ConsoleSpanExporter()
            elif kind != "none":
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        except ImportError as error:
            detail = f"tracing needs what is missing ({error.name}): install logsteer[otel]"
            raise MissingTracingError(detail) from error
        if exporter is not None:
            provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def begin(self, scope: Scope) -> Any:
        """Begin the span of a request, below the one that its `traceparent` names."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        return self._tracer.start_span(
            scope["method"], self._extract(headers), self._kind, start_time=time.time_ns()
        )

    def end(self, span: Any, fields: Mapping[str, Any], phases: Sequence[Phase]) -> None:
        """End the span of a request, with what is known of it, and one for each of its phases."""
        now_ns, now = time.time_ns(), time.monotonic()

        def to_ns(moment: float) -> int:
            return now_ns - int(1e9 * (now - moment))

        if span.is_recording():
            span.update_name(f"{fields['method']} {fields['route']}")
            for name, value in fields.items():
                if value is not None:
                    span.set_attribute(ATTRIBUTES.get(name, f"{SERVICE}.{name}"), value)
            if fields["status"] >= 500:
                span.set_status(self._error)
            above = self._trace.set_span_in_context(span)
            for phase in phases[:MAX_PHASES]:
                child = self._tracer.start_span(phase.name, above, start_time=to_ns(phase.began))
                child.end(to_ns(phase.ended))
        span.end(now_ns)

    def close(self) -> None:
        """Send what waits to be sent, for some seconds. Blocks."""
        self._provider.force_flush(1000 * FLUSH_S)
        self._provider.shutdown()
