"""What can be set: of the server, and of each of its models."""

from logsteer_server.settings.model import ModelSettings
from logsteer_server.settings.server import (
    ConfigurationError,
    Settings,
    load_settings,
    name_model,
    parse_settings,
)

__all__ = [
    "ConfigurationError",
    "ModelSettings",
    "Settings",
    "load_settings",
    "name_model",
    "parse_settings",
]
