"""Spans on their way to a collector: OTLP over HTTP, out of a server process as users run it."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import TracerProvider

from logsteer import Client
from logsteer_server.observation.tracing import FLUSH_S
from tests.conftest import fake_model
from tests.servers import Server

pytestmark = pytest.mark.full

PHASES = ["admission", "planning", "queue", "engine", "answer"]
ENVIRONMENT = {
    "OTEL_SERVICE_NAME": "spoken-of",
    "OTEL_BSP_SCHEDULE_DELAY": "200",  # ms until spans are sent
    "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=ours",
}
LOST = "Failed to export span"


@dataclass
class Collector:
    """Who receives spans: the requests that came, as OpenTelemetry's protocol has them."""

    port: int = 0
    requests: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = field(
        default_factory=list
    )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def find_spans(self) -> list[Any]:
        """Every span that has come."""
        return [
            span
            for _, _, request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def wait_for(self, name: str, count: int = 1) -> list[Any]:
        """The spans of the traces that have so many spans of a name, once they have come."""
        deadline = time.monotonic() + 60
        while True:
            spans = self.find_spans()
            traces = {span.trace_id for span in spans if span.name == name}
            if len(traces) >= count:
                return [span for span in spans if span.trace_id in traces]
            assert time.monotonic() < deadline, [span.name for span in spans]
            time.sleep(0.05)


@contextmanager
def collect(port: int = 0) -> Iterator[Collector]:
    """A collector of traces on a port of this machine."""
    collector = Collector()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent = ExportTraceServiceRequest.FromString(body)
            headers = {name.lower(): value for name, value in self.headers.items()}
            collector.requests.append((self.path, headers, sent))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Receiver) as http:
        collector.port = http.server_port
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            http.shutdown()
            thread.join()


@contextmanager
def serve(directory: Path, endpoint: str) -> Iterator[Server]:
    """A server of the fake engine that sends its spans to an address."""
    config = {"models": [fake_model("fake", delay_s=0.05)], "tracing": True}
    server = Server.start(config, directory, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, **ENVIRONMENT)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def read_attributes(attributes: Any) -> dict[str, Any]:
    """Attributes of the protocol as plain values."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in attributes
    }


def score(client: Client) -> None:
    client.logprob(items=[{"context_ids": [5, 6, 7], "target_ids": [[8, 9]]}], cache=False)


def test_a_collector_gets_the_callers_trace_continued(tmp_path: Path) -> None:
    with collect() as collector, serve(tmp_path, collector.url) as server:
        with Client(server.url) as client:
            tracer = TracerProvider().get_tracer("caller")
            with tracer.start_as_current_span("study") as caller:
                score(client)
        above = caller.get_span_context()
        spans = [
            span
            for span in collector.wait_for("POST /logprob")
            if span.trace_id == above.trace_id.to_bytes(16, "big")
        ]
        path, headers, request = collector.requests[0]
        (resource,) = [read_attributes(one.resource.attributes) for one in request.resource_spans]
    assert path == "/v1/traces"
    assert (headers["content-type"], headers["x-tenant"]) == ("application/x-protobuf", "ours")
    assert resource["service.name"] == "spoken-of"
    (top,) = [span for span in spans if span.name == "POST /logprob"]
    assert top.parent_span_id == above.span_id.to_bytes(8, "big")
    children = [span for span in spans if span is not top]
    assert sorted(span.name for span in children) == sorted(PHASES)
    assert {span.parent_span_id for span in children} == {top.span_id}
    attributes = read_attributes(top.attributes)
    assert (attributes["logsteer.model"], attributes["logsteer.scored_tokens"]) == ("fake", 2)


def test_what_waits_is_sent_when_the_server_ends(tmp_path: Path) -> None:
    with collect() as collector:
        environment = {
            **ENVIRONMENT,
            "OTEL_BSP_SCHEDULE_DELAY": "600000",
            # A start has as many spans as it is asked for how far it is.
            "OTEL_BSP_MAX_QUEUE_SIZE": "100000",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "100000",
        }
        config = {"models": [fake_model("fake")], "tracing": True}
        server = Server.start(
            config, tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, **environment
        )
        try:
            server.wait_until_ready()
            with Client(server.url) as client:
                score(client)
            assert not collector.requests
        finally:
            server.stop()
        assert collector.wait_for("POST /logprob")


def test_without_a_collector_the_service_says_so_and_answers(tmp_path: Path) -> None:
    # Nobody listens there, and nobody else gets it.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    with held, serve(tmp_path, f"http://127.0.0.1:{port}") as server, Client(server.url) as client:
        slowest_s = 0.0
        deadline = time.monotonic() + 60
        while LOST not in server.output:
            assert time.monotonic() < deadline, server.output
            started = time.monotonic()
            score(client)
            slowest_s = max(slowest_s, time.monotonic() - started)
        with collect(port) as collector:
            score(client)
            collector.wait_for("POST /logprob")
        for _ in range(3):  # it is away once more when the server ends
            score(client)
        started = time.monotonic()
        server.stop()
        stopped_s = time.monotonic() - started
    assert any(f"port={port}" in line for line in server.lines), "it says who does not answer"
    assert not any("Traceback" in line for line in server.lines)
    assert len(server.lines) < 60
    assert slowest_s < 5
    assert stopped_s < FLUSH_S + 10
