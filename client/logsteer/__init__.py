"""logsteer: score and steer language models that a logsteer server keeps resident.

Five common tasks; each method's docstring has its options:

>>> from logsteer import Client
>>> client = Client()  # LOGSTEER_BASE_URL, or http://127.0.0.1:8000

Which answer does the model prefer?

>>> client.score("The capital of France is", [" Paris", " London"]).choice.target
' Paris'

How well does it predict a text?

>>> round(client.perplexity("The capital of France is Paris.").total.perplexity, 2)
2.43

Make a vector from texts that differ in one thing:

>>> pairs = [(f"{n} was very happy.", f"{n} was very sad.") for n in ("Tom", "Lily", "Ben", "Mia")]
>>> client.vectors.train("mood", pairs).vector.about.recommendation.layer
3

Write a story with it: as training recommends, or with a scale and a layer of one's own.

>>> client.steer("Once upon a time", "mood", temperature=0.0).text[:10]
' there was'
>>> client.steer("Once upon a time", ["mood:-4@3"], temperature=0.0).steering.layers[3].tokens > 60
True

Score under it:

>>> client.score("Tom was very", [" happy", " sad"], steering="mood").choice.target
' happy'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logsteer._endpoints import GenerateEvent, PerplexityEvent, SelftestEvent, SteerEvent
    from logsteer._pairs import LogProb
    from logsteer._version import __version__
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
    from logsteer.schemas import (
        ContrastPair,
        GenerateAnswer,
        ItemScore,
        LogprobAnswer,
        LogprobItem,
        PerplexityAnswer,
        Policy,
        SteerAnswer,
        Steering,
        SweepAnswer,
        TrainAnswer,
        VectorCard,
    )
    from logsteer.schemas.steering import Steer

# Name -> module that has it. Loaded at first use: the command line's help and the server's import
# of a schema need not wait for httpx.
_HOMES = {
    "APIError": "errors",
    "AnswerError": "errors",
    "AsyncClient": "async_client",
    "AuthenticationError": "errors",
    "Client": "client",
    "ConflictError": "errors",
    "ContrastPair": "schemas",
    "DeadlineError": "errors",
    "FileScores": "corpus",
    "GenerateAnswer": "schemas",
    "GenerateEvent": "_endpoints",
    "InternalError": "errors",
    "InvalidRequestError": "errors",
    "ItemScore": "schemas",
    "LogProb": "_pairs",
    "LogprobAnswer": "schemas",
    "LogprobItem": "schemas",
    "LogsteerError": "errors",
    "NotFoundError": "errors",
    "OverloadedError": "errors",
    "PayloadTooLargeError": "errors",
    "PermissionDeniedError": "errors",
    "PerplexityAnswer": "schemas",
    "PerplexityEvent": "_endpoints",
    "Policy": "schemas",
    "RequestTimeoutError": "errors",
    "SelftestEvent": "_endpoints",
    "Steer": "schemas.steering",
    "SteerAnswer": "schemas",
    "SteerEvent": "_endpoints",
    "Steering": "schemas",
    "SweepAnswer": "schemas",
    "TrainAnswer": "schemas",
    "TransportError": "errors",
    "UnavailableError": "errors",
    "VectorCard": "schemas",
    "__version__": "_version",
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
    "ContrastPair",
    "DeadlineError",
    "FileScores",
    "GenerateAnswer",
    "GenerateEvent",
    "InternalError",
    "InvalidRequestError",
    "ItemScore",
    "LogProb",
    "LogprobAnswer",
    "LogprobItem",
    "LogsteerError",
    "NotFoundError",
    "OverloadedError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "PerplexityAnswer",
    "PerplexityEvent",
    "Policy",
    "RequestTimeoutError",
    "SelftestEvent",
    "Steer",
    "SteerAnswer",
    "SteerEvent",
    "Steering",
    "SweepAnswer",
    "TrainAnswer",
    "TransportError",
    "UnavailableError",
    "VectorCard",
    "__version__",
    "plot_sweep",
    "score_file",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'logsteer' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"logsteer.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
