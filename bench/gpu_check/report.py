"""The report: what became of each part, as JSON and as Markdown."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from bench.bars import tabulate
from bench.gpu_check.part import Findings

Status = Literal["passed", "failed", "not run"]


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
