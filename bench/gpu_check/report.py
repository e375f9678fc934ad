"""The report: what became of each part, as JSON and as Markdown."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.gpu_check.part import Cell, Findings, Table

Status = Literal["passed", "failed", "not run"]


@dataclass(slots=True)
class PartResult:
    """What became of a part, in how many seconds; `reason` says why it failed or did not run."""

    name: str
    title: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    command: str = ""
    found: Findings = field(default_factory=Findings)

    @classmethod
    def judge(
        cls, name: str, title: str, found: Findings, seconds: float, command: str
    ) -> "PartResult":
        """Take a part for failed where anything in it failed, for not run where all is missing."""
        if found.failures:
            status: Status = "failed"
            reason = f"{len(found.failures)} of its checks failed, see below"
        elif found.tables or found.facts:
            left = f"{len(found.not_run)} of its measurements did not run, see below"
            status, reason = "passed", left if found.not_run else ""
        else:
            status, reason = "not run", "; ".join(found.not_run)
        return cls(name, title, status, reason, seconds, command, found)


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

    def to_json(self) -> dict[str, Any]:
        """Every number of the report."""
        return asdict(self) | {"exit_status": self.exit_status}

    def to_markdown(self) -> str:
        """The report for reading."""
        device = "a CUDA device" if self.device == "cuda" else "the CPU: this is not a GPU's report"
        extent = "a quick selection of each part" if self.quick else "every part in full"
        blocks = [
            "# GPU check",
            f"Run on {device}, {extent}, {self.started}.",
            write_table(
                Table(
                    "",
                    ["part", "result", "seconds", "why"],
                    [[p.title, p.status, round(p.seconds), shorten(p.reason)] for p in self.parts],
                )
            ),
        ]
        for part in self.parts:
            blocks += write_part(part)
        return "\n\n".join(blocks) + "\n"

    def write(self, directory: Path) -> None:
        """Write gpu-check.json and gpu-check.md."""
        directory.mkdir(parents=True, exist_ok=True)
        numbers = json.dumps(self.to_json(), indent=1) + "\n"
        (directory / "gpu-check.json").write_text(numbers)
        (directory / "gpu-check.md").write_text(self.to_markdown())


def write_part(part: PartResult) -> list[str]:
    """Return a part's blocks of Markdown: its result, failures, tables and notes."""
    head = f"**{part.status}**"
    if part.reason and "\n" in part.reason:
        head += f"\n\n```\n{part.reason}\n```"
    elif part.reason:
        head += f": {part.reason}"
    blocks = [f"## {part.title}", head]
    if part.command:
        blocks.append(f"`{part.command}`")
    found = part.found
    if found.failures:
        blocks.append("\n".join(f"- failed: {write_cell(line)}" for line in found.failures))
    if found.facts:
        rows: list[list[Cell]] = [[name, value] for name, value in found.facts.items()]
        blocks.append(write_table(Table("", ["fact", "value"], rows)))
    for table in found.tables:
        blocks += [table.caption, write_table(table)]
    if found.not_run and part.status != "not run":
        blocks.append("\n".join(f"- not run: {line}" for line in found.not_run))
    if found.notes:
        blocks.append("\n".join(f"- {line}" for line in found.notes))
    return blocks


def write_table(table: Table) -> str:
    """Return a table of Markdown whose columns are aligned: numbers to the right."""
    cells = [list(map(write_cell, row)) for row in table.rows]
    columns = list(zip(table.columns, *cells, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]
    is_number = [
        all(isinstance(row[i], int | float | None) for row in table.rows)
        for i in range(len(widths))
    ]

    def write_row(row: Sequence[str]) -> str:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, is_number, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        "-" * (width - 1) + (":" if right else "-")
        for width, right in zip(widths, is_number, strict=True)
    ]
    return "\n".join(map(write_row, [table.columns, rule, *cells]))


def write_cell(value: Cell) -> str:
    """Return what stands in a cell, on one line; numbers have three digits, None is nothing."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def shorten(text: str) -> str:
    """Return the last line of a text, cut to what a table can hold."""
    line = text.strip().splitlines()[-1] if text.strip() else ""
    return line if len(line) <= 80 else line[:79] + "…"
