"""What goes beyond requests and answers: plots, sources of prompts, samples, labels.

Importing it gives answers their views, each loaded when it is first asked for.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from logsteer.schemas.common import VIEWS


def _load_later(module: str, name: str) -> Callable[..., Any]:
    return lambda *a, **options: getattr(import_module(f"{__name__}.{module}"), name)(*a, **options)


VIEWS["html"] = _load_later("html", "write_html")
VIEWS["table"] = _load_later("rows", "to_frame")
VIEWS["plot"] = _load_later("plots", "plot_answer")
