"""Each internal of vLLM that the engine relies on is as it was, and none is touched unnamed."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from logsteer_server.engines.vllm.seam import INTERNALS
from logsteer_server.engines.vllm.seam.internal import Internal
from tests.conftest import ROOT
from tests.probes import run_probe

pytestmark = pytest.mark.engine  # it imports all of vLLM

ENGINE = ROOT / "server" / "logsteer_server" / "engines" / "vllm"
SOURCES = {path.stem: path.read_text() for path in ENGINE.glob("*.py")}
IMPORTERS = {"blocks", "config", "core", "runner", "sampler", "worker", "operation", "corrections",
             "cpu_kernels"}  # fmt: skip
"""The modules that may import vLLM."""

TOUCHED = {
    "blocks": ("self._manager", "manager", "request", "block"),
    "config": ("config", "model"),
    "core": ("self.config", "self._front", "self.engine_core", "processed", "batch", "params",
             "request", "manager", "Executor", "current_platform", "RequestOutputKind"),
    "engine": ("output",),
    "requests": ("output",),
    "generation": ("output", "completion"),
    "runner": ("self", "super()", "module", "params", "request", "scheduler_output", "output",
               "batch", "get_pp_group()"),
    "worker": ("self", "super()", "runner", "get_pp_group()", "current_platform"),
    "sampler": ("super()", "params"),
    "operation": ("get_forward_context()",),
    "corrections": ("module",),
    "cpu_kernels": ("self", "super()", "kernel", "ops", "linear", "PlatformEnum", "c"),
}  # fmt: skip
"""By module, the expressions whose attributes are vLLM's."""

PLAIN = {"keys", "update", "pop", "type", "num_hidden_layers", "get_text_config", "__class__"}
"""Attributes of what Python, torch and transformers define."""


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    """What `seam_probe.py` found in the vLLM that is installed."""
    found = run_probe("tests.server.seam_probe")
    assert len(found["wrong"]) == len(INTERNALS)
    return found


def describe(row: Internal) -> str:
    return f"{row.kind}:{row.name}:{row.relies_on[:40]}"


@pytest.mark.parametrize("number", range(len(INTERNALS)), ids=map(describe, INTERNALS))
def test_vllm_has_what_is_relied_on(probe: dict[str, Any], number: int) -> None:
    row, wrong = INTERNALS[number], probe["wrong"][number]
    where = ", ".join(f"engines/vllm/{module}.py" for module in row.used_in)
    assert not wrong, f"{row.name} {wrong}. {where} relies on it: {row.reason}"


def test_our_runner_and_worker_hide_nothing_of_vllms(probe: dict[str, Any]) -> None:
    assert probe["collisions"] == []


def test_vllm_imports_nothing_that_the_engine_does_without(probe: dict[str, Any]) -> None:
    assert probe["unasked"] == []


def test_a_gpus_memory_is_measured_with_rows_read(probe: dict[str, Any]) -> None:
    profiled = probe["profiled"]
    assert profiled == {"meta": ["vllm", "rows", [7, 5]], "cpu": ["vllm"], "no head": ["vllm"]}


def test_a_gpu_has_steps_as_large_as_in_vllms_server(probe: dict[str, Any]) -> None:
    """8,192 tokens and 1,024 sequences where vLLM alone, with no usage named, has 2,048 and 128."""
    assert probe["batches"] == {"large": [8192, 1024], "small": [2048, 256], "given": [512, 7]}


def test_no_row_stands_twice() -> None:
    counts = Counter((row.name, row.kind, row.relies_on, row.used_in) for row in INTERNALS)
    assert [row for row, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("row", [r for r in INTERNALS if r.kind != "source"], ids=describe)
def test_a_row_is_used_where_it_says(row: Internal) -> None:
    word = row.relies_on if row.kind == "attribute" else row.name.rpartition(".")[2]
    assert row.used_in
    for module in row.used_in:
        assert re.search(rf"\b{word}\b", SOURCES[module]), f"{module} does not touch {word}"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_every_import_of_vllm_has_a_row(module: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse(SOURCES[module])):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {a.name for a in node.names if a.name.split(".")[0] == "vllm"}
    assert not imported or module in IMPORTERS, f"{module} imports vLLM"
    named = {row.name for row in INTERNALS if module in row.used_in}
    for name in imported:
        assert any(f"{row}.".startswith(f"{name}.") for row in named), f"{name} has no row"


@pytest.mark.parametrize("module", sorted(TOUCHED))
def test_every_attribute_of_vllms_has_a_row(module: str) -> None:
    rows = [row for row in INTERNALS if module in row.used_in]
    named = {row.name.rpartition(".")[2] for row in rows}
    for row in rows:
        if row.kind in ("attribute", "source"):
            named |= set(re.findall(r"\w+", row.relies_on))
    tree = ast.parse(SOURCES[module])
    touched = {
        name
        for root in TOUCHED[module]
        for chain in find_chains(tree)
        if chain[0] == root or ".".join(chain[:2]) == root
        for name in chain[root.count(".") + 1 :]
    }
    assert touched, "nothing is touched: is TOUCHED right?"
    unnamed = touched - named - PLAIN - own_names()
    assert not unnamed, f"engines/vllm/{module}.py touches {sorted(unnamed)}: add rows to the seam"


def find_chains(tree: ast.Module) -> Iterator[list[str]]:
    """Expressions such as `a.b.c`, in parts; what stands before the first dot is one part."""
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            chain: list[str] = []
            place: ast.expr = node
            while isinstance(place, ast.Attribute):
                chain.insert(0, place.attr)
                place = place.value
            yield [ast.unparse(place), *chain]


def own_names() -> set[str]:
    """What classes of the engine define by themselves."""
    found = set()
    for source in SOURCES.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef):
                        found.add(part.name)
                    elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        found.add(part.target.id)
            elif isinstance(node, ast.Assign):
                found |= {
                    target.attr
                    for target in node.targets
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                }
    return found
