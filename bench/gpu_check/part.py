"""What a part of the check is given, what it finds, and how it runs others' commands.

Each part is a module with a function `measure`, and a process of its own: a GPU that one part has
left in an unusable state is whole again for the next.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NO_CUDA = "no CUDA device"
MARK = "gpu-check "
"""Stands before the one line of a process's output that is meant for its caller."""

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Options:
    """Where a part runs, whether it is cut short, and where it may leave files."""

    device: str
    quick: bool
    directory: Path

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
    """What a part found: it passed where it measured something and nothing failed.

    `not_run` says of what could not run here why; `facts` are of the machine.
    """

    tables: list[Table] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def need(self, what: str, error: float, limit: float) -> None:
        """Note a failure where an error is above its limit, or no number."""
        if not error <= limit:
            self.failures.append(f"{what}: {error:.3g} where at most {limit:.3g} is allowed")

    def encode(self) -> str:
        """The line by which a part's process hands over what it found."""
        return MARK + json.dumps(asdict(self))

    @classmethod
    def decode(cls, output: str) -> "Findings":
        """Read what a part's process has printed. Errors: ValueError where it has not."""
        found = json.loads(find_line(output.splitlines(), MARK))
        tables = [Table(**table) for table in found.pop("tables")]
        return cls(tables=tables, **found)


def find_line(lines: Iterable[str], mark: str) -> str:
    """What follows the mark in the last line that begins with it; vLLM prints, too.

    Errors: ValueError where there is no such line.
    """
    found = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    if not found:
        raise ValueError(f"no line of the output begins with {mark!r}")
    return found[-1]


def spread(name: str, value: float | Sequence[float] | str | None) -> list[Cell]:
    """Return a measure's name, median, smallest and largest value.

    The value is [smallest, median, largest], or one alone, which is taken for the median.
    """
    words = name.replace("_", " ")
    if isinstance(value, list):
        low, median, high = map(float, value)
        return [words, median, low, high]
    return [words, value, None, None]  # type: ignore[list-item]


def run_command(command: Sequence[str], timeout_s: float, **environment: str) -> str:
    """Run a command in the project's directory; return what it printed.

    Errors: RuntimeError with the end of its messages where it fails or takes longer.
    """
    try:
        done = subprocess.run(
            [*command],
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as expired:
        raise RuntimeError(f"took longer than {timeout_s:g} s") from expired
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip())[-1500:]
        raise RuntimeError(f"ended with status {done.returncode}: {words}")
    return done.stdout


def run_part(measure: Callable[[Options], Findings]) -> None:
    """Measure as the command line says, and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--directory", type=Path, required=True)
    found = measure(Options(**vars(parser.parse_args())))
    sys.stdout.write("\n" + found.encode() + "\n")
