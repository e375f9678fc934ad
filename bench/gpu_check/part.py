"""What a part of the check is given, what it finds, and how it runs others' commands.

Each part is a module with a function `measure`, and a process of its own: a GPU that one part has
left in an unusable state is whole again for the next. What it finds it writes down table by table,
so that a part that dies or takes too long leaves what it has measured.
"""

import argparse
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NO_CUDA = "no CUDA device"
LIMIT_S = 480
"""Seconds that a part may take: machines with a GPU are lent for minutes."""

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Options:
    """Where a part runs, whether it is cut short, where it may leave files, and which of its cases
    is asked for; empty where it has one.
    """

    device: str
    quick: bool
    directory: Path
    case: str = ""

    @property
    def on_cuda(self) -> bool:
        """Whether the part has a GPU."""
        return self.device == "cuda"


@dataclass(slots=True)
class Table:
    """Numbers of a part: a caption, names of columns, rows of as many cells."""

    caption: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)


@dataclass(slots=True)
class Findings:
    """What a part has found so far, in the file `path`.

    `not_run` says of what could not run here why; `facts` are of the machine.
    """

    path: Path
    tables: list[Table] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def add(self, table: Table) -> None:
        """Add a table, and write down all that was found until now."""
        self.tables.append(table)
        self.save()

    def need(self, what: str, error: float, limit: float) -> None:
        """Note a failure where an error is above its limit, or no number."""
        if not error <= limit:
            self.failures.append(f"{what}: {error:.3g} where at most {limit:.3g} is allowed")

    def save(self) -> None:
        """Write the file anew."""
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps(asdict(self), default=str))
        written.replace(self.path)

    @classmethod
    def load(cls, path: Path) -> "Findings":
        """Read what a part has written down; nothing where it has written nothing."""
        if not path.is_file():
            return cls(path)
        found = json.loads(path.read_text()) | {"path": path}
        return cls(tables=[Table(**table) for table in found.pop("tables")], **found)


def list_result(name: str, values: Mapping[str, Any]) -> list[list[Cell]]:
    """Return the rows of a benchmark's values: name, measure, median, smallest, largest.

    A value is [smallest, median, largest], or one alone, which is taken for the median.
    """
    rows: list[list[Cell]] = []
    for measure, value in values.items():
        low, median, high = value if isinstance(value, list) else (None, value, None)
        rows.append([name, measure.replace("_", " "), median, low, high])
    return rows


def find_line(lines: Sequence[str], mark: str) -> str:
    """Return what follows the mark in the last line that begins with it; vLLM prints, too.

    Errors: ValueError where there is no such line.
    """
    found = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    if not found:
        raise ValueError(f"no line of the output begins with {mark!r}")
    return found[-1]


def run_command(
    command: Sequence[str],
    timeout_s: float = LIMIT_S,
    environment: Mapping[str, str] | None = None,
    *,
    own_group: bool = False,
) -> str:
    """Run a command in the project's directory; return what it printed.

    Where it has a group of processes of its own, what it has started ends with it: a server that is
    left would keep the GPU's memory from the next part. Errors: RuntimeError with the end of its
    messages where it fails or takes longer.
    """
    with subprocess.Popen(
        [*command],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0 if own_group else None,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException as stopped:
            if own_group:
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            if isinstance(stopped, subprocess.TimeoutExpired):
                raise RuntimeError(f"took longer than {timeout_s:g} s") from stopped
            raise
    if process.returncode:
        words = (errors.strip() or output.strip())[-1500:]
        raise RuntimeError(f"ended with status {process.returncode}: {words}")
    return output


def run_part(measure: Callable[[Options, Findings], None]) -> None:
    """Measure as the command line says, and write down what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--case", default="")
    options = Options(**vars(parser.parse_args()))
    found = Findings(options.directory / "findings.json")
    measure(options, found)
    found.save()
