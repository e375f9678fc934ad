"""The code blocks of the documentation, and how each is run as it stands."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from logsteer import Client
from tests.conftest import ROOT

ADDRESS = "http://127.0.0.1:8000"
"""Where documents have the server."""
NOT_RUN = "not run: "
"""What a comment before a block begins with where the block cannot run here; the reason follows."""
DISTRIBUTIONS = [ROOT / "client" / "README.md", ROOT / "server" / "README.md"]
"""What package indexes show."""
PAGES = [
    ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *DISTRIBUTIONS,
    ROOT / "demo" / "README.md",
]  # fmt: skip

_FENCE = re.compile(
    r'(?:^<!-- ([^\n]*) -->\n)?^```(\w+)(?: title="[^"]*")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page, and the comment before it; `line` is where they begin."""

    page: Path
    line: int
    comment: str
    language: str
    code: str

    @property
    def is_run(self) -> bool:
        """Whether tests run it."""
        return not self.comment.startswith(NOT_RUN)

    @property
    def name(self) -> str:
        """Where it stands."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, text[: found.start()].count("\n") + 1, *_parts(found))
        for found in _FENCE.finditer(text)
    ]


def _parts(found: re.Match[str]) -> tuple[str, str, str]:
    return found[1] or "", found[2], found[3]


def run_shell(command: str, url: str, directory: Path) -> str:
    """Run a block as bash does, with the project's commands on the path; return what it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"LOGSTEER_BASE_URL": url, "PATH": path}
    result = subprocess.run(
        ["bash", "-euc", command.replace(ADDRESS, url)],
        capture_output=True, text=True, check=False, cwd=directory, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_python(code: str, url: str, name: str, namespace: dict[str, Any]) -> None:
    """Run a block in what the blocks before it on its page have defined."""
    exec(compile(code.replace(ADDRESS, url), name, "exec"), namespace)


@contextmanager
def open_namespace() -> Iterator[dict[str, Any]]:
    """What the blocks of a page define; clients among it are closed at the end."""
    namespace: dict[str, Any] = {}
    try:
        yield namespace
    finally:
        for value in namespace.values():
            if isinstance(value, Client | OpenAI):
                value.close()


def assert_contains(found: Any, shown: Any) -> None:
    """What a page shows is part of the answer, numbers to the digits shown."""
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
