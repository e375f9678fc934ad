"""The machine that an engine runs on: its GPUs, CPU and memory."""

import hashlib
import os
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from logsteer_server.contract.engine import DeviceMemory, EngineSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
CPU_FACTS = re.compile(r"^(?:model name|flags|Features)\s*: (.*\S)", re.MULTILINE)
"""Lines of Linux's cpuinfo; `Features` is ARM's name for flags."""
COMPILED = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "torchinductor"}
"""Environment variable of a cache of compiled code -> its directory in the user's cache."""
SPINS = "20000"
"""How often a thread of GNU OpenMP looks for work before it sleeps: for about 0.2 ms, longer than
the time between two products of a step."""


def separate_compiled_code() -> None:
    """Keep compiled code in a directory per CPU. Call it before vLLM is imported.

    PyTorch also loads code compiled for AVX-512 on a CPU with AVX2, and then writes half of the
    values: a home directory or volume shared by two machines gave wrong scores. A compiled INT8
    layer has the kernel that was right for the instructions that oneDNN may use.
    """
    limits = [os.environ.get(name, "") for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")]
    facts = [*limits, *_read_cpu()]
    cpu = "cpu-" + hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    caches = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    for name, directory in COMPILED.items():
        cache = Path(os.environ.get(name) or Path(caches, directory))
        if cache.name != cpu:
            os.environ[name] = str(cache / cpu)


def let_threads_sleep() -> None:
    """Make OpenMP's threads sleep soon while they wait. Call it before PyTorch is imported.

    By default they spin for 3 ms and take the core from other processes: the HTTP process, a
    client, another engine. Without any spinning every product of a step wakes them again: on two
    cores a step of SmolLM2 with 16 sequences then took 94 ms in place of 74. What the user sets
    stays: OMP_WAIT_POLICY=ACTIVE is for an engine that has its cores to itself.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def take_share(spec: EngineSpec) -> None:
    """Restrict this process to its replica's share of the cores and of the GPUs.

    Call it before threads and CUDA are first used. GPUs are shared in order; devices listed in the
    configuration are shared elsewhere. If there are more replicas than cores, replicas share cores.

    Errors: ValueError if CUDA_VISIBLE_DEVICES has fewer GPUs than all replicas need.
    """
    if spec.replicas == 1:
        return
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // spec.replicas)
    first = spec.replica * share % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])
    if spec.devices == "auto" and os.environ.get(VISIBLE, "0") not in ("", "-1"):
        ranks = spec.tensor_parallel * spec.pipeline_parallel
        show_devices(range(spec.replica * ranks, (spec.replica + 1) * ranks))


def show_devices(indices: Sequence[int]) -> None:
    """Restrict CUDA to some of its visible GPUs. Call it before CUDA is first used.

    If a scheduler has set `4,5,6`, or UUIDs, 0 and 1 mean its first two entries: `4,5`.

    Errors: ValueError for an index beyond them.
    """
    listed = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = ",".join(_select(indices, listed))


def _select(indices: Sequence[int], listed: str | None) -> list[str]:
    """Return entries of CUDA_VISIBLE_DEVICES by index; the indices themselves if it is not set."""
    if listed is None:
        return [str(index) for index in indices]
    entries = [entry.strip() for entry in listed.split(",")]
    hidden = next((n for n, entry in enumerate(entries) if entry in ("", "-1")), len(entries))
    visible = entries[:hidden]  # CUDA stops at the first invalid entry
    beyond = [index for index in indices if not 0 <= index < len(visible)]
    if beyond:
        raise ValueError(
            f"devices: {beyond} of {list(indices)} do not exist: {VISIBLE} is {listed!r}, so that "
            f"{len(visible)} can be seen, counted from 0"
        )
    return [visible[index] for index in indices]


def describe_machine(device_type: str) -> tuple[str, ...]:
    """Return what numbers depend on besides the model: versions of libraries, GPUs or the CPU."""
    import torch

    found = [f"torch {torch.__version__}", f"transformers {version('transformers')}"]
    if device_type == "cuda":
        names = {torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())}
        return (*found, f"CUDA {torch.version.cuda}", *sorted(names))
    capability = torch.backends.cpu.get_cpu_capability()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return (*found, capability, limit, *_read_cpu())


def name_devices(device_type: str) -> str:
    """Return the devices that this process computes on: `cpu`, or `2 x NVIDIA H100 80GB HBM3`."""
    if device_type != "cuda":
        return device_type
    import torch

    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    counts = {name: names.count(name) for name in sorted(names)}
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())


def read_memory() -> tuple[DeviceMemory, ...]:
    """Return the memory of every GPU that this process has used.

    GPUs have their names in CUDA_VISIBLE_DEVICES, which differ between engines.
    """
    import torch

    names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    found = []
    for number in range(torch.cuda.device_count()):
        if held := torch.cuda.memory_reserved(number):  # 0 for a GPU that is not in use
            free, size = torch.cuda.mem_get_info(number)
            name = names[number] if number < len(names) else str(number)
            found.append(DeviceMemory(name, held, free, size))
    return tuple(found)


def measure_memory() -> tuple[int, int]:
    """Return the total and the free memory of this process in bytes; 0 if unknown.

    A container's control group (version 2) limits both.
    """
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0, 0
    values = {name: int(kib) * 1024 for name, kib in re.findall(r"(\w+): +(\d+) kB", text)}
    total, free = values.get("MemTotal", 0), values.get("MemAvailable", 0)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no group, or no limit: `max`
        return total, free
    return (limit, min(free, limit - used)) if limit < total else (total, free)


def _read_cpu() -> list[str]:
    """Return the first processor's name and instruction sets from Linux's cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    return CPU_FACTS.findall(text.partition("\n\n")[0])
