"""Traces: a request's span with its phases, below the caller's own, which the client passes on."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from fastapi.testclient import TestClient
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from logsteer import Client
from logsteer_server import app as app_module
from logsteer_server.observation import tracing
from logsteer_server.observation.tracing import MAX_PHASES, Phase, RequestTracer
from logsteer_server.settings import ConfigurationError, Settings
from tests.conftest import fake_model

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ITEMS = [{"context_ids": [5, 6, 7], "target_ids": [[8, 9]]}]
OPEN_TRACER = app_module.open_tracer
DRAW = {"prompt_ids": [[5, 6, 7]], "max_tokens": 4}


@dataclass
class Traced:
    """A server in this process, and the spans that it has made."""

    http: TestClient
    exporter: InMemorySpanExporter

    def take(self) -> dict[str, ReadableSpan]:
        """The spans of the latest request, by name."""
        spans = self.exporter.get_finished_spans()
        self.exporter.clear()
        return {span.name: span for span in spans}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    patch = pytest.MonkeyPatch()
    patch.setattr(app_module, "open_tracer", lambda: RequestTracer(provider))
    directory = tmp_path_factory.mktemp("traced")
    model = fake_model("fake", delay_s=0.05)
    settings = Settings(models=[model], store_directory=directory, tracing=True)
    with TestClient(app_module.create_app(settings), base_url="http://localhost") as http:
        while http.get("/readyz").status_code != 200:
            pass
        exporter.clear()
        yield Traced(http, exporter)
    patch.undo()


PHASES = ["admission", "planning", "queue", "engine", "answer"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_has_a_span_for_each_phase(traced: Traced, streams: bool) -> None:
    body = DRAW | {"stream": streams}
    answer = traced.http.post("/generate", json=body, headers={"traceparent": PARENT})
    assert answer.status_code == 200
    spans = traced.take()
    top = spans.pop("POST /generate")
    assert list(spans) == PHASES
    assert top.kind == trace.SpanKind.SERVER
    assert f"{top.parent.trace_id:032x}-{top.parent.span_id:016x}" == PARENT[3:-3]
    assert top.attributes["http.response.status_code"] == 200
    assert top.attributes["http.route"] == "/generate"
    assert top.attributes["logsteer.model"] == "fake"
    assert top.attributes["logsteer.generated_tokens"] == 4
    assert top.attributes["logsteer.request_id"] == answer.headers["x-request-id"]
    last = 0
    for name in PHASES:
        span = spans[name]
        assert span.parent is not None and span.context is not None and top.context is not None
        assert span.parent.span_id == top.context.span_id
        assert last <= span.start_time + 1000 <= span.end_time + 2000, "clocks differ by rounding"
        last = span.end_time
    took = spans["engine"].end_time - spans["engine"].start_time  # type: ignore[operator]
    assert took >= 0.05e9, "the engine's step"
    assert spans["admission"].start_time >= top.start_time - 1000  # type: ignore[operator]
    assert last <= top.end_time + 1000


def test_a_span_says_how_its_request_failed_and_nothing_of_its_text(traced: Traced) -> None:
    answer = traced.http.post("/logprob", json={"items": ITEMS, "model": "xylophone"})
    assert answer.status_code == 404
    (span,) = traced.take().values()
    assert span.attributes["error.type"] == "unknown_model"
    assert span.status.is_unset, "a caller's mistake is no fault"
    assert "xylophone" not in span.to_json()


def test_a_request_without_a_parent_begins_a_trace(traced: Traced) -> None:
    traced.http.get("/models")
    (span,) = traced.take().values()
    assert (span.name, span.parent) == ("GET /models", None)


def test_the_client_passes_the_active_span_on() -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json={"status": "ok", "version": "1"})

    with Client("http://server", transport=httpx.MockTransport(answer)) as client:
        client.health()
        with TracerProvider().get_tracer("test").start_as_current_span("caller") as span:
            client.health()
    assert "traceparent" not in sent[0].headers
    context = span.get_span_context()
    expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    assert sent[1].headers["traceparent"] == expected


def test_without_the_packages_the_settings_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"install logsteer-server\[otel\]"):
        OPEN_TRACER()


@pytest.mark.parametrize("kind", ["none", "console", "otlp"])
def test_the_standard_variables_say_where_spans_go(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", kind)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracer = RequestTracer.open()
    assert tracer._provider.resource.attributes["service.name"] == "mine"
    with tracer._tracer.start_as_current_span("a request") as span:
        assert not span.is_recording()
        tracer.describe({"method": "GET", "route": "/", "status": 200}, [])
    monkeypatch.setattr(tracing, "FLUSH_S", 1)
    tracer.close()


def test_a_long_text_has_a_bounded_number_of_spans() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    phases = [Phase("engine", 0.0, 1.0)] * 1000
    with provider.get_tracer("test").start_as_current_span("request"):
        fields = {"method": "GET", "route": "/", "status": 200}
        RequestTracer(provider).describe(fields, phases)
    assert len(exporter.get_finished_spans()) == MAX_PHASES + 1
