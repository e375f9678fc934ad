"""What becomes known of a request on its way: for metrics, the access and audit log, and traces."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logsteer_server.contract.batches import WorkCounts
from logsteer_server.observation.logs import ACCESS, AUDIT, FIELDS
from logsteer_server.observation.metrics import Metrics
from logsteer_server.observation.tracing import Phase, RequestTracer

OTHER = "other"
"""The route of requests that no route with a template took."""
CRASHED = 500
"""The status of an exception, which is answered outside of `RequestObserver`."""
AUDITED = frozenset({"write", "admin"})
"""Scopes of endpoints whose requests are in the audit log."""


@dataclass(slots=True)
class UsageCounter:
    """The fields of `Usage`, counted as outputs come."""

    prompt_tokens: int = 0
    scored_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    cached_results: int = 0

    def add(self, work: WorkCounts) -> None:
        """Count work in."""
        self.prompt_tokens += work.prompt_tokens
        self.scored_tokens += work.scored_tokens
        self.generated_tokens += work.generated_tokens
        self.cached_tokens += work.cached_tokens

    def read(self) -> dict[str, int]:
        """Return the counts by name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What is known of one request so far; whoever comes to know more writes it here.

    `key` is the name of the caller's key, `scope` what the endpoint needs of one; `code` the
    problem that it was answered with. `stored` and `sha256` say what a write was about. Where
    nothing is traced, `phases` is None.
    """

    key: str = ""
    scope: str = ""
    model: str = ""
    code: str = ""
    stored: str = ""
    sha256: str = ""
    queue_s: float = 0.0
    usage: UsageCounter = field(default_factory=UsageCounter)
    phases: list[Phase] | None = None

    def record_answer(self, document: Mapping[str, Any]) -> None:
        """Note the model that an answer names, and of one to a write the card, or the name that is
        gone.
        """
        self.model = self.model or str(document.get("model") or "")
        if self.scope in AUDITED:
            card = document.get("vector", document)
            if isinstance(card, Mapping):
                self.stored = str(card.get("name") or self.stored)
                self.sha256 = str(card.get("sha256") or self.sha256)

    def note_phase(self, name: str, began: float, ended: float) -> None:
        """Note what the request was at from one moment to another, monotonic seconds."""
        if self.phases is not None:
            self.phases.append(Phase(name, began, ended))


def find_record(scope: Scope) -> RequestRecord:
    """Return the record of the request that a scope is of; a new one where none is kept."""
    found: RequestRecord = scope.setdefault("state", {}).setdefault("record", RequestRecord())
    return found


def find_route(scope: Scope) -> str:
    """Return the template of the route that answers a request; OTHER where none does."""
    return str(getattr(scope.get("route"), "path", OTHER))


class RequestObserver:
    """ASGI middleware: counts and times every request, and logs and traces it where asked.

    Under its route's template, not its path, so that callers cannot make series without end.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: RequestTracer | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._access = logging.getLogger(ACCESS)
        self._audit = logging.getLogger(AUDIT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the application does."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, sent = CRASHED, 0

        async def send_noting(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
                if self._tracer is not None and not message.get("more_body"):
                    # Because the middleware around this ends the span with this message.
                    trace(self._tracer)
            await send(message)

        def trace(tracer: RequestTracer) -> None:
            if record.phases is not None:
                seconds = time.monotonic() - started
                line = _describe_access(scope, record, status, seconds, sent)
                tracer.describe(line, record.phases)
                record.phases = None

        metrics, record = self._metrics, RequestRecord()
        record.phases = None if self._tracer is None else []
        scope.setdefault("state", {})["record"] = record
        started = time.monotonic()
        metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_noting)
        finally:
            ended = time.monotonic()
            metrics.in_flight.dec()
            if status == CRASHED and not record.code:
                record.code = "internal"
            metrics.record_request(find_route(scope), status, ended - started, record.code)
            if record.key:
                usage = record.usage
                tokens = usage.prompt_tokens, usage.scored_tokens, usage.generated_tokens
                metrics.record_key(record.key, bool(record.code), tokens)
            if self._access.isEnabledFor(logging.INFO):
                line = _describe_access(scope, record, status, ended - started, sent)
                self._access.info("request", extra={FIELDS: line})
            if record.scope in AUDITED:
                line = _describe_change(scope, record, status)
                self._audit.info("change", extra={FIELDS: line})
            if self._tracer is not None:
                trace(self._tracer)


def _describe(scope: Scope, record: RequestRecord, status: int) -> dict[str, Any]:
    """Return what both logs and a trace say of a request."""
    client = scope.get("client")
    return {
        "request_id": scope["state"].get("id", ""),
        "client": client[0] if client else None,
        "key": record.key or None,
        "method": scope["method"],
        "route": find_route(scope),
        "status": status,
        "code": record.code or None,
    }


def _describe_access(
    scope: Scope, record: RequestRecord, status: int, seconds: float, sent: int
) -> dict[str, Any]:
    """Return what the access log says of a request: its size, too, and what it took."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    return {
        **_describe(scope, record, status),
        "model": record.model or None,
        "ms": round(1e3 * seconds, 3),
        "queue_ms": round(1e3 * record.queue_s, 3),
        "request_bytes": int(length) if length.isdigit() else None,
        "response_bytes": sent,
        **record.usage.read(),
    }


def _describe_change(scope: Scope, record: RequestRecord, status: int) -> dict[str, Any]:
    """Return what the audit log says of a change: what it was done to, too."""
    given = scope.get("path_params", {})
    return {
        **_describe(scope, record, status),
        "scope": record.scope,
        "name": record.stored or given.get("name") or given.get("model_id"),
        "sha256": record.sha256 or None,
        "result": "refused" if record.code else "done",
    }
