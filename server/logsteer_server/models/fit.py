"""Check whether a model fits on this machine."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from logsteer_server.engines.gguf import describe_gguf, is_gguf
from logsteer_server.engines.machine import measure_memory
from logsteer_server.engines.needs import ModelNeeds, estimate, find_checkpoint
from logsteer_server.settings import ModelSettings, Settings

SERVER_BYTES = 350 * 2**20
"""Memory of the HTTP process beyond `cache_bytes` and `max_pending_bytes`, measured under load: row
`http_memory` of the benchmark."""

GPU_TIMEOUT_S = 10.0


def check_files(model: ModelSettings, settings: Settings) -> None:
    """Check a model's files, where they are on this machine, before the model that it replaces
    ends. Errors: ValueError.
    """
    spec = model.to_spec(settings.directory)
    if find_checkpoint(spec.path) is not None:
        estimate(spec)


def check_fit(model: ModelSettings, settings: Settings) -> ModelNeeds:
    """Return the memory that a replica of a model needs, if this machine has it for all replicas.

    Errors: ValueError.
    """
    spec = model.to_spec(settings.directory)
    needs = estimate(spec)
    if gpus := list_usable_gpus(model):
        if isinstance(model.devices, list):
            gpus = {index: gpus[index] for index in model.devices if index in gpus}
            if len(gpus) < len(model.devices):
                raise ValueError(f"of devices {model.devices} only {len(gpus)} are here")
        part, size = needs.weights_bytes // spec.num_ranks, min(gpus.values())
        if part > size:
            raise ValueError(f"its weights take {part} bytes of each GPU, of which one has {size}")
        return needs
    needed, free = model.replicas * needs.num_bytes, measure_memory()[1]
    if needed > free > 0:
        raise ValueError(f"it takes about {needed} bytes of memory, and {free} are free")
    return needs


def list_usable_gpus(model: ModelSettings) -> dict[int, int]:
    """Return `list_gpus`; none for a model that runs on CPUs."""
    return {} if model.engine == "fake" or model.devices == "cpu" else list_gpus()


def describe_fit(settings: Settings) -> Iterator[str]:
    """Yield a line for what each model needs, and a warning for what this machine lacks."""
    total = SERVER_BYTES + settings.cache_bytes + settings.max_pending_bytes
    for model in settings.models:
        path = model.to_spec(settings.directory).path
        try:
            if is_gguf(path):
                yield f"model {model.id}: {describe_gguf(Path(path))}"
            needs = check_fit(model, settings)
        except ValueError as error:
            yield f"warning: model {model.id}: {error}"
            continue
        on_gpus = bool(list_usable_gpus(model))
        total += model.replicas * (needs.process_bytes if on_gpus else needs.num_bytes)
        times = f"{model.replicas} replicas of " if model.replicas > 1 else ""
        weights = f"weights {_write(needs.weights_bytes)}"
        cache = "" if on_gpus else f"cache {_write(needs.cache_bytes)}, "
        yield (
            f"model {model.id}: {needs.dtype}, {times}{weights}, {cache}"
            f"{needs.token_bytes} bytes of cache a token"
        )
    free = measure_memory()[1]
    level = "warning: " if 0 < free < total else ""
    yield f"{level}memory: about {_write(total)} for all processes, {_write(free)} free"


def _write(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def list_gpus() -> dict[int, int]:
    """Return the memory of each GPU in bytes, by GPU number, from nvidia-smi; empty if that is
    missing or fails.
    """
    command = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_gpus(found.stdout)


def parse_gpus(text: str) -> dict[int, int]:
    """Parse nvidia-smi's lines, in MiB; skip other lines.

    Of `0, 143771` it is {0: 143771 * 2**20}.
    """
    lines = re.findall(r"^(\d+), (\d+)$", text, re.MULTILINE)
    return {int(index): int(size) * 2**20 for index, size in lines}
