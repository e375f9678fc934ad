"""What this machine has: memory, cores, GPUs. Asked of the system, without torch."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

GPU_QUERY = "index,name,memory.total,memory.free,driver_version"
GPU_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, with its memory in bytes."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    driver: str


def list_gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi names; none where it is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(found.stdout)


def parse_gpus(text: str) -> list[Gpu]:
    """Return the GPUs of nvidia-smi's lines, whose numbers are in MiB; others are left out."""
    gpus = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5 and parts[0].isdigit() and parts[2].isdigit() and parts[3].isdigit():
            total, free = (int(part) * 2**20 for part in parts[2:4])
            gpus.append(Gpu(int(parts[0]), parts[1], total, free, parts[4]))
    return gpus


def measure_memory() -> tuple[int, int]:
    """Return the bytes of memory that this process may have in all, and those that are free.

    The limits of control groups count (version 2, and the root of a container). 0 where unknown.
    """
    total, free = _read_meminfo()
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return total, free
    if limit.isdigit() and int(limit) < total:
        return int(limit), min(free, int(limit) - used)
    return total, free


def _read_meminfo() -> tuple[int, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    values = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (n.partition(":") for n in lines)
    }
    return values.get("MemTotal", 0), values.get("MemAvailable", 0)


def count_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))
