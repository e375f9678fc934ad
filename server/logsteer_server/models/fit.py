"""Whether a model of changed settings can be loaded: beside the one that it replaces, or at all."""

from pathlib import Path

from logsteer_server.engines.needs import estimate, find_checkpoint
from logsteer_server.runtime.machine_facts import list_gpus, measure_memory
from logsteer_server.settings import ModelSettings, Settings
from logsteer_server.text.tokenizer import TextCodec

SPARE = 0.1
"""Share of the free memory that is left alone."""


def fits_beside(old: ModelSettings, wanted: ModelSettings, settings: Settings) -> bool:
    """Return whether the new one may be started while the old one runs, as `reload_beside` says."""
    if settings.reload_beside != "auto":
        return settings.reload_beside == "always"
    if wanted.engine != "fake" and wanted.devices != "cpu":
        listed = isinstance(old.devices, list) and isinstance(wanted.devices, list)
        if listed:
            return set(old.devices).isdisjoint(wanted.devices)
        if list_gpus():
            return False  # each takes its share of all of a GPU's memory
    try:
        needed = _count_bytes(wanted, settings)
    except ValueError:
        return False
    return needed <= (1 - SPARE) * measure_memory()[1]


def check_loadable(old: ModelSettings, wanted: ModelSettings, settings: Settings) -> None:
    """Make sure of what can be known of a model before the one that it replaces has ended: that
    path, configuration and tokenizer can be read, and that the machine has the memory.

    Of a hub id that is not on this machine only the configuration is fetched. Errors: ValueError.
    """
    spec = wanted.to_spec(settings.directory)
    is_local = Path(spec.path).exists() or spec.path.startswith((".", "/", "~"))
    try:
        directory = find_checkpoint(spec.path)
    except ValueError:
        if is_local:
            raise
        _fetch_config(spec.path)
        return
    needs = estimate(spec)
    if wanted.engine != "fake":
        try:
            TextCodec.load(str(directory))
        except Exception as error:  # a tokenizer's own code may raise anything
            raise ValueError(f"{directory}: its tokenizer cannot be read: {error}") from error
    gpus = [] if wanted.engine == "fake" or wanted.devices == "cpu" else list_gpus()
    if gpus and isinstance(wanted.devices, list):
        gpus = [gpu for gpu in gpus if gpu.index in wanted.devices]
        if len(gpus) < len(wanted.devices):
            raise ValueError(f"of devices {wanted.devices} only {len(gpus)} are here")
    if gpus:
        part = needs.weights_bytes // spec.num_ranks
        size = min(gpu.total_bytes for gpu in gpus)
        if part > size:
            raise ValueError(f"its weights take {part} bytes of each GPU, of which one has {size}")
        return
    try:
        freed = _count_bytes(old, settings)
    except ValueError:
        freed = 0
    needed, free = wanted.replicas * needs.num_bytes, measure_memory()[1]
    if free and needed > free + freed:
        raise ValueError(
            f"it takes about {needed} bytes of memory, and {free} are free beside {freed} of the "
            "model that it replaces"
        )


def _count_bytes(model: ModelSettings, settings: Settings) -> int:
    return model.replicas * estimate(model.to_spec(settings.directory)).num_bytes


def _fetch_config(hub_id: str) -> None:
    """Make sure that the hub has a model. Errors: ValueError."""
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(hub_id, "config.json")
    except Exception as error:  # of the hub, of the network, of the disk
        raise ValueError(f"{hub_id} cannot be had of the hub: {error}") from error
