"""The architecture: which module may import which. An arrow that runs back up fails here."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SERVER = ROOT / "server" / "logsteer_server"
CLIENT = ROOT / "client" / "logsteer"

LAYERS = [
    {"__main__", "openapi"},
    {"app"},
    {"routes"},
    {"deps"},
    {"sweeps", "generations"},
    {"comparison", "changes"},
    {"residents"},
    {"cache"},
    {"cachefile", "metrics"},
    {"sampling", "steering", "overrides", "adapters"},
    {"features", "filestore", "tensorfile"},
    {"scoring", "encoding", "settings"},
    {"engines.supervisor"},
    {"engines.process", "engines.queue", "embedded"},
    {"engines.vllm", "engines.tlens", "engines.fake"},
    {"rows"},
    {"engines.weights", "policy", "interventions", "lora"},
    {"engines.base", ""},
    {"engines.plan"},
]
"""From the top down: a module imports from layers below its own, and from its own package."""

ONLY_IN = {
    "fastapi": {"app", "deps", "routes"},
    "uvicorn": {"__main__"},
    "torch": {
        "embedded", "interventions", "policy", "rows", "engines.tlens", "engines.vllm",
        "steering.pt_file",
    },
    "vllm": {"engines.vllm"},
    "transformer_lens": {"engines.tlens"},
    "transformers": {"scoring", "engines.tlens"},
    "yaml": {"settings"},
    "scipy": {"steering.training"},
    "sklearn": {"steering.training"},
    "numpy": {
        "cache", "comparison", "embedded", "encoding", "rows", "sampling", "scoring", "steering",
        "sweeps", "tensorfile",
        "engines.base", "engines.fake", "engines.plan", "engines.tlens", "engines.vllm",
    },
}  # fmt: skip
"""Packages with a narrow home."""


def part_of(module: str) -> str:
    """The entry of LAYERS that a module of the server belongs to."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "engines" else parts[0]


def server_modules() -> list[Path]:
    return sorted(SERVER.rglob("*.py"))


def name_of(path: Path) -> str:
    name = ".".join(path.relative_to(SERVER).with_suffix("").parts)
    return name.removesuffix("__init__").removesuffix(".")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
            if node.module in {"logsteer_server", "logsteer_server.routes"}:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", server_modules(), ids=name_of)
def test_arrows_point_down(path: Path) -> None:
    depth = {part: level for level, parts in enumerate(LAYERS) for part in parts}
    own = part_of(name_of(path))
    if own == "engines" and path.name == "__init__.py":
        return
    for module in imports_of(path):
        if not module.startswith("logsteer_server."):
            continue
        other = part_of(module.removeprefix("logsteer_server."))
        if other in {own, "__version__"}:
            continue
        assert depth[other] > depth[own], f"{own} imports {other}, which stands above or beside it"


@pytest.mark.parametrize("path", server_modules(), ids=name_of)
def test_packages_stay_in_their_home(path: Path) -> None:
    own = part_of(name_of(path))
    for module in imports_of(path):
        home = ONLY_IN.get(module.split(".")[0])
        allowed = home is None or {own, name_of(path)} & home
        assert allowed, f"{own} imports {module}; only {home} may"


def test_the_client_never_imports_the_server() -> None:
    for path in CLIENT.rglob("*.py"):
        roots = {module.split(".")[0] for module in imports_of(path)}
        assert not roots & {"logsteer_server", "torch", "fastapi", "vllm", "numpy"}, path


def test_no_module_is_a_drawer() -> None:
    for path in [*server_modules(), *CLIENT.rglob("*.py")]:
        assert path.stem not in {"utils", "util", "helpers", "common_utils", "manager", "misc"}


def test_files_and_functions_are_of_readable_size() -> None:
    for path in [*server_modules(), *CLIENT.rglob("*.py")]:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"


def test_the_http_process_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from logsteer_server.app import create_app;"
        "from logsteer_server.scoring.tokenizer import TextCodec;"
        f"TextCodec.load({str(ROOT / 'demo' / 'model')!r});"
        "sys.exit(bool({'torch', 'vllm', 'scipy', 'sklearn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
