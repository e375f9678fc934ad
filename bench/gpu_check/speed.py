"""What `bench/run.py` measures, by its own commands, beside what is aimed at."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from bench.gpu_check.part import NO_CUDA, Cell, Findings, Options, Table, run_command, run_part


@dataclass(frozen=True, slots=True)
class Work:
    """A row of the speed table: what is done, what is aimed at, and the benchmark that does it."""

    title: str
    bar: str
    benchmark: str | None


WORK = (
    Work("HTTP process, per short item, against tokenising and JSON alone", "at most 2 x", None),
    Work("pipe and engine loop, per item, same measure", "at most 0.6 x", None),
    Work(
        "6,000 short sequences through lm-evaluation-harness and HTTP",
        "1.3 x hf in-process; 6 x local-completions on stock vLLM", "lm_eval",
    ),
    Work("32 contexts of 400 tokens, 4 targets, through HTTP", "8 x the stock server", "choices"),
    Work("full-text scoring", "0.9 of prefill plus the head's bare product", "full_text"),
    Work("the service against its own engine in-process", "0.9", "overhead"),
    Work(
        "steered decoding against unsteered; unsteered against stock vLLM", "0.97 each",
        "steered_decoding",
    ),
    Work("generation with log_q and rb_entropy against without", "0.92", "diagnostics"),
    Work(
        "150 steered tokens, TransformerLens, against the whole sequence again", "10 x",
        "steering_tlens",
    ),
    Work("second start of the demo to its first answer", "12 s", None),
    Work("two replicas against one", "1.85 x", None),
    Work("memory added by 2,048 rows over a vocabulary of 128,256", "256 MiB", "memory"),
)  # fmt: skip
QUICK = ("full_text",)
"""What is measured where the check is quick, with one counted run."""
TIMEOUT_S = 2400


def run_benchmark(options: Options, name: str) -> tuple[str, dict[str, Any]]:
    """Run one benchmark; return its command and what it wrote."""
    path = options.directory / f"{name}.json"
    runs = "1" if options.quick else "5"
    arguments = ["bench/run.py", "--only", name, "--runs", runs]
    run_command([sys.executable, *arguments, "--output", str(path)], TIMEOUT_S)
    result: dict[str, Any] = json.loads(path.read_text())[name]
    return " ".join([".venv/bin/python", *arguments]), result


def tabulate(caption: str, result: dict[str, Any]) -> list[Table]:
    """Return a benchmark's ways and ratios as tables; a spread is [smallest, median, largest]."""
    ways = Table(caption, ["way", "measure", "median", "smallest", "largest"])
    for way, values in result["ways"].items():
        ways.rows += [[way, *cells] for cells in map(spread, values.items())]
    ways.rows += [[name, *spread(("ratio", value))] for name, value in
                  result.get("ratios", {}).items()]  # fmt: skip
    return [ways]


def spread(named: tuple[str, Any]) -> list[Cell]:
    """Return a measure's name, median, smallest and largest value; one number is the median."""
    name, value = named
    words = name.replace("_", " ")
    if isinstance(value, list):
        low, median, high = map(float, value)
        return [words, median, low, high]
    return [words, value, None, None]


def measure(options: Options) -> Findings:
    """Run the benchmarks of the table that there are, one after another."""
    found = Findings()
    for work in WORK:
        if work.benchmark is None:
            found.not_run.append(f"{work.title} ({work.bar}): bench/run.py does not measure it")
            continue
        if options.quick and work.benchmark not in QUICK:
            found.not_run.append(f"{work.title} ({work.bar}): left out of the quick selection")
            continue
        try:
            command, result = run_benchmark(options, work.benchmark)
        except RuntimeError as error:
            found.failures.append(f"{work.benchmark}: {error}")
            continue
        found.tables += tabulate(f"{work.title}; aimed at: {work.bar}. `{command}`", result)
    found.notes.append("What is aimed at stands beside what was measured and is not judged here.")
    if not options.on_cuda:
        found.notes.append(f"These are figures of the CPU: {NO_CUDA}.")
    return found


if __name__ == "__main__":
    run_part(measure)
