"""The architecture: which module may import which. An arrow that runs back up fails here.

Each test names every offender at once.
"""

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from tests.conftest import ROOT

TOP = "__init__"
"""What CONTRIBUTING.md calls the module that is the package itself."""


@dataclass(frozen=True)
class House:
    """The modules of a package, each parsed once, and its layers: from the top down."""

    package: str
    folder: Path
    layers: list[list[str]]

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """Module, without the package in front -> its code."""
        found = {}
        for path in sorted(self.folder.rglob("*.py")):
            name = ".".join(path.relative_to(self.folder).with_suffix("").parts)
            found[name.removesuffix(f".{TOP}")] = ast.parse(path.read_text(), str(path))
        return found

    @cached_property
    def arrows(self) -> dict[str, set[str]]:
        """Module -> the modules of the same package that it imports, wherever in its code."""
        return {
            name: {
                # A name in a package that is no module of it is the package's own.
                one if one in self.modules else one.rpartition(".")[0] or TOP
                for found in imports_of(tree)
                if (one := found.removeprefix(f"{self.package}.")) != found
            }
            & self.modules.keys() - {name}
            for name, tree in self.modules.items()
        }

    def may_import(self, own: str, other: str) -> bool:
        """A part imports from layers below its own. What is started, and single modules that share
        a layer, may import one another: without a circle, which another test sees to.
        """
        depth = {part: level for level, parts in enumerate(self.layers) for part in parts}
        if own == other or depth[own] < depth[other]:
            return True
        single = not any((self.folder / part).is_dir() for part in (own, other))
        return depth[own] == depth[other] and (single or depth[own] == 0)


def imports_of(tree: ast.Module) -> set[str]:
    """Every name that is imported: modules, and what is taken from them as `module.name`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part_of(module: str) -> str:
    return module.split(".")[0]


def read_layers() -> list[list[list[str]]]:
    """The numbered lists of CONTRIBUTING.md, the server's and the client's: each entry begins with
    the parts of one layer.
    """
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Layout")[1].split("\n## ")[0]
    houses: list[list[list[str]]] = []
    for number, entry in re.findall(r"^(\d+)\. ((?:`\w+`,?\s*)+):", section, re.MULTILINE):
        if number == "1":
            houses.append([])
        houses[-1].append(re.findall(r"`(\w+)`", entry))
    return houses


HOUSES = [
    House(package, ROOT / where / package, layers)
    for (package, where), layers in zip(
        (("logsteer_server", "server"), ("logsteer", "client")), read_layers(), strict=True
    )
]
SERVER, CLIENT = HOUSES

ONLY_IN = {
    "fastapi": {"app", "api", "cluster"},
    "uvicorn": {"serving", "api.connections"},
    "torch": {
        "embedded",
        "numerics",
        "engines.gguf",
        "engines.machine",
        "engines.rounding",
        "engines.tlens",
        "engines.vllm",
        "engines.weights",
        "stores.formats.pt_file",
    },
    "vllm": {"engines.vllm"},
    "transformer_lens": {"engines.tlens"},
    "transformers": {
        "text",
        "engines.gguf",
        "engines.rounding",
        "engines.tlens",
        "engines.weights",
        "imports",
    },
    "yaml": {"settings", "cluster", "flags"},
    "scipy": {"tasks.vector_methods"},
    "sklearn": {"tasks.vector_methods"},
}
"""Packages with a narrow home in the server."""
ONLY_IN_CLIENT: dict[str, set[str]] = {
    **{package: set() for package in ("logsteer_server", "fastapi", "vllm")},
    **{package: {"extras"} for package in ("numpy", "torch", "datasets")},
    "pyarrow": {"cli", "corpus"},
    "lm_eval": {"lm_eval"},
}


@pytest.mark.parametrize("house", HOUSES, ids=lambda house: house.package)
def test_every_part_has_a_layer(house: House) -> None:
    assert 0 < len(house.layers) <= 8
    parts = {part_of(name) for name in house.modules}
    listed = sorted(part for layer in house.layers for part in layer)
    assert listed == sorted(parts - ({TOP} if house is SERVER else set()))


@pytest.mark.parametrize("house", HOUSES, ids=lambda house: house.package)
def test_arrows_point_down(house: House) -> None:
    upward = [
        f"{module} imports {other}"
        for module, others in house.arrows.items()
        for other in others - {TOP if house is SERVER else ""}
        if not house.may_import(part_of(module), part_of(other))
    ]
    assert upward == []


@pytest.mark.parametrize("house", HOUSES, ids=lambda house: house.package)
def test_there_is_no_circle(house: House) -> None:
    graphlib.TopologicalSorter(house.arrows).prepare()  # raises CycleError, which names the modules


SHARED_BY_ENGINES = (
    "weights", "machine", "needs", "lifetime", "failures", "readings", "drawn",
)  # fmt: skip


def test_what_knows_nothing_else() -> None:
    """The contract knows nothing of the project, and an engine knows no other."""
    wrong = []
    for module, others in SERVER.arrows.items():
        folder, _, rest = module.partition(".")
        if folder == "contract":
            wrong += [f"{module} imports {one}" for one in others if part_of(one) != "contract"]
            roots = {part_of(one) for one in imports_of(SERVER.modules[module])}
            wrong += [f"{module} imports the client"] if "logsteer" in roots else []
        elif folder == "engines" and (engine := rest.partition(".")[0]) in ("vllm", "tlens"):
            known = tuple(f"engines.{name}" for name in (engine, *SHARED_BY_ENGINES))
            wrong += [
                f"{module} imports {one}"
                for one in others
                if one.startswith("engines.") and not one.startswith(known)
            ]
    assert wrong == []


@pytest.mark.parametrize(("house", "homes"), [(SERVER, ONLY_IN), (CLIENT, ONLY_IN_CLIENT)],
                         ids=["server", "client"])  # fmt: skip
def test_packages_stay_in_their_home(house: House, homes: dict[str, set[str]]) -> None:
    away = []
    for module, tree in house.modules.items():
        parts = module.split(".")
        own = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
        found = {part_of(one) for one in imports_of(tree)} & homes.keys()
        away += [f"{module} imports {name}" for name in found if not own & homes[name]]
    assert away == []


WRITTEN = {"_sync_methods.py", "_async_methods.py"}
"""Files that `make client` writes: as long as the schemas have fields."""


def test_modules_are_of_readable_size_and_no_drawers() -> None:
    wrong = []
    for path in [path for house in HOUSES for path in house.folder.rglob("*.py")]:
        if path.stem in {"utils", "util", "helpers", "common_utils", "manager", "misc"}:
            wrong.append(f"{path} is a drawer")
        text = path.read_text()
        if path.name in WRITTEN:
            continue
        if (length := len(text.splitlines())) > 600:
            wrong.append(f"{path} has {length} lines, at most 600")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                wrong += [f"{path}: {node.name} has {length} lines, at most 80"] * (length > 80)
    assert wrong == []


def test_no_class_name_is_used_twice() -> None:
    counts = Counter(
        node.name
        for house in HOUSES
        for tree in house.modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in counts.items() if count > 1] == []


HEAVY = ("torch", "vllm", "scipy", "sklearn", "sympy", "pandas", "pyarrow", "cv2", "datasets")
"""Packages that would cost the HTTP process seconds at its start, and memory."""


def test_the_http_process_loads_no_package_of_the_engines() -> None:
    code = (
        "import sys; from logsteer_server.serving import main;"
        "from logsteer_server.imports import import_tokenizers;"
        "from logsteer_server.text.tokenizer import TextCodec;"
        "import_tokenizers();"
        f"TextCodec.load({str(ROOT / 'demo' / 'model')!r});"
        f"print(*set({HEAVY!r}) & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == ([], 0)


def test_an_engine_process_loads_nothing_of_http() -> None:
    """It imports `__main__` again, as spawned processes do, and the engine."""
    code = (
        "import sys, logsteer_server.__main__, logsteer_server.runtime.process,"
        "logsteer_server.engines.fake; sys.exit(bool({'fastapi', 'uvicorn'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
