"""The tests of exactness, steering and adapters, with the tests' servers on the device."""

import shlex
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from bench.gpu_check.part import Cell, Findings, Options, Table, run_command, run_part

FILES = ("test_exactness.py", "test_steering.py", "test_adapters.py")
QUICK = (
    "test_alone_batched_and_shuffled_are_the_same and demo",
    "test_each_operation_is_a_plain_hook and vllm",
    "test_half_a_batch_steered and vllm",
    "test_scores_of_a_steered_sample and vllm",
    "test_scores_are_those_of_merged_weights and vllm",
)
"""What is selected where the check is quick: tests of two servers, both on vLLM."""
OUTCOMES = ("passed", "failed", "skipped")
TIMEOUT_S = 5000


def read_outcome(case: ElementTree.Element) -> str:
    """Whether a test of a JUnit file passed, failed or was skipped."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def read_results(path: Path) -> Findings:
    """Count the tests of a JUnit file by file and outcome, and name those that failed.

    Errors: OSError where there is no file.
    """
    found = Findings()
    counts: dict[str, Counter[str]] = {}
    cases = ElementTree.parse(path).iter("testcase")  # noqa: S314 - our own pytest has written it
    for case in cases:
        file, name = case.attrib["classname"].split(".")[-1], case.attrib["name"]
        outcome = read_outcome(case)
        counts.setdefault(file, Counter())[outcome] += 1
        problem = case.find("failure") if case.find("error") is None else case.find("error")
        if problem is not None:
            words = (problem.get("message") or "").strip().splitlines() or [""]
            found.failures.append(f"{file}::{name}: {words[0][:200]}")
    table = Table("Tests by outcome.", ["file", *OUTCOMES])
    for file, count in counts.items():
        cells: list[Cell] = [count[outcome] for outcome in OUTCOMES]
        table.rows.append([f"tests/contract/{file}.py", *cells])
    found.tables.append(table)
    if not sum(count["passed"] for count in counts.values()) and not found.failures:
        found.failures.append("not one test passed")
    return found


def measure(options: Options) -> Findings:
    """Run the tests, and read what became of each."""
    results = options.directory / "results.xml"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}",
        *(f"tests/contract/{name}" for name in FILES),
    ]  # fmt: skip
    if options.quick:
        command += ["-k", " or ".join(f"({words})" for words in QUICK)]
    ended: RuntimeError | None = None
    devices = "auto" if options.on_cuda else "cpu"
    try:
        run_command(command, TIMEOUT_S, LOGSTEER_TEST_DEVICES=devices)
    except RuntimeError as error:  # tests that fail are in the file; without a file it died
        ended = error
    if not results.is_file():
        raise ended or RuntimeError("pytest has written no results")
    found = read_results(results)
    if ended and not found.failures:
        found.failures.append(str(ended))
    shown = [word for word in command[2:] if not word.startswith("--junitxml")]
    found.notes.append(f"Run as `LOGSTEER_TEST_DEVICES={devices} {shlex.join(shown)}`")
    return found


if __name__ == "__main__":
    run_part(measure)
