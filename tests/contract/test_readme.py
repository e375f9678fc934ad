"""Every command and answer of the README, run as it stands against the demo model."""

import json
import os
import re
import subprocess
from itertools import pairwise
from typing import Any

import pytest
import yaml

from logsteer_server.settings import Settings
from tests.conftest import ROOT, Server

pytestmark = pytest.mark.engine

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


def run(command: str, server: Server) -> str:
    environment = os.environ | {"LOGSTEER_BASE_URL": server.url}
    result = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, server.url)],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def assert_contains(found: Any, shown: Any) -> None:
    """What the README shows is part of the answer, numbers to the digits shown."""
    if isinstance(shown, dict):
        for key, value in shown.items():
            assert_contains(found[key], value)
    elif isinstance(shown, list):
        assert len(found) == len(shown)
        for one, other in zip(found, shown, strict=True):
            assert_contains(one, other)
    elif isinstance(shown, float):
        digits = len(str(f"{shown:.10f}".rstrip("0")).split(".")[1])
        assert round(found, digits) == pytest.approx(shown, abs=10**-digits)
    else:
        assert found == shown


def curls() -> list[tuple[str, str]]:
    pairs = pairwise(BLOCKS)
    return [(a[1], b[1]) for a, b in pairs if a[1].startswith("curl") and b[0] == "json"]


def test_the_readme_is_short_and_has_three_calls() -> None:
    assert len(README.split()) <= 600
    assert len(curls()) == 3


@pytest.mark.parametrize("index", range(3))
def test_curl_calls_answer_as_shown(demo_server: Server, index: int) -> None:
    command, shown = curls()[index]
    assert_contains(json.loads(run(command, demo_server)), json.loads(shown))


def test_the_calls_that_the_server_prints_are_those_of_the_readme(demo_server: Server) -> None:
    printed = [line.strip() for line in demo_server.lines if line.startswith("  curl")]
    expected = [command.strip().replace(ADDRESS, demo_server.url) for command, _ in curls()]
    assert printed == expected


def test_the_python_example_runs(demo_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for language, code in BLOCKS:
        if language == "python":
            exec(compile(code.replace(ADDRESS, demo_server.url), "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("0 [0.99")
    assert "all alone in the dark" in printed[1]
    assert "danced and sang with her friends" in printed[2]


def test_the_command_line_examples_run(demo_server: Server) -> None:
    commands = [
        line for language, block in BLOCKS if language == "sh" for line in block.splitlines()
        if line.startswith(".venv/bin/logsteer")
    ]  # fmt: skip
    assert len(commands) == 4
    for command in commands:
        assert run(command, demo_server)


def test_make_targets_exist() -> None:
    targets = re.findall(r"make (\w+)", README)
    assert {"serve", "demo"} <= set(targets)
    for target in targets:
        result = subprocess.run(
            ["make", "--dry-run", target], capture_output=True, check=False, cwd=ROOT
        )
        assert result.returncode == 0, target


def test_the_configuration_example_is_valid() -> None:
    examples = [yaml.safe_load(block) for language, block in BLOCKS if language == "yaml"]
    assert len(examples) == 1
    for example in examples:
        assert Settings(**example).models[0].tensor_parallel == 2
