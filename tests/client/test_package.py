"""What `import logsteer` gives, and what it leaves alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import logsteer

NAMES = {
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
    assert not (heavy | {"logsteer_server"}) & loaded


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    others = {"A", "All", "An", "As", "Each", "How", "Nothing", "Nothing;", "One", "That", "The",
              "What", "Whether"}  # fmt: skip
    for path in Path(logsteer.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node):
                first = (ast.get_docstring(node) or "-").split()[0]
                assert first not in others, f"{path}: {node.name}"
