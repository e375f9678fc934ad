"""The architecture: which module may import which. An arrow that runs back up fails here."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SERVER = ROOT / "server" / "logsteer_server"
CLIENT = ROOT / "client" / "logsteer"


def read_layers() -> list[set[str]]:
    """The numbered list of CONTRIBUTING.md: each entry begins with the parts of one layer."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Layout")[1].split("\n## ")[0]
    lines = re.findall(r"^\d+\. ((?:`\w+`,?\s*)+):", section, re.MULTILINE)
    return [set(re.findall(r"`(\w+)`", line)) for line in lines]


LAYERS = read_layers()
"""From the top down: a module imports from layers below its own, and from its own package."""

ENTRIES = LAYERS[0]
"""What a user or a tool starts; these import one another, without a circle."""

ONLY_IN = {
    "fastapi": {"app", "api"},
    "uvicorn": {"serving", "api.connections", "cluster"},
    "torch": {
        "embedded",
        "numerics",
        "engines.machine",
        "engines.tlens",
        "engines.vllm",
        "stores.formats.pt_file",
    },
    "vllm": {"engines.vllm"},
    "transformer_lens": {"engines.tlens"},
    "transformers": {"text", "engines.tlens", "engines.weights", "imports"},
    "yaml": {"settings", "cluster"},
    "scipy": {"tasks.vector_methods"},
    "sklearn": {"tasks.vector_methods", "tasks.vector_quality"},
}
"""Packages with a narrow home."""


def part_of(module: str) -> str:
    """The entry of LAYERS that a module of the server belongs to."""
    return module.split(".")[0]


def home_of(module: str) -> set[str]:
    """The names under which ONLY_IN may list a module."""
    parts = module.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


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
            if (node.module or "").startswith("logsteer_server"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def project_imports(path: Path) -> set[str]:
    """The modules of the server that a module imports, each as a name of `server_modules`."""
    known = set(map(name_of, server_modules()))
    found = {m.removeprefix("logsteer_server.") for m in imports_of(path) if "logsteer_server" in m}
    return {m for m in found if m in known}


def test_every_part_has_a_layer() -> None:
    assert 0 < len(LAYERS) <= 8
    parts = {part_of(name) for name in map(name_of, server_modules()) if name}
    listed = [part for layer in LAYERS for part in layer]
    assert sorted(listed) == sorted(parts)


@pytest.mark.parametrize("path", server_modules(), ids=name_of)
def test_arrows_point_down(path: Path) -> None:
    depth = {part: level for level, parts in enumerate(LAYERS) for part in parts}
    own = part_of(name_of(path))
    for module in project_imports(path):
        other = part_of(module)
        if other == own or not module or {own, other} <= ENTRIES:
            continue
        assert depth[other] > depth[own], f"{own} imports {other}, which stands above or beside it"


def test_there_is_no_circle() -> None:
    arrows = {name_of(path): project_imports(path) - {name_of(path)} for path in server_modules()}
    sorter = graphlib.TopologicalSorter(arrows)
    sorter.prepare()  # raises CycleError, which names the modules


def test_the_contract_imports_nothing_of_the_project() -> None:
    for path in (SERVER / "contract").glob("*.py"):
        roots = {module.split(".")[0] for module in imports_of(path)}
        assert "logsteer" not in roots, path
        assert all(part_of(m) == "contract" for m in project_imports(path)), path


SHARED_BY_ENGINES = (
    "weights", "machine", "needs", "lifetime", "scratch", "failures", "readings", "drawn",

)  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "tlens"])
def test_an_engine_knows_no_other(engine: str) -> None:
    known = tuple(f"engines.{name}" for name in (engine, *SHARED_BY_ENGINES))
    for path in (SERVER / "engines" / engine).glob("*.py"):
        for module in project_imports(path):
            assert not module.startswith("engines.") or module.startswith(known), (
                f"{path} imports {module}"
            )


@pytest.mark.parametrize("path", server_modules(), ids=name_of)
def test_packages_stay_in_their_home(path: Path) -> None:
    for module in imports_of(path):
        home = ONLY_IN.get(module.split(".")[0])
        assert home is None or home_of(name_of(path)) & home, f"{path}: only {home} has {module}"


def test_the_client_never_imports_the_server() -> None:
    for path in CLIENT.rglob("*.py"):
        roots = {module.split(".")[0] for module in imports_of(path)}
        heavy = {"logsteer_server", "torch", "fastapi", "vllm"}
        heavy |= set() if path.parent.name == "extras" else {"numpy"}
        assert not roots & heavy, path


def test_no_module_is_a_drawer() -> None:
    for path in [*server_modules(), *CLIENT.rglob("*.py")]:
        assert path.stem not in {"utils", "util", "helpers", "common_utils", "manager", "misc"}


WRITTEN = {"_sync_methods.py", "_async_methods.py"}
"""Files that `make client` writes: as long as the schemas have fields."""


def test_files_and_functions_are_of_readable_size() -> None:
    for path in [*server_modules(), *CLIENT.rglob("*.py")]:
        if path.name in WRITTEN:
            continue
        text = path.read_text()
        assert len(text.splitlines()) <= 600, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"


HEAVY = ("torch", "vllm", "scipy", "sklearn", "sympy", "pandas", "pyarrow", "cv2", "datasets")
"""Packages that would cost the HTTP process seconds at its start, and memory."""


def test_the_http_process_loads_no_package_of_the_engines() -> None:
    code = (
        "import sys; from logsteer_server.serving import main;"
        "from logsteer_server.text.tokenizer import TextCodec;"
        "TextCodec.import_transformers();"
        f"TextCodec.load({str(ROOT / 'demo' / 'model')!r});"
        f"print(*set({HEAVY!r}) & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == ([], 0)


def test_no_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in [*server_modules(), *CLIENT.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {}


NO_VERBS = {
    "A", "All", "An", "Each", "Errors:", "Every", "How", "Index", "Nothing", "Nothing;", "One",
    "The", "What", "Whether", "Where", "Why",
}  # fmt: skip


def is_described_as_a_thing(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Properties are; and so are routes, whose docstrings are the descriptions of endpoints."""
    names = {getattr(part, "id", getattr(part, "attr", "")) for d in node.decorator_list
             for part in ast.walk(d)}  # fmt: skip
    return bool(names & {"property", "cached_property", "router"})


@pytest.mark.parametrize("path", server_modules(), ids=name_of)
def test_docstrings_of_functions_begin_with_a_verb(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "Do").split()[0]
            assert is_described_as_a_thing(node) or first not in NO_VERBS, f"{path}: {node.name}"


def test_an_engine_process_loads_nothing_of_http() -> None:
    """It imports `__main__` again, as spawned processes do, and the engine."""
    code = (
        "import sys, logsteer_server.__main__, logsteer_server.runtime.process,"
        "logsteer_server.engines.fake; sys.exit(bool({'fastapi', 'uvicorn'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
