"""`logsteer-server doctor`: what this machine has, and whether the configured models fit on it.

A line for each thing that is looked at, with a verdict. Nothing is started, and no engine's library
is imported. Exit status 0: nothing is wrong; 1: something is; 2: the configuration is unusable.
"""

import os
import platform
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from logsteer.cli.usage import Parser
from logsteer.errors import APIError
from logsteer_server import __version__
from logsteer_server.engines.needs import ModelNeeds, estimate
from logsteer_server.listening import listen_at
from logsteer_server.runtime.machine_facts import Gpu, count_cores, list_gpus, measure_memory
from logsteer_server.settings import ConfigurationError, ModelSettings, Settings, load_settings
from logsteer_server.stores.objects import Objects

MachineVerdict = Literal["ok", "warn", "fail", "info"]

GPU_SHARE = 0.9
"""What vLLM takes of a GPU where `memory` says nothing."""
FREE_DISK_BYTES = 2 * 2**30
"""Less than this is told as a warning."""
SERVER_BYTES = 350 * 2**20
"""Memory of the HTTP process beside `cache_bytes` and `max_pending_bytes`: the benchmark's row
`http_memory` has it under load."""


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """One line: what was looked at, what was found, and what that means."""

    verdict: MachineVerdict
    subject: str
    text: str


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page; return the exit status."""
    parser = Parser(
        prog="logsteer-server doctor",
        description="Look at this machine: GPUs, memory, cores, ports, disk, and what each "
        "configured model would need. Nothing is started.",
    )
    parser.add_argument("--config", type=Path, help="YAML file that lists the models")
    arguments = parser.parse_args(argv)
    settings = None
    if arguments.config is not None or "LOGSTEER_MODELS" in os.environ:
        try:
            settings = load_settings(arguments.config)
        except ConfigurationError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    findings = [*examine(settings)]
    print(draw(findings))
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0


def examine(settings: Settings | None) -> Iterator[MachineFinding]:
    """Look at the machine, and at what the settings ask of it; yield what is found."""
    gpus = list_gpus()
    yield MachineFinding("info", "logsteer", f"{__version__} on Python {platform.python_version()}")
    yield from _describe_machine(gpus)
    if settings is None:
        yield MachineFinding(
            "info", "models", "none were looked at: name a configuration by --config"
        )
        return
    yield _try_port(settings)
    yield _measure_disk(settings.store_path)
    yield from _ask_store(settings)
    yield from _fit_models(settings, gpus)


def _describe_machine(gpus: Sequence[Gpu]) -> Iterator[MachineFinding]:
    total, free = measure_memory()
    if total:
        yield MachineFinding("ok", "memory", f"{_write(free)} free of {_write(total)}")
    else:
        yield MachineFinding("warn", "memory", "the system does not say how much there is")
    yield MachineFinding("ok", "cores", f"{count_cores()} for this process")
    for gpu in gpus:
        text = (
            f"{gpu.name}, {_write(gpu.free_bytes)} free of {_write(gpu.total_bytes)}, "
            f"driver {gpu.driver}"
        )
        yield MachineFinding("ok", f"GPU {gpu.index}", text)
    if not gpus:
        yield MachineFinding("info", "GPUs", "nvidia-smi names none: models run on the CPU")
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        yield MachineFinding("info", "GPUs", f"CUDA_VISIBLE_DEVICES is {visible!r}")


def _try_port(settings: Settings) -> MachineFinding:
    if settings.uds is not None:
        taken = settings.uds.exists()
        text = "exists: a server may listen there" if taken else "is free"
        return MachineFinding("warn" if taken else "ok", "socket", f"{settings.uds} {text}")
    place = f"{settings.host}:{settings.port}"
    try:
        listen_at(settings.host, settings.port).close()
    except OSError as error:
        text = f"{place} cannot be used: {error.strerror or error}; choose another --port"
        return MachineFinding("fail", "port", text)
    return MachineFinding("ok", "port", f"{place} is free")


def _measure_disk(path: Path) -> MachineFinding:
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return MachineFinding("fail", "stores", f"{path}: {there} cannot be written to")
    verdict: MachineVerdict = "warn" if free < FREE_DISK_BYTES else "ok"
    return MachineFinding(verdict, "stores", f"{path}: {_write(free)} free on its disk")


def _ask_store(settings: Settings) -> Iterator[MachineFinding]:
    """Yield whether the store that several machines share takes and gives a file."""
    if settings.store_url is None:
        return
    try:
        objects = Objects.open(settings)
        place = f"doctor-{secrets.token_hex(8)}"
        objects.write(b"written by logsteer-server doctor", place, create=True)
        objects.read(place)
        objects.remove(place)
    except (ConfigurationError, APIError, FileNotFoundError) as error:
        why = error if isinstance(error, ConfigurationError) else objects.trouble or error
        yield MachineFinding("fail", "shared store", f"{settings.store_url}: {why}")
    else:
        yield MachineFinding("ok", "shared store", f"{settings.store_url} takes and gives files")


def _fit_models(settings: Settings, gpus: Sequence[Gpu]) -> Iterator[MachineFinding]:
    """Yield what each model needs, and whether all of them fit together."""
    on_cpu = SERVER_BYTES + settings.cache_bytes + settings.max_pending_bytes
    for model in settings.models:
        subject = f"model {model.id}"
        try:
            needs = estimate(model.to_spec(settings.directory))
        except ValueError as error:
            verdict: MachineVerdict = "fail" if model.path.startswith((".", "/", "~")) else "warn"
            yield MachineFinding(verdict, subject, str(error))
            continue
        listed = isinstance(model.devices, list) and model.engine != "fake"
        if listed and not gpus:
            told = f"devices {model.devices} are GPUs, and nvidia-smi names none"
            yield MachineFinding("fail", subject, told)
        elif gpus and model.devices != "cpu" and model.engine != "fake":
            yield _fit_gpus(subject, model, needs, gpus)
            on_cpu += model.replicas * needs.process_bytes
        else:
            yield MachineFinding("ok", subject, _describe_needs(model, needs))
            on_cpu += model.replicas * needs.num_bytes
    free = measure_memory()[1]
    text = f"about {_write(on_cpu)} of memory for all models and the HTTP process"
    if free and on_cpu > free:
        yield MachineFinding("fail", "together", f"{text}, and {_write(free)} are free")
    else:
        yield MachineFinding("ok", "together", text)
    cores, replicas = count_cores(), sum(model.replicas for model in settings.models)
    if replicas > cores:
        yield MachineFinding("warn", "together", f"{replicas} engine processes share {cores} cores")


def _describe_needs(model: ModelSettings, needs: ModelNeeds) -> str:
    parts = [f"weights {_write(needs.weights_bytes)}"]
    if needs.cache_bytes:
        tokens = f" ({needs.cache_tokens} tokens)" if needs.cache_tokens else ""
        parts.append(f"cache {_write(needs.cache_bytes)}{tokens}")
    parts.append(f"process {_write(needs.process_bytes)}")
    times = f"{model.replicas} replicas of " if model.replicas > 1 else ""
    length = f"; reads {needs.context_length} tokens" if needs.context_length else ""
    return f"{model.engine}, {times}{' + '.join(parts)}{length}"


def _fit_gpus(
    subject: str, model: ModelSettings, needs: ModelNeeds, gpus: Sequence[Gpu]
) -> MachineFinding:
    """Say whether each GPU of a model holds its part of the weights, and what is left for keys and
    values.
    """
    ranks = model.tensor_parallel * model.pipeline_parallel
    wanted = ranks * model.replicas
    by_index = {gpu.index: gpu for gpu in gpus}
    indices = model.devices if isinstance(model.devices, list) else [gpu.index for gpu in gpus]
    missing = [index for index in indices if index not in by_index]
    if missing or len(indices) < wanted:
        told = f"devices {missing} are not here" if missing else f"{len(indices)} GPUs are here"
        return MachineFinding("fail", subject, f"{wanted} GPUs are needed, and {told}")
    share = model.memory if isinstance(model.memory, float) else GPU_SHARE
    room = min(
        min(share * by_index[index].total_bytes, by_index[index].free_bytes)
        for index in indices[:wanted]
    )
    part = needs.weights_bytes // ranks
    left = int(room) - part
    where = f"each of {wanted} GPUs" if wanted > 1 else "one GPU"
    text = f"{model.engine}, weights {_write(part)} on {where}"
    if left <= 0:
        return MachineFinding("fail", subject, f"{text}, where {_write(int(room))} are available")
    tokens = left * ranks // needs.token_bytes if needs.token_bytes else 0
    told = f", about {tokens} tokens of cache" if tokens else ""
    tight = needs.context_length is not None and 0 < tokens < needs.context_length
    return MachineFinding("fail" if tight else "ok", subject, f"{text}, {_write(left)} left{told}")


def _write(num_bytes: int) -> str:
    """Write bytes in the unit that keeps the number short."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"


def draw(findings: Sequence[MachineFinding]) -> str:
    """Return the findings as lines, and one that counts what is wrong."""
    width = max(len(finding.subject) for finding in findings)
    lines = [f"{one.verdict:4}  {one.subject:{width}}  {one.text}" for one in findings]
    failed, warned = (sum(one.verdict == name for one in findings) for name in ("fail", "warn"))
    return "\n".join([*lines, "", f"{failed} failed, {warned} to look at."])
