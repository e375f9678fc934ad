"""The GPU check's report and exit status; the parts themselves are run by `make gpu-check`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.bars import BARS, Bar, find_figure
from bench.bars import write_table as write_bars
from bench.gpu_check import __main__ as gpu_check
from bench.gpu_check.contract import read_results
from bench.gpu_check.part import Findings, Table, run_command
from bench.gpu_check.report import PartResult, Report, write_table

MEASURED = Findings(tables=[Table("Errors.", ["width", "error"], [[24, 1e-7], [16384, 0.25]])])
FAILED = Findings(tables=MEASURED.tables, failures=["width 16384: 0.25 where 1e-05 is allowed"])
PARTLY = Findings(tables=MEASURED.tables, not_run=["time: no CUDA device"])
WRITTEN = ("gpu-check.json", "gpu-check.md")
NOTHING = Findings(not_run=["no CUDA device"])


def judge(found: Findings) -> PartResult:
    return PartResult.judge("kernel", "Steering kernel", found, 2.0, "a command")


@pytest.mark.parametrize(
    ("found", "status"),
    [(MEASURED, "passed"), (FAILED, "failed"), (PARTLY, "passed"), (NOTHING, "not run")],
)
def test_a_part_is_judged_by_what_it_found(found: Findings, status: str) -> None:
    part = judge(found)
    assert part.status == status
    report = Report("cpu", True, "now", [judge(MEASURED), part])
    assert report.exit_status == (status == "failed")
    assert ("1 of its measurements did not run" in part.reason) == (found is PARTLY)
    text = report.to_markdown()
    for words in [*found.failures, *found.not_run]:
        assert words in text


def test_a_difference_that_is_no_number_is_a_failure() -> None:
    found = Findings()
    found.need("good", 1e-5, 1e-4)
    assert not found.failures
    found.need("bad", float("nan"), 1e-4)
    found.need("worse", 1e-3, 1e-4)
    assert len(found.failures) == 2


def test_findings_come_back_from_among_what_vllm_prints() -> None:
    assert Findings.decode(f"INFO gpu-check\n\n{FAILED.encode()}\nbye") == FAILED
    with pytest.raises(ValueError, match="no line"):
        Findings.decode("nothing")


def test_a_report_of_a_cpu_says_so_and_names_every_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One part dies, one prints nothing, the others pass; none stops another."""

    def pretend(command: list[str], timeout_s: float) -> str:
        assert command[:2] == [sys.executable, "-m"]
        if command[2].endswith("kernel"):
            raise RuntimeError("ended with status -11: first line\nSegmentation fault")
        return "" if command[2].endswith("rows") else MEASURED.encode()

    monkeypatch.setattr(gpu_check, "run_command", pretend)
    monkeypatch.setattr(gpu_check, "find_device", lambda: "cpu")
    names = [name for name in gpu_check.PARTS if name != "speed"]
    report = gpu_check.check(names, None, tmp_path / "new")
    assert report.quick
    assert report.exit_status == 1
    numbers, text = ((tmp_path / "new" / name).read_text() for name in WRITTEN)
    statuses = {part["name"]: part["status"] for part in json.loads(numbers)["parts"]}
    assert statuses == dict.fromkeys(gpu_check.PARTS, "passed") | {
        "kernel": "failed", "rows": "failed", "speed": "not run",
    }  # fmt: skip
    assert "the CPU: this is not a GPU's report" in text
    for part in gpu_check.PARTS.values():
        assert f"## {part.title}" in text
    assert "Segmentation fault" in text
    assert "not asked for" in text


@pytest.mark.parametrize("part", gpu_check.PARTS.values(), ids=lambda part: part.module)
def test_every_part_has_its_module(part: gpu_check.Part) -> None:
    assert (Path(gpu_check.__file__).parent / f"{part.module}.py").is_file()


def test_columns_are_aligned() -> None:
    table = Table("", ["what", "value"], [["a|b", 12345.6], ["c", None], ["longer", 1e-7]])
    lines = write_table(table).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2] == r"| a\|b   | 12,346 |"
    assert lines[4] == "| longer |  1e-07 |"


def test_results_of_pytest_are_counted_and_failures_named(tmp_path: Path) -> None:
    path = tmp_path / "results.xml"
    case = '<testcase classname="tests.contract.test_steering" name="{}">{}</testcase>'
    cases = [
        case.format("a", ""),
        case.format("b", '<failure message="AssertionError: 2 &lt; 1&#10;more" />'),
        case.format("c", '<error message="no server" />'),
        case.format("d", '<skipped message="absent" />'),
    ]
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    found = read_results(path)
    assert found.tables[0].rows == [["tests/contract/test_steering.py", 1, 2, 1]]
    assert found.failures == [
        "test_steering::b: AssertionError: 2 < 1",
        "test_steering::c: no server",
    ]
    path.write_text(f"<testsuites><testsuite>{cases[3]}</testsuite></testsuites>")
    assert read_results(path).failures == ["not one test passed"]


def test_a_command_that_fails_or_hangs_says_so() -> None:
    with pytest.raises(RuntimeError, match="status 3: oh no"):
        run_command([sys.executable, "-c", "import sys; print('oh no'); sys.exit(3)"], 60)
    with pytest.raises(RuntimeError, match=r"longer than 0\.2 s"):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)


BARE_IMPORTS = (
    *(f"bench.gpu_check.{gpu_check.PARTS[name].module}" for name in gpu_check.BARE),
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


def test_the_bare_check_runs_from_its_script(without_vllm: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "found"
    command = ["bench/gpu.sh", "--bare", "--only", "machine", "sampling", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, env=without_vllm, check=True, timeout=300)
    report = json.loads((output / "gpu-check.json").read_text())
    results = {part["name"]: part["status"] for part in report["parts"]}
    assert results["machine"] == results["sampling"] == "passed"
    assert results["kernel"] == "not run"


def test_the_bare_parts_import_no_vllm(without_vllm: dict[str, str]) -> None:
    code = f"import importlib; [importlib.import_module(name) for name in {BARE_IMPORTS}]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=without_vllm, check=True)


def test_the_script_wants_a_model() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MODEL"}
    done = subprocess.run(
        ["bench/gpu.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "MODEL=" in done.stderr


@pytest.mark.parametrize(
    ("bar", "figure", "met"),
    [
        (Bar("row", "", ("ratios", "a / b"), least=0.9), [0.5, 0.9, 1.0], True),
        (Bar("row", "", ("ratios", "a / b"), least=0.91), [0.5, 0.9, 1.0], False),
        (Bar("row", "", ("ratios", "a / b"), most=2), [1.5, 2.0, 9.0], True),
        (Bar("row", "", ("ratios", "a / b"), most=1.9), [1.5, 2.0, 9.0], False),
        (Bar("row", "", ("ratios", "a / b"), least=1.3, all_above=1), [1.1, 1.4, 2.0], True),
        (Bar("row", "", ("ratios", "a / b"), least=1.3, all_above=1), [1.0, 1.4, 2.0], False),
    ],
)
def test_a_bar_judges_the_median_and_where_asked_the_spread(
    bar: Bar, figure: list[float], met: bool
) -> None:
    found = find_figure(bar, {"row": {"ratios": {"a / b": figure}}})
    assert found == tuple(figure)
    assert bar.is_met(found) == met


def test_every_bar_is_of_a_row_and_what_was_not_measured_is_said() -> None:
    command = [sys.executable, "bench/run.py", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {bar.row for bar in BARS} == set(done.stdout.split())
    first = BARS[0]
    results = {first.row: {first.path[0]: {first.path[1]: [1.0, 1.5, 2.5]}}}
    lines = write_bars(results).splitlines()
    assert "| 1.5 | 1 to 2.5 |" in lines[2]
    assert "not measured" in lines[-1]
    assert len(lines) == len(BARS) + 2
