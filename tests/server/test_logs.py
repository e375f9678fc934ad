"""Log lines: what they say of requests, changes and failures, and what they must never say.

And traces: a request's span with its phases, below the caller's own, which the client passes on.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from safetensors.numpy import save

from logsteer import Client
from logsteer._endpoints import ENDPOINTS
from logsteer_server import app as app_module
from logsteer_server.observation import tracing
from logsteer_server.observation.logs import (
    ACCESS,
    AUDIT,
    FIELDS,
    LogStyle,
    TextFormatter,
    configure_engine_logs,
    configure_logs,
)
from logsteer_server.observation.tracing import MAX_PHASES, Phase, RequestTracer
from logsteer_server.settings import ConfigurationError, Settings
from tests.conftest import ROOT, fake_model
from tests.faults.keys import add_key, connect, serve
from tests.faults.processes import wait_for
from tests.servers import Server

MARK = "xylophonequartz"
NUMBER = 0.12345678901
FAIL, CRASH = 1301, 1302
WRONG = "ls_0123456789ab_" + "W" * 43
KEYS: dict[str, str] = {}

TEXT = f"once upon a {MARK}"
ITEMS = [{"context": TEXT, "targets": [f" {MARK}"]}]
CHAT = [{"role": "user", "content": TEXT}]
INLINE = {"vectors": [{"data": {"1": [NUMBER] * 16}, "op": "ablate"}]}
VECTOR = save({"layers.1": np.full(16, NUMBER, np.float32)})
PAIRS = [{"positive": f"{n} {TEXT}", "negative": f"{n} {TEXT} again"} for n in range(4)]
SAME = {"positive": "a not so end", "negative": "a so not end"}

REQUESTS: dict[str, tuple[str, Any]] = {
    "models": ("/models", None),
    "model": ("/models/fake", None),
    "selftest": ("/models/fake/selftest", {}),
    "health": ("/healthz", None),
    "ready": ("/readyz", None),
    "metrics": ("/metrics", None),
    "logprob": ("/logprob", {"items": ITEMS, "steering": INLINE}),
    "diagnostics": ("/diagnostics", {"items": ITEMS}),
    "divergence": ("/divergence", {"items": ITEMS, "reference": {}}),
    "perplexity": ("/perplexity", {"texts": [TEXT], "stream": True}),
    "perplexity_stream": ("/perplexity/stream", TEXT.encode()),
    "generate": ("/generate", {"prompts": [TEXT], "max_tokens": 4, "stream": True}),
    "steer": ("/steer", {"prompts": [TEXT], "max_tokens": 4, "steering": INLINE}),
    "sweep": ("/sweep", {"items": ITEMS, "steering": INLINE, "scales": [0, 1]}),
    "patch": ("/patch", {"pairs": [{"clean": ITEMS[0], "corrupted": ITEMS[0]}]}),
    "lens": ("/lens", {"items": ITEMS}),
    "gradient": ("/gradient", {"items": ITEMS, "wrt": {"layers": [1]}}),
    "activations": ("/activations", {"items": [{"text": TEXT}], "layers": [1]}),
    "vectors.list": ("/vectors", None),
    "vectors.put": ("/vectors/stored", VECTOR),
    "vectors.get": ("/vectors/stored", None),
    "vectors.download": ("/vectors/stored/content", None),
    "vectors.train": ("/vectors/train", {"name": "trained", "pairs": PAIRS, "layers": [1]}),
    "vectors.combine": ("/vectors/both/combine", {"vectors": [{"name": "stored"}]}),
    "vectors.delete": ("/vectors/stored", None),
    "overrides.list": ("/overrides", None),
    "overrides.put": ("/overrides/stored", VECTOR),
    "overrides.get": ("/overrides/stored", None),
    "overrides.delete": ("/overrides/stored", None),
    "adapters.list": ("/adapters", None),
    "adapters.put": ("/adapters/stored", VECTOR),
    "adapters.get": ("/adapters/stored", None),
    "adapters.delete": ("/adapters/stored", None),
    "saes.list": ("/saes", None),
    "saes.put": ("/saes/stored", VECTOR),
    "saes.get": ("/saes/stored", None),
    "saes.delete": ("/saes/stored", None),
    "captures.put": ("/captures/stored/source", json.dumps(TEXT).encode()),
    "captures.start": ("/captures", {"name": "stored", "layers": [1]}),
    "captures.list": ("/captures", None),
    "captures.get": ("/captures/stored", None),
    "captures.index": ("/captures/stored/index", None),
    "captures.pause": ("/captures/stored/pause", None),
    "captures.resume": ("/captures/stored/resume", None),
    "captures.shard": ("/captures/stored/shards/0", None),
    "captures.statistics": ("/captures/stored/statistics", None),
    "captures.delete": ("/captures/stored", None),
    "variants.put": ("/variants/stored", {"steering": "stored:1@0"}),
    "variants.list": ("/variants", None),
    "variants.get": ("/variants/stored", None),
    "variants.delete": ("/variants/stored", None),
    "tokenize": ("/tokenize", {"texts": [TEXT]}),
    "detokenize": ("/detokenize", {"token_ids": [[5, 6]]}),
    "tokenizer_info": ("/tokenizer_info", None),
    "v1.models": ("/v1/models", None),
    "v1.model": ("/v1/models/fake", None),
    "v1.completions": ("/v1/completions", {"prompt": TEXT, "max_tokens": 4, "logprobs": 1}),
    "v1.chat.completions": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4}),
    "v1.score": ("/v1/score", {"query": TEXT, "items": [TEXT], "label_token_ids": [5, 6]}),
    "vllm.health": ("/health", None),
    "vllm.ping": ("/ping", None),
    "vllm.post_ping": ("/ping", None),
    "vllm.version": ("/version", None),
    "vllm.server_info": ("/server_info", None),
    "vllm.get_world_size": ("/get_world_size", None),
    "vllm.reset_prefix_cache": ("/reset_prefix_cache", None),
    "drain_model": ("/models/fake/drain?wait_s=30", None),
    "unload_model": ("/models/fake/unload?wait_s=30", None),
    "load_model": ("/models/fake/load?wait_s=30", None),
    "reload": ("/admin/reload?wait_s=30", None),
    "startup": ("/startupz", None),
}


def send(http: httpx.Client, name: str, **headers: str) -> httpx.Response:
    path, body = REQUESTS[name]
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    return http.request(
        ENDPOINTS[name].method, path, headers=headers, **({} if body is None else given)
    )


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that logs all it can, after requests to every endpoint, right and wrong ones."""
    directory = tmp_path_factory.mktemp("logged")
    keys = directory / "keys.json"
    KEYS["ann"] = add_key(keys, "ann", "score", "steer", "write", "admin")
    KEYS["bob"] = add_key(keys, "bob", "score")
    config = {
        "models": [fake_model("fake", fail_id=FAIL, crash_id=CRASH)],
        "key_file": str(keys),
        "log_level": "debug",
        "log_format": "json",
        "access_log": True,
    }
    with serve(config, directory / "server") as server:
        with connect(server, KEYS["ann"]) as http:
            answers = {name: send(http, name).status_code for name in REQUESTS}
            failing = {"items": [{"context_ids": [5, FAIL], "target_ids": [[8]]}]}
            http.post("/logprob", json=failing, headers={"X-Request-Id": "failing-1"})
            http.post("/logprob", content=f'{{"items": "{MARK}'.encode())
            http.post("/logprob", json={"items": ITEMS, MARK: MARK})
            http.post("/vectors/train", json={"name": "same", "pairs": [SAME] * 4})
            http.post("/logprob", json={"items": ITEMS, "model": MARK})
            http.get(f"/{MARK}/{KEYS['ann']}", params={"q": MARK})
        done = ("logprob", "generate", "steer", "vectors.put", "load_model", "reload")
        assert {answers[name] for name in done} == {200}
        with connect(server, KEYS["bob"]) as http:
            send(http, "vectors.put")
        for token in (WRONG, KEYS["ann"][:-1] + "_"):
            with connect(server, token) as http:
                send(http, "vectors.put")
        with connect(server, KEYS["ann"]) as http:
            crashing = {"items": [{"context_ids": [5, CRASH], "target_ids": [[8]]}]}
            http.post("/logprob", json=crashing, headers={"X-Request-Id": "crashing-1"})
        yield server


def read_lines(server: Server, logger: str = "") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.output.splitlines() if line]
    return [line for line in lines if line["logger"].startswith(logger)]


def test_every_endpoint_is_asked() -> None:
    assert set(REQUESTS) == set(ENDPOINTS)


def test_no_line_has_a_prompt_a_number_of_a_vector_or_a_key(logged: Server) -> None:
    text = logged.output
    assert '"level":"debug"' in text, "everything is logged"
    secrets = [token[-43:] for token in (*KEYS.values(), WRONG)]
    for secret in (MARK, str(NUMBER)[:8], *KEYS.values(), WRONG, *secrets):
        assert secret not in text


def test_lines_have_the_fields_that_the_documentation_lists(logged: Server) -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    entry = r"^- (every line|access and audit|access|audit): (.*?)(?=\n- |\n\n)"
    fields: dict[str, set[str]] = {}
    for lines, names in re.findall(entry, page, re.MULTILINE | re.DOTALL):
        kinds = {"all"} if lines == "every line" else set(lines.split(" and "))
        fields |= dict.fromkeys(re.findall(r"`(\w+)`", names), kinds)
    known = {line: {name for name, lines in fields.items() if lines & {line, "all"}}
             for line in ("all", "access", "audit")}  # fmt: skip
    needed = {line: {name for name, lines in fields.items() if line in lines} for line in known}
    seen: set[str] = set()
    for line in read_lines(logged):
        kind = line["logger"].removeprefix("logsteer.")
        kind = kind if kind in ("access", "audit") else "all"
        assert set(line) <= known[kind], line
        assert kind == "all" or set(line) >= needed[kind], line
        seen |= set(line)
    assert seen == set(fields)


def test_a_request_is_one_line_of_the_access_log(logged: Server) -> None:
    lines = read_lines(logged, ACCESS)
    (steered,) = [line for line in lines if line["route"] == "/steer"]
    assert (steered["key"], steered["model"], steered["status"]) == ("ann", "fake", 200)
    assert steered["generated_tokens"] == 4
    assert steered["ms"] > 0 and steered["response_bytes"] > 100 and steered["request_bytes"] > 50
    (unknown,) = [line for line in lines if line["route"] == "other"]
    assert (unknown["status"], unknown["code"]) == (404, "not_found")
    (tokenized,) = [line for line in lines if line["route"] == "/tokenize"]
    assert tokenized["model"] == "fake"
    streamed = [line for line in lines if line["route"] == "/generate"]
    assert [line["generated_tokens"] for line in streamed].count(4) == 1, "others: the self-test's"


def test_changes_and_refusals_are_in_the_audit_log(logged: Server) -> None:
    lines = read_lines(logged, AUDIT)
    scopes = {
        (ENDPOINTS[name].method, ENDPOINTS[name].path.partition("{")[0].rstrip("/")): name
        for name in ENDPOINTS
        if ENDPOINTS[name].scope in ("write", "admin")
    }
    told = {(line["method"], line["route"].partition("{")[0].rstrip("/")) for line in lines}
    assert told == set(scopes)
    mine = [line for line in lines if line["key"] == "ann" and line["method"] == "PUT"]
    stored = next(line for line in mine if line["route"].startswith("/vectors"))
    assert (stored["name"], stored["result"], stored["scope"]) == ("stored", "done", "write")
    assert len(stored["sha256"]) == 64
    trained, same = (line for line in lines if line["route"] == "/vectors/train")
    assert (trained["name"], len(trained["sha256"])) == ("trained", 64)
    assert (same["name"], same["sha256"], same["result"]) == ("same", None, "refused")
    gone = [line for line in lines if line["method"] == "DELETE" and line["result"] == "done"]
    gone = [line for line in gone if not line["route"].startswith("/captures")]
    assert [(line["name"], line["sha256"]) for line in gone] == [("stored", stored["sha256"])]
    refused = {(line["key"], line["code"]) for line in lines if line["result"] == "refused"}
    assert refused >= {("bob", "forbidden"), (None, "unauthorized")}


def test_a_request_is_named_where_its_job_fails_in_the_engine(logged: Server) -> None:
    def read_own() -> list[dict[str, Any]]:
        return [x for x in read_lines(logged) if x["logger"].endswith("runtime.process")]

    wait_for(lambda: any("crashing-1" in line["message"] for line in read_own()))
    own = read_own()
    assert {line["process"] for line in own}.isdisjoint({logged.process.pid})
    (failed,) = [line for line in own if line.get("request_id") == "failing-1"]
    assert failed["level"] == "warning"
    (broke,) = [line for line in own if "crashing-1" in line["message"]]
    assert "the fake engine was told to crash" in broke["exception"]


def test_text_has_the_fields_behind_the_message() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "request %d", (1,), None)
    setattr(record, FIELDS, {"route": "/logprob", "key": None})
    assert TextFormatter().format(record).endswith("INFO x: request 1 route=/logprob")


@pytest.fixture
def restored() -> Iterator[None]:
    """The logs of this process are afterwards as they were."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before
    logging.captureWarnings(False)


def test_access_is_logged_if_asked_for_and_changes_always(restored: None) -> None:
    for access in (False, True):
        configure_logs(LogStyle("json", "error"), access=access)
        shown = [logging.getLogger(name).isEnabledFor(logging.INFO) for name in (ACCESS, AUDIT)]
        assert shown == [access, True]


def test_an_engine_logs_warnings_unless_all_is_asked_for(restored: None) -> None:
    levels = {}
    for level in ("debug", "info", "error"):
        configure_engine_logs(LogStyle("text", level))
        levels[level] = logging.getLogger().level
    assert levels == {"debug": 10, "info": 30, "error": 40}


# ------------------------------------------------------------------ traces


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
IDS_ITEMS = [{"context_ids": [5, 6, 7], "target_ids": [[8, 9]]}]
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
    answer = traced.http.post("/logprob", json={"items": IDS_ITEMS, "model": "xylophone"})
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
