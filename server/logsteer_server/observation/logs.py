"""Logs of this process and of engines, as text or JSON; the access log and the audit log.

A JSON line is one object with the fields listed in `docs/operating.md`. No line contains a prompt,
a vector's numbers or a key: the fields of a request are those of `RequestRecord`.
"""

import logging
import logging.config
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

LogFormat = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
ACCESS = "logsteer.access"
"""The logger of the access log, one line for each request."""
AUDIT = "logsteer.audit"
"""The logger of the audit log: requests with the scopes write and admin."""
FIELDS = "fields"
"""The attribute of a log record with additional fields."""

CURRENT_REQUEST: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the current request; empty outside of requests."""


@dataclass(frozen=True, slots=True)
class LogStyle:
    """The format of log lines, and the lowest level."""

    format: LogFormat = "text"
    level: str = "info"


class JsonFormatter(logging.Formatter):
    """Format a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if request_id := CURRENT_REQUEST.get():
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line.update(getattr(record, FIELDS, ()))
        return orjson.dumps(line, default=str).decode()


class TextFormatter(logging.Formatter):
    """Format a log record as text, with additional fields as `name=value` after the message."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        fields: Mapping[str, Any] = getattr(record, FIELDS, {})
        shown = (f" {name}={value}" for name, value in fields.items() if value is not None)
        return super().format(record) + "".join(shown)


def configure_logs(style: LogStyle, *, access: bool = False) -> None:
    """Configure all logs of this process: standard error in a style.

    The audit log is always written, the access log if asked for, both whatever the lowest level.
    """
    formatter = JsonFormatter if style.format == "json" else TextFormatter
    logging.config.dictConfig({
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            "httpx": {"level": "WARNING"},
            ACCESS: {"level": "INFO" if access else "WARNING"},
            AUDIT: {"level": "INFO"},
        },
        "root": {"level": style.level.upper(), "handlers": ["stderr"]},
    })  # fmt: skip
    logging.captureWarnings(style.format == "json")


def configure_engine_logs(style: LogStyle) -> None:
    """Configure the logs of an engine's process: warnings and errors, or everything for debug.

    Lower levels there come from libraries.
    """
    is_as_asked = style.level in ("debug", "error")
    configure_logs(style if is_as_asked else LogStyle(style.format, "warning"))


def restyle_libraries(style: LogStyle) -> None:
    """Apply a style to the handlers of libraries."""
    if style.format == "json":
        for found in list(logging.root.manager.loggerDict.values()):
            for handler in getattr(found, "handlers", ()):
                handler.setFormatter(JsonFormatter())
