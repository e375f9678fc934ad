"""Whether a model of changed settings has room beside the one that it replaces."""

from logsteer_server.engines.needs import estimate
from logsteer_server.runtime.machine_facts import list_gpus, measure_memory
from logsteer_server.settings import ModelSettings, Settings

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
        needed = wanted.replicas * estimate(wanted.to_spec(settings.directory)).num_bytes
    except ValueError:
        return False
    return needed <= (1 - SPARE) * measure_memory()[1]
