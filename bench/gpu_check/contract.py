"""The contract tests of one file on the GPU: what became of each test."""

import re
import shlex
import subprocess
import sys
from collections import Counter

from bench.gpu_check.report import LIMIT_S, ROOT, Findings, Options, Table

QUICK = {
    "exactness": "test_alone_batched_and_shuffled_are_the_same and demo",
    "steering": "test_each_operation_is_a_plain_hook and vllm",
}
"""What is selected where the check is quick."""
OUTCOME = re.compile(r"^(tests/\S+?::.+) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)


def read_outcomes(output: str, found: Findings) -> None:
    """Count the tests by outcome in what pytest prints, and name those that failed."""
    counts: Counter[str] = Counter()
    for test, outcome in OUTCOME.findall(output):
        counts[outcome] += 1
        if outcome in ("FAILED", "ERROR"):
            found.failures.append(f"{outcome}: {test}")
    if not counts["PASSED"] and not found.failures:
        found.failures.append(f"not one test passed: {output[-500:]}")
    found.add(Table("Tests by outcome.", list(counts), [list(counts.values())]))


def measure(options: Options, found: Findings) -> None:
    """Run the tests, and read what became of each, as far as the time reaches.

    A case is one of vLLM's runners and a file of tests, such as `v2-steering`.
    """
    runner, _, name = options.case.partition("-")
    command = [sys.executable, "-m", "pytest", "-vv", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-n", "0", f"tests/contract/test_{name}.py"]
    if options.quick:
        command += ["-k", QUICK[name]]
    devices = "auto" if options.on_cuda else "cpu"
    variables = [f"LOGSTEER_TEST_DEVICES={devices}", f"LOGSTEER_TEST_RUNNER={runner}"]
    found.notes.append(f"Run as `{shlex.join([*variables, *command[1:]])}`")
    shown = ["env", *variables, "timeout", str(LIMIT_S - 30), *command]
    done = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 124:
        found.failures.append(f"the tests took longer than {LIMIT_S - 30} s")
    read_outcomes(done.stdout, found)
