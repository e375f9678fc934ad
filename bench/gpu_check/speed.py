"""What `bench/run.py` measures, by its own command, and whether what is asked of it is met."""

import json
import sys
from typing import Any

from bench.bars import BARS, find_figure
from bench.gpu_check.part import (
    NO_CUDA,
    Cell,
    Findings,
    Options,
    Table,
    run_command,
    run_part,
    spread,
)

QUICK = ("full_text",)
"""What is measured where the check is quick, with one counted run."""
TIMEOUT_S = 2400


def run_benchmark(options: Options, name: str) -> tuple[str, dict[str, Any]]:
    """Run one benchmark; return its command and what it wrote."""
    path = options.directory / f"{name}.json"
    arguments = ["bench/run.py", "--only", name, *(["--runs", "1"] if options.quick else [])]
    run_command([sys.executable, *arguments, "--output", str(path)], TIMEOUT_S)
    result: dict[str, Any] = json.loads(path.read_text())[name]
    return " ".join([".venv/bin/python", *arguments]), result


def tabulate(caption: str, result: dict[str, Any]) -> Table:
    """Return a benchmark's ways, ratios and figures; a spread is [smallest, median, largest]."""
    table = Table(caption, ["way", "measure", "median", "smallest", "largest"])
    for way, values in result.get("ways", {}).items():
        table.rows += [[way, *spread(name, value)] for name, value in values.items()]
    for part in ("ratios", "figures"):
        table.rows += [[name, *spread(part[:-1], v)] for name, v in result.get(part, {}).items()]
    return table


def judge(results: dict[str, Any]) -> Table:
    """Return the table of what is asked; a bar that is missed is no failure of the check."""
    table = Table(
        "What is asked of the median.",
        ["row", "what", "median", "smallest", "largest", "bar", "met"],
    )
    for bar in BARS:
        if (figure := find_figure(bar, results)) is not None:
            low, median, high = figure
            met: Cell = "yes" if bar.is_met(figure) else "no"
            table.rows.append([bar.row, bar.what, median, low, high, bar.limit, met])
    return table


def measure(options: Options) -> Findings:
    """Run the benchmarks of which something is asked, one after another."""
    found = Findings()
    results = {}
    for name in run_command([sys.executable, "bench/run.py", "--list"], TIMEOUT_S).split():
        if options.quick and name not in QUICK:
            found.not_run.append(f"{name}: left out of the quick selection")
            continue
        try:
            command, results[name] = run_benchmark(options, name)
        except RuntimeError as error:
            found.failures.append(f"{name}: {error}")
            continue
        found.tables.append(tabulate(f"`{command}`", results[name]))
    if results:
        found.tables.insert(0, judge(results))
    if not options.on_cuda:
        found.notes.append(f"These are figures of the CPU: {NO_CUDA}.")
    return found


if __name__ == "__main__":
    run_part(measure)
