"""The GPU check's report and exit status; the parts themselves are run by `make gpu-check`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.bars import Bar, find_figure
from bench.gpu_check import __main__ as gpu_check
from bench.gpu_check.report import Findings, PartResult, Report, Table, run_command

pytestmark = pytest.mark.full

WRITTEN = ("gpu-check.json", "gpu-check.md")
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


def test_a_part_that_dies_leaves_what_it_has_measured_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pretend(command: list[str], *, own_group: bool) -> str:
        assert own_group
        assert command[:3] == [sys.executable, "-m", "bench.gpu_check"]
        part = command[command.index("--part") + 1]
        path = Path(command[command.index("--directory") + 1]) / "findings.json"
        if part != "rows":
            make_findings(path).add(TABLE)
        if part == "kernel":
            raise RuntimeError("ended with status -11: first line\nSegmentation fault")
        return ""

    monkeypatch.setattr(gpu_check, "run_command", pretend)
    monkeypatch.setattr(gpu_check, "find_device", lambda: "cpu")
    names = list(gpu_check.PARTS)
    report = gpu_check.check(names, None, tmp_path / "new")
    assert report.quick
    assert report.exit_status == 1
    numbers, text = ((tmp_path / "new" / name).read_text() for name in WRITTEN)
    parts = {part["name"]: part for part in json.loads(numbers)["parts"]}
    statuses = {name: part["status"] for name, part in parts.items()}
    assert statuses == dict.fromkeys(names, "passed") | {"kernel": "failed", "rows": "not run"}
    assert parts["kernel"]["found"]["tables"][0]["rows"] == TABLE.rows
    assert "the CPU: this is not a GPU's report" in text
    assert "Segmentation fault" in text


def test_what_a_command_has_started_ends_with_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    command = ["sh", "-c", f"(sleep 60; echo left) > {tmp_path}/pipe & wait"]
    with pytest.raises(RuntimeError, match="took longer than 2 s"):
        run_command(command, 2, own_group=True)
    os.set_blocking(pipe, True)
    assert os.read(pipe, 9) == b"", "nobody holds the other end"
    os.close(pipe)


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


@pytest.mark.parametrize(
    ("bar", "figure", "met"),
    [
        (Bar("row", "", "a / b", least=0.9), [0.5, 0.9, 1.0], True),
        (Bar("row", "", "a / b", least=0.91), [0.5, 0.9, 1.0], False),
        (Bar("row", "", "a / b", most=2), [1.5, 2.0, 9.0], True),
        (Bar("row", "", "a / b", most=1.9), [1.5, 2.0, 9.0], False),
        (Bar("row", "", "a / b", least=1.3, all_above=1), [1.1, 1.4, 2.0], True),
        (Bar("row", "", "a / b", least=1.3, all_above=1), [1.0, 1.4, 2.0], False),
    ],
)
def test_a_bar_judges_the_median_and_where_asked_the_spread(
    bar: Bar, figure: list[float], met: bool
) -> None:
    found = find_figure(bar, {"row": {"ratios": {"a / b": figure}}})
    assert found == tuple(figure)
    assert bar.is_met(found) == met
