"""What `import logsteer` gives, and what it leaves alone."""

import subprocess
import sys

import pytest

import logsteer

NAMES = {
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
}


def test_the_exported_names() -> None:
    assert set(logsteer.__all__) == NAMES
    assert set(dir(logsteer)) >= NAMES
    for name in NAMES:
        assert getattr(logsteer, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        logsteer.nothing  # noqa: B018


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_logsteer_loads_nothing_heavy() -> None:
    assert not {"httpx", "pydantic", "rich", "msgpack"} & loaded_after("import logsteer")


def test_using_all_of_it_loads_no_server() -> None:
    loaded = loaded_after("from logsteer import *\nimport logsteer.cli")
    assert {"logsteer.client", "logsteer.cli", "httpx"} <= loaded
    heavy = {
        "torch",
        "fastapi",
        "matplotlib",
        "numpy",
        "pandas",
        "pyarrow",
        "starlette",
        "transformers",
        "vllm",
        "logsteer_server",
    }
    assert not heavy & loaded
