"""The record of a request, for metrics, the access log, the audit log and traces."""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logsteer_server.contract.batches import WorkCounts
from logsteer_server.observation.logs import ACCESS, AUDIT, FIELDS
from logsteer_server.observation.metrics import Metrics
from logsteer_server.observation.tracing import Phase, RequestTracer

OTHER = "other"
"""The route label of requests that match no route."""
CRASHED = 500
"""The status of an unhandled exception, which is answered outside of `RequestObserver`."""
AUDITED = frozenset({"write", "admin"})
"""Scopes whose requests are in the audit log."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Facts about one request, collected while it runs.

    `key`: the name of the caller's key; `scope`: the scope that the endpoint needs; `code`: the
    problem in the answer; `stored` and `sha256`: the name and content of a write; `phases`: None
    without tracing.
    """

    key: str = ""
    scope: str = ""
    model: str = ""
    code: str = ""
    stored: str = ""
    sha256: str = ""
    queue_s: float = 0.0
    usage: WorkCounts = field(default_factory=WorkCounts)
    phases: list[Phase] | None = None

    def record_answer(self, document: Mapping[str, Any]) -> None:
        """Record the answer's model, and for a write its card, or the deleted name."""
        self.model = self.model or str(document.get("model") or "")
        if self.scope in AUDITED:
            card = document.get("vector", document)
            if isinstance(card, Mapping):
                self.stored = str(card.get("name") or self.stored)
                self.sha256 = str(card.get("sha256") or self.sha256)

    def record_phase(self, name: str, began: float, ended: float) -> None:
        """Record a phase of the request, from and to monotonic seconds."""
        if self.phases is not None:
            self.phases.append(Phase(name, began, ended))


def find_record(scope: Scope) -> RequestRecord:
    """Return the record of a scope's request; a new one if it has none yet."""
    found: RequestRecord = scope.setdefault("state", {}).setdefault("record", RequestRecord())
    return found


def find_route(scope: Scope) -> str:
    """Return the template of a request's route; OTHER without one."""
    return str(getattr(scope.get("route"), "path", OTHER))


class RequestObserver:
    """ASGI middleware: count and time every request, and log and trace it if configured.

    Series are labelled by the route's template, not the path, so that callers cannot create any.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: RequestTracer | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._access = logging.getLogger(ACCESS)
        self._audit = logging.getLogger(AUDIT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and record it."""
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
    """Return the fields of a request that both logs and traces have."""
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
    """Return the access log's fields of a request, with its size and durations."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    return {
        **_describe(scope, record, status),
        "model": record.model or None,
        "ms": round(1e3 * seconds, 3),
        "queue_ms": round(1e3 * record.queue_s, 3),
        "request_bytes": int(length) if length.isdigit() else None,
        "response_bytes": sent,
        **asdict(record.usage),
    }


def _describe_change(scope: Scope, record: RequestRecord, status: int) -> dict[str, Any]:
    """Return the audit log's fields of a change, with its object."""
    given = scope.get("path_params", {})
    return {
        **_describe(scope, record, status),
        "scope": record.scope,
        "name": record.stored or given.get("name") or given.get("model_id"),
        "sha256": record.sha256 or None,
        "result": "refused" if record.code else "done",
    }
