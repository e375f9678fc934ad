"""Keys that stay out of what Ray keeps: each ingress reads them where it runs.

Serve holds what a deployment is bound to in its state, and shows it to whoever may ask Ray. So
settings travel without the keys that they name, and an ingress takes these from the configuration
file or the environment of its own node. Of a `key_file` the path alone travels.
"""

from dataclasses import dataclass
from pathlib import Path

from logsteer_server.settings import ConfigurationError, Settings, load_settings

SECRETS = ("api_key", "metrics_key")
SECRET_ARGUMENTS = ("hf_token",)
"""Of `engine_args`, which go to models' actors."""
SECRET_OPTIONS = {
    "account_key", "connection_string", "client_secret", "key", "password", "sas_token", "secret",
    "token",
}  # fmt: skip
"""Of `store_options`, by which fsspec's file systems take keys; they go to models' actors, too."""


def take_secrets(settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Return settings without keys, and the names of those that were there."""
    names = tuple(name for name in SECRETS if getattr(settings, name) is not None)
    return settings.model_copy(update=dict.fromkeys(names)), names


@dataclass(frozen=True, slots=True)
class Secrets:
    """Which keys an ingress has to have, and the configuration file that may name them."""

    names: tuple[str, ...]
    config: Path

    def add(self, settings: Settings) -> Settings:
        """Return settings with these keys, read on this node. Errors: ConfigurationError."""
        if not self.names:
            return settings
        has_file = self.config.exists()
        own = load_settings(self.config) if has_file else Settings(models=settings.models)
        missing = [name for name in self.names if getattr(own, name) is None]
        if missing:
            variables = ", ".join(f"LOGSTEER_{name.upper()}" for name in missing)
            raise ConfigurationError(
                f"{', '.join(missing)}: not known where this ingress runs, since keys do not "
                f"travel through Ray: set {variables} there, have {self.config} on every node, or "
                "use key_file"
            )
        return settings.model_copy(update={name: getattr(own, name) for name in self.names})


def check_arguments(settings: Settings) -> None:
    """Refuse secrets among what actors are given. Errors: ConfigurationError."""
    if found := sorted(SECRET_OPTIONS & settings.store_options.keys()):
        raise ConfigurationError(
            f"store_options {', '.join(found)} would stand in Ray's state: have the store's own "
            "variables, such as AWS_SECRET_ACCESS_KEY, or a role on every node"
        )
    for model in settings.models:
        found = [name for name in SECRET_ARGUMENTS if isinstance(model.engine_args.get(name), str)]
        if found:
            raise ConfigurationError(
                f"model {model.id}: engine_args {', '.join(found)} would stand in Ray's state: "
                "set HF_TOKEN in the environment of every node"
            )
