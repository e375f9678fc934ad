"""logsteer: score and steer language models that a logsteer server keeps resident.

>>> from logsteer import Client
>>> with Client() as client:  # doctest: +SKIP
...     client.get_log_prob("The capital of France is", [" Paris", " London"])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logsteer._endpoints import GenerateEvent, PerplexityEvent, SelftestEvent, SteerEvent
    from logsteer._pairs import LogProb
    from logsteer.async_client import AsyncClient
    from logsteer.client import Client
    from logsteer.corpus import FileScores, score_file
    from logsteer.errors import (
        AnswerError,
        APIError,
        AuthenticationError,
        ConflictError,
        DeadlineError,
        InternalError,
        InvalidRequestError,
        LogsteerError,
        NotFoundError,
        OverloadedError,
        PayloadTooLargeError,
        PermissionDeniedError,
        RequestTimeoutError,
        TransportError,
        UnavailableError,
    )
    from logsteer.extras.plots import plot_sweep

    __version__: str

# Name -> module that has it. Loaded at first use: the command line's help and the server's import
# of a schema need not wait for httpx.
_HOMES = {
    "APIError": "errors",
    "AnswerError": "errors",
    "AsyncClient": "async_client",
    "AuthenticationError": "errors",
    "Client": "client",
    "ConflictError": "errors",
    "DeadlineError": "errors",
    "FileScores": "corpus",
    "GenerateEvent": "_endpoints",
    "InternalError": "errors",
    "InvalidRequestError": "errors",
    "LogProb": "_pairs",
    "LogsteerError": "errors",
    "NotFoundError": "errors",
    "OverloadedError": "errors",
    "PayloadTooLargeError": "errors",
    "PermissionDeniedError": "errors",
    "PerplexityEvent": "_endpoints",
    "RequestTimeoutError": "errors",
    "SelftestEvent": "_endpoints",
    "SteerEvent": "_endpoints",
    "TransportError": "errors",
    "UnavailableError": "errors",
    "plot_sweep": "extras.plots",
    "score_file": "corpus",
}

__all__ = [
    "APIError",
    "AnswerError",
    "AsyncClient",
    "AuthenticationError",
    "Client",
    "ConflictError",
    "DeadlineError",
    "FileScores",
    "GenerateEvent",
    "InternalError",
    "InvalidRequestError",
    "LogProb",
    "LogsteerError",
    "NotFoundError",
    "OverloadedError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "PerplexityEvent",
    "RequestTimeoutError",
    "SelftestEvent",
    "SteerEvent",
    "TransportError",
    "UnavailableError",
    "__version__",
    "plot_sweep",
    "score_file",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _read_version()
    elif name in _HOMES:
        value = getattr(import_module(f"logsteer.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'logsteer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _read_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("logsteer")
    except PackageNotFoundError:
        return "0.1.0"
