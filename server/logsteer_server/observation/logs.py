"""Log lines: as text or as JSON, of this process and of engines; requests, and what was changed.

A line of JSON is one object with the fields of `docs/logs.md`. No line has a prompt, a
vector's numbers or a key: what is logged of a request is what `RequestRecord` has.
"""

import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, Literal

import orjson

from logsteer_server.observation.log_limits import RepeatFilter

LogFormat = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
ACCESS = "logsteer.access"
"""The logger of requests: a line each, where asked for."""
AUDIT = "logsteer.audit"
"""The logger of what keys with the scopes write and admin did, or were refused."""
FIELDS = "fields"
"""The attribute of a log record that has further fields."""

CURRENT_REQUEST: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that is at work where a line is logged; empty where none is."""


@dataclass(frozen=True, slots=True)
class LogStyle:
    """How lines are written, and from which level on."""

    format: LogFormat = "text"
    level: str = "info"


class JsonFormatter(logging.Formatter):
    """Write a log record as one line of JSON."""

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


class FieldFormatter(logging.Formatter):
    """Write a log record as text, with its further fields as `name=value` behind the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        fields: Mapping[str, Any] = getattr(record, FIELDS, {})
        told = (f" {name}={value}" for name, value in fields.items() if value is not None)
        return super().format(record) + "".join(told)


def make_formatter(format: LogFormat) -> logging.Formatter:  # noqa: A002
    """Return what writes lines of a format."""
    return JsonFormatter() if format == "json" else FieldFormatter(TEXT)


def configure_logs(style: LogStyle) -> None:
    """Have this process log to standard error in a style, a few lines of each message.

    In an engine's process lines below a warning are those of libraries, and left out unless all
    is asked for.
    """
    handler = logging.StreamHandler()
    handler.addFilter(RepeatFilter())
    handler.setFormatter(make_formatter(style.format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(style.level.upper())
    logging.captureWarnings(style.format == "json")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def configure_engine_logs(style: LogStyle) -> None:
    """Have an engine's process log in a style: its own warnings and errors, or all for debug."""
    quiet = style.level in ("debug", "error")
    configure_logs(style if quiet else LogStyle(style.format, "warning"))


def restyle_libraries(style: LogStyle) -> None:
    """Have the handlers that libraries have made write lines of a style, too."""
    if style.format == "json":
        for found in list(logging.root.manager.loggerDict.values()):
            for handler in getattr(found, "handlers", ()):
                handler.setFormatter(JsonFormatter())


def open_log(name: str, style: LogStyle, path: Path | None) -> logging.Logger:
    """Return the logger of a name, which writes every line: to a file, or to standard error.

    The file is opened anew where it was moved away, as logrotate does. Errors: OSError.
    """
    logger = logging.getLogger(name)
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    handler = logging.StreamHandler(sys.stderr) if path is None else WatchedFileHandler(path)
    handler.setFormatter(make_formatter(style.format))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger
