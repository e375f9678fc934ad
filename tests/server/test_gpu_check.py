"""The GPU check's report and exit status; the parts themselves are run by `make gpu-check`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_check import __main__ as gpu_check
from bench.gpu_check.report import Findings, PartResult, Report, Table

pytestmark = pytest.mark.full

TABLE = Table("Errors.", ["width", "error"], [[24, 1e-7], [16384, 0.25]])


def make_findings(path: Path = Path(), **fields: Any) -> Findings:
    return Findings(path, **fields)


@pytest.mark.parametrize(
    ("fields", "died", "status"),
    [
        ({"tables": [TABLE]}, "", "passed"),
        ({"tables": [TABLE], "not_run": ["time: no CUDA device"]}, "", "passed"),
        ({"tables": [TABLE], "failures": ["width 16384: 0.25"]}, "", "failed"),
        ({"tables": [TABLE]}, "took longer than 480 s", "failed"),
        ({"not_run": ["no CUDA device"]}, "", "not run"),
    ],
)
def test_a_part_is_judged_by_what_it_found(fields: Any, died: str, status: str) -> None:
    part = PartResult("kernel", "Steering kernel", command="a command")
    part.judge(make_findings(**fields), died)
    assert part.status == status
    report = Report("cpu", True, "now", [part])
    assert report.exit_status == (status == "failed")
    text = report.to_markdown()
    assert ("| 24 | 1e-07 |" in text) == ("tables" in fields), "also of a part that died"
    for words in [*fields.get("failures", ()), *fields.get("not_run", ()), died]:
        assert words in text


def test_a_difference_that_is_no_number_is_a_failure() -> None:
    found = make_findings()
    for what, error in (("good", 1e-5), ("bad", float("nan")), ("worse", 1e-3)):
        found.need(what, error, 1e-4)
    assert [line.partition(":")[0] for line in found.failures] == ["bad", "worse"]


BARE_IMPORTS = (
    *(f"bench.gpu_check.{part.module}" for part in gpu_check.BARE.values()),
    "logsteer_server.engines.vllm.kernel",
    "logsteer_server.engines.tlens.engine",
)
ROOT = Path(gpu_check.__file__).parents[2]


@pytest.fixture
def without_vllm(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing vLLM is an error."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('vLLM was imported')")
    places = (tmp_path, ROOT / "client", ROOT / "server", ROOT)
    return os.environ | {"PYTHON": sys.executable, "PYTHONPATH": ":".join(map(str, places))}


def test_the_bare_parts_import_no_vllm(without_vllm: dict[str, str]) -> None:
    code = f"import importlib; [importlib.import_module(name) for name in {BARE_IMPORTS}]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=without_vllm, check=True)
