"""Checks and measures logsteer on this machine's GPU: `.venv/bin/python -m bench.gpu_check`.

It has parts of LIMIT_S seconds at most, those that need no vLLM first, and writes gpu-check.json
and gpu-check.md after each. Without a CUDA device it runs on the CPU as far as that goes, in a
quick selection, and says so. A part that fails does not stop the others; the exit status is then 1.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu_check.report import (
    LIMIT_S,
    ROOT,
    Findings,
    Options,
    PartResult,
    Report,
    run_command,
    shorten,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the check: its title, its module, and which of the module's cases it is."""

    title: str
    module: str
    case: str = ""


BARE = {
    "machine": Part("Machine", "machine"),
    "kernel": Part("Steering kernel", "kernel"),
    "rows": Part("Reading scored rows", "rows"),
    "sampling": Part("Sampling", "sampling"),
    "tlens": Part("TransformerLens engine", "tlens", "scores"),
    "tlens-speed": Part("TransformerLens engine, speed", "tlens", "speed"),
}
"""Parts that need neither vLLM nor a network."""
MODES = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE")
DTYPES = ("float32", "bfloat16")
PARTS = (
    BARE
    | {f"graphs-v2-{mode}": Part(f"V2 runner, {mode}", "graphs", f"v2-{mode}") for mode in MODES}
    | {f"families-{dtype}": Part(f"Families, {dtype}", "families", dtype) for dtype in DTYPES}
    | {"adapters": Part("Adapters", "adapters"), "stock": Part("Against stock vLLM", "stock")}
)


def run_one(result: PartResult, device: str, quick: bool) -> None:
    """Run a part in a process of its own; a process that dies is a part that failed."""
    command = [sys.executable, "-m", "bench.gpu_check", "--part", result.name, "--device", device]
    command += ["--quick"] if quick else []
    result.command = f".venv/bin/python -m bench.gpu_check --only {result.name}"
    started, died = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="logsteer-gpu-check-") as directory:
        try:
            run_command([*command, "--directory", directory], own_group=True)
        except RuntimeError as error:
            died = str(error)
        result.seconds = time.monotonic() - started
        result.judge(Findings.load(Path(directory) / "findings.json"), died)


def measure(name: str, device: str, quick: bool, directory: Path) -> None:
    """Run a part in this process, and write down what was found."""
    part, found = PARTS[name], Findings(directory / "findings.json")
    module = importlib.import_module(f"bench.gpu_check.{part.module}")
    module.measure(Options(device, quick, directory, part.case), found)
    found.save()


def find_device() -> str:
    """Return where to run: `cuda` where torch has a device, else `cpu`.

    Errors: CalledProcessError where there is no torch, without which nothing here runs.
    """
    code = "import torch; print(torch.cuda.is_available())"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    return "cuda" if done.stdout.strip().endswith("True") else "cpu"


def check(names: Sequence[str], quick: bool | None, output: Path) -> Report:
    """Run the parts named, in order; write the report anew after each.

    `quick` None: where there is no CUDA device.
    """
    device = find_device()
    started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = [PartResult(name, PARTS[name].title) for name in PARTS if name in names]
    report = Report(device, device == "cpu" if quick is None else quick, started, parts)
    for result in parts:
        print(f"{result.title} ...", flush=True)
        run_one(result, device, report.quick)
        print(f"  {result.status} ({result.seconds:.0f} s) {shorten(result.reason)}", flush=True)
        report.write(output)
    return report


def main() -> int:
    """Run what was asked for, write the report, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "bench", help="directory")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART")
    parser.add_argument("--bare", action="store_true", help=f"alone {', '.join(BARE)}")
    parser.add_argument("--quick", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--list", action="store_true", help="print the parts, run nothing")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:  # in a process of its own, which `run_one` has started
        measure(options.part, options.device, bool(options.quick), options.directory)
        return 0
    if options.list:
        print(*PARTS, sep="\n")
        return 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    names = options.only or list(BARE if options.bare else PARTS)
    print(f"{len(names)} parts of {LIMIT_S} s at most")
    report = check(names, options.quick, options.output)
    print(f"the report is in {options.output}: gpu-check.md and gpu-check.json")
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main())
