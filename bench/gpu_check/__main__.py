"""Checks and measures logsteer on this machine's GPU: `.venv/bin/python -m bench.gpu_check`.

It writes gpu-check.json and gpu-check.md after each part. Without a CUDA device it runs on the CPU
as far as that goes, in a quick selection, and says so. A part that fails does not stop the others;
the exit status is then 1.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.gpu_check.part import ROOT, Findings, run_command
from bench.gpu_check.report import PartResult, Report, shorten


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the check: its title, its module, and seconds after which it is given up."""

    title: str
    module: str
    timeout_s: float


PARTS = {
    "machine": Part("Machine", "machine", 120),
    "kernel": Part("Steering kernel", "kernel", 1800),
    "rows": Part("Reading scored rows", "rows", 1800),
    "sampling": Part("Sampling", "sampling", 900),
    "tlens": Part("TransformerLens engine", "tlens", 3600),
    "contract": Part("Exactness, steering and adapter tests", "contract", 5400),
    "graphs": Part("CUDA graphs", "graphs", 3600),
    "families": Part("Five families of models", "families", 3600),
    "speed": Part("Speed", "speed", 4 * 3600),
}
BARE = ("machine", "kernel", "rows", "sampling", "tlens")
"""Parts that need neither vLLM nor a network."""


def run_one(name: str, device: str, quick: bool, directory: Path) -> PartResult:
    """Run a part in a process of its own; a process that dies is a part that failed."""
    part = PARTS[name]
    command = [sys.executable, "-m", f"bench.gpu_check.{part.module}", "--device", device]
    command += ["--directory", str(directory), *(["--quick"] if quick else [])]
    shown = f".venv/bin/python -m bench.gpu_check --only {name}{' --quick' if quick else ''}"
    started = time.monotonic()
    try:
        found = Findings.decode(run_command(command, part.timeout_s))
    except (RuntimeError, ValueError) as error:
        seconds = time.monotonic() - started
        return PartResult(name, part.title, "failed", str(error), seconds, shown)
    return PartResult.judge(name, part.title, found, time.monotonic() - started, shown)


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
    if quick is None:
        quick = device == "cpu"
    started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    results = {
        name: PartResult(
            name, part.title, "not run", "its turn never came" if name in names else "not asked for"
        )
        for name, part in PARTS.items()
    }
    report = Report(device, quick, started, list(results.values()))
    for name in filter(names.__contains__, PARTS):
        print(f"{PARTS[name].title} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="logsteer-gpu-check-") as directory:
            found = results[name] = run_one(name, device, quick, Path(directory))
        print(f"  {found.status} ({found.seconds:.0f} s) {shorten(found.reason)}", flush=True)
        report.parts = list(results.values())
        report.write(output)
    return report


def main() -> int:
    """Run what was asked for, write the report, return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "bench", help="directory")
    parser.add_argument("--only", nargs="+", choices=list(PARTS))
    parser.add_argument("--bare", action="store_true", help=f"alone {', '.join(BARE)}")
    parser.add_argument("--quick", action=argparse.BooleanOptionalAction, default=None)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    names = options.only or (BARE if options.bare else list(PARTS))
    report = check(names, options.quick, options.output)
    print(f"the report is in {options.output}: gpu-check.md and gpu-check.json")
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main())
