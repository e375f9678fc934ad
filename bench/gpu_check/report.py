"""What a part of the check is given, what it finds, and how it runs others' commands; and the
report: what became of each part, as JSON and as Markdown.

Each part is a module with a function `measure`, and a process of its own: a GPU that one part has
left in an unusable state is whole again for the next. What it finds it writes down table by table,
so that a part that dies or takes too long leaves what it has measured.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from bench.bars import tabulate

ROOT = Path(__file__).resolve().parents[2]
NO_CUDA = "no CUDA device"
LIMIT_S = 480
"""Seconds that a part may take: machines with a GPU are lent for minutes."""

Cell = str | float | int | None
Status = Literal["passed", "failed", "not run"]


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


@dataclass(slots=True)
class PartResult:
    """What became of a part, in how many seconds; `reason` says why it failed or did not run."""

    name: str
    title: str
    status: Status = "not run"
    reason: str = "its turn has not come"
    seconds: float = 0.0
    command: str = ""
    found: Findings = field(default_factory=lambda: Findings(Path()))

    def judge(self, found: Findings, died: str = "") -> None:
        """Take the part for failed where it died or anything in it failed, for not run where
        nothing was measured.
        """
        self.found = found
        if died:
            self.status, self.reason = "failed", died
        elif found.failures:
            self.status = "failed"
            self.reason = f"{len(found.failures)} of its checks failed, see below"
        elif found.tables or found.facts:
            left = f"{len(found.not_run)} of its measurements did not run, see below"
            self.status, self.reason = "passed", left if found.not_run else ""
        else:
            self.reason = "; ".join(found.not_run)


@dataclass(slots=True)
class Report:
    """All parts of one run on one machine."""

    device: str
    quick: bool
    started: str
    parts: list[PartResult]

    @property
    def exit_status(self) -> int:
        """1 where a part has failed."""
        return int(any(part.status == "failed" for part in self.parts))

    def to_markdown(self) -> str:
        """The report for reading."""
        device = "a CUDA device" if self.device == "cuda" else "the CPU: this is not a GPU's report"
        extent = "a quick selection of each part" if self.quick else "every part in full"
        lines = [(p.title, p.status, round(p.seconds), shorten(p.reason)) for p in self.parts]
        blocks = [
            "# GPU check",
            f"Run on {device}, {extent}, {self.started}.",
            tabulate(("part", "result", "seconds", "why"), lines),
        ]
        for part in self.parts:
            if part.command:
                blocks += write_part(part)
        return "\n\n".join(blocks) + "\n"

    def write(self, directory: Path) -> None:
        """Write gpu-check.json and gpu-check.md."""
        directory.mkdir(parents=True, exist_ok=True)
        numbers = asdict(self) | {"exit_status": self.exit_status}
        (directory / "gpu-check.json").write_text(json.dumps(numbers, indent=1, default=str) + "\n")
        (directory / "gpu-check.md").write_text(self.to_markdown())


def write_part(part: PartResult) -> list[str]:
    """Return a part's blocks of Markdown: its result, failures, tables and notes."""
    found = part.found
    blocks = [f"## {part.title}", f"**{part.status}** `{part.command}`"]
    if part.reason:
        blocks.append(f"```\n{part.reason}\n```")
    if found.facts:
        blocks.append(tabulate(("fact", "value"), list(found.facts.items())))
    for table in found.tables:
        blocks += [table.caption, tabulate(table.columns, table.rows)]
    lines = [f"- failed: {line}" for line in found.failures]
    lines += [f"- not run: {line}" for line in found.not_run]
    lines += [f"- {line}" for line in found.notes]
    return [*blocks, "\n".join(lines)] if lines else blocks


def shorten(reason: str) -> str:
    """Return the first line of a reason, for a cell."""
    return reason.partition("\n")[0][:100]
