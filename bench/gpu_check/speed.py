"""A row of `bench/run.py`, by its own command, and whether what is asked of it is met."""

import json
import sys
from typing import Any

from bench.bars import BARS, COLUMNS, find_figure, list_figures
from bench.gpu_check.report import (
    NO_CUDA,
    Findings,
    Options,
    Table,
    run_command,
)

QUICK = "full_text"
"""What is measured where the check is quick, with one counted run."""


def measure(options: Options, found: Findings) -> None:
    """Run the benchmark; a bar that is missed is no failure of the check."""
    row = options.case
    if options.quick and row != QUICK:
        found.not_run.append("left out of the quick selection")
        return
    path = options.directory / f"{row}.json"
    arguments = ["-m", "bench.run", "--only", row, *(["--runs", "1"] if options.quick else [])]
    run_command([sys.executable, *arguments, "--output", str(path)])
    result: dict[str, Any] = json.loads(path.read_text())[row]
    bars = Table("What is asked of the median.", ["what", "median", "bar", "met"])
    for bar in BARS:
        if (figure := find_figure(bar, {row: result})) is not None:
            met = "yes" if bar.is_met(figure) else "no"
            bars.rows.append([bar.what, figure[1], bar.limit, met])
    found.add(bars)
    caption = f"`.venv/bin/python {' '.join(arguments)}`"
    found.notes += result.get("notes", [])
    if not options.on_cuda:
        found.notes.append(f"These are figures of the CPU: {NO_CUDA}.")
    found.add(Table(caption, COLUMNS, list_figures(result)))
