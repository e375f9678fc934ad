"""Check whether a model fits on this machine, alone, or beside or in place of another one."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from logsteer_server.engines.gguf import describe_gguf, is_gguf
from logsteer_server.engines.machine import measure_memory
from logsteer_server.engines.needs import ModelNeeds, estimate, find_checkpoint
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.text.tokenizer import TextCodec

SPARE = 0.1
"""Share of the free memory to keep free."""
SERVER_BYTES = 350 * 2**20
"""Memory of the HTTP process beyond `cache_bytes` and `max_pending_bytes`, measured under load: row
`http_memory` of the benchmark."""

GPU_TIMEOUT_S = 10.0


def fits_beside(old: ModelSettings, wanted: ModelSettings, settings: Settings) -> bool:
    """Return whether the new model may start while the old one runs, by `reload_beside`."""
    if settings.reload_beside != "auto":
        return settings.reload_beside == "always"
    if wanted.engine != "fake" and wanted.devices != "cpu":
        listed = isinstance(old.devices, list) and isinstance(wanted.devices, list)
        if listed:
            return set(old.devices).isdisjoint(wanted.devices)
        if list_gpus():
            return False  # each takes its share of all of a GPU's memory
    return 0 < _count_bytes(wanted, settings) <= (1 - SPARE) * measure_memory()[1]


def check_loadable(old: ModelSettings, wanted: ModelSettings, settings: Settings) -> None:
    """Check a model before the one that it replaces ends: its path, configuration and tokenizer can
    be read, and the machine has enough memory.

    For a hub id that is not on this machine, only the configuration is fetched. Errors: ValueError.
    """
    path = wanted.to_spec(settings.directory).path
    directory = find_checkpoint(path)
    if directory is None:
        _fetch_config(path)
        return
    if wanted.engine != "fake" and directory.is_dir():
        try:
            TextCodec.load(str(directory))
        except Exception as error:  # a tokenizer's own code may raise anything
            raise ValueError(f"{directory}: its tokenizer cannot be read: {error}") from error
    check_fit(wanted, settings, _count_bytes(old, settings))


def check_fit(model: ModelSettings, settings: Settings, freed: int = 0) -> ModelNeeds:
    """Return the memory that a replica of a model needs, if this machine has it for all replicas.

    `freed` bytes are added to the free memory. Errors: ValueError.
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
    if free and needed > free + freed:
        beside = f" beside {freed} of the model that it replaces" if freed else ""
        raise ValueError(f"it takes about {needed} bytes of memory, and {free} are free{beside}")
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


def _count_bytes(model: ModelSettings, settings: Settings) -> int:
    """Return the memory that a model needs; 0 where its files do not say."""
    try:
        return model.replicas * estimate(model.to_spec(settings.directory)).num_bytes
    except ValueError:
        return 0


def _fetch_config(path: str) -> None:
    """Check that the hub has a model. Errors: ValueError."""
    from huggingface_hub import hf_hub_download

    hub_id, _, revision = path.partition("@")
    try:
        hf_hub_download(hub_id, "config.json", revision=revision or None)
    except Exception as error:  # of the hub, of the network, of the disk
        raise ValueError(f"{path} cannot be had of the hub: {error}") from error


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
