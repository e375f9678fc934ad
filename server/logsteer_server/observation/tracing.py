"""Traces of requests for OpenTelemetry, where they are asked for and its packages are there.

A request is one span with a child for each of its phases, which are noted on the way as plain times
and become spans once it has ended. The standard variables (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and their kin) say where spans go and which are kept.
"""

import logging
import os
import threading
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


class SpanSender:
    """Sends spans by an exporter of OpenTelemetry's; says once that they are lost, and once that no
    more. The exporter would say so several times for each batch.
    """

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self._is_losing = False
        self._reason = ""
        self._chatter = logging.getLogger(type(exporter).__module__)
        self._chatter.addFilter(self._note_reason)

    def export(self, spans: Sequence[Any]) -> Any:
        """Send spans; return what OpenTelemetry calls the result."""
        self._reason = ""
        result = self._exporter.export(spans)
        loses = result.name != "SUCCESS"
        if loses and not self._is_losing:
            log.warning("spans cannot be sent, and are lost until they can: %s", self._reason)
        elif self._is_losing and not loses:
            log.warning("spans can be sent again")
        self._is_losing = loses
        return result

    def shutdown(self) -> None:
        """Send nothing more, nor try again what failed."""
        self._exporter.shutdown()

    def release(self) -> None:
        """Let the exporter speak for itself again."""
        self._chatter.removeFilter(self._note_reason)

    def _note_reason(self, record: logging.LogRecord) -> bool:
        # The first of a batch names the collector and the error; the last only says that it ends.
        self._reason = self._reason or record.getMessage()
        return False


class RequestTracer:
    """Makes spans of requests. `provider` is a `TracerProvider` of OpenTelemetry's, and `sender`
    what it sends them with, where that is somebody who may not be there.
    """

    def __init__(self, provider: Any, sender: SpanSender | None = None) -> None:
        from opentelemetry import propagate, trace

        self._provider = provider
        self._sender = sender
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
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

            name = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
            provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
            sender = None
            kind = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
            if kind == "console":
                provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
            elif kind != "none":
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                sender = SpanSender(OTLPSpanExporter())
                processor = BatchSpanProcessor(sender)  # type: ignore[arg-type]  # has its methods
                provider.add_span_processor(processor)
        except ImportError as error:
            detail = f"tracing needs what is missing ({error.name}): install logsteer[otel]"
            raise MissingTracingError(detail) from error
        return cls(provider, sender)

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
        """Send what waits to be sent, for FLUSH_S at most. Blocks.

        OpenTelemetry itself would try for 10 s with each batch, however many wait.
        """
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_S)
        if self._sender is not None:
            if ending.is_alive():
                self._sender.shutdown()
                ending.join(1)
            self._sender.release()
