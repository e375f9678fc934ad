"""What goes beyond requests and answers: plots, sources of prompts, samples, labels.

Importing it gives answers their views, each loaded when it is first asked for.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from logsteer.schemas.common import VIEWS


def import_package(name: str, missing: Exception) -> Any:
    """Return a module that some uses need; raise `missing` where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise missing from error


def _load_later(module: str, name: str) -> Callable[..., Any]:
    return lambda *a, **options: getattr(import_module(f"{__name__}.{module}"), name)(*a, **options)


VIEWS["html"] = _load_later("html", "write_html")
VIEWS["table"] = _load_later("rows", "to_frame")
VIEWS["plot"] = _load_later("plots", "plot_answer")
