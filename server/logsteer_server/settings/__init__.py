"""What can be set: of the server, and of each of its models."""

from logsteer_server.settings.model import MODEL_TOPICS, ModelSettings
from logsteer_server.settings.server import (
    SERVER_TOPICS,
    ConfigurationError,
    Settings,
    load_settings,
    name_models,
    parse_settings,
)

__all__ = [
    "MODEL_TOPICS",
    "SERVER_TOPICS",
    "ConfigurationError",
    "ModelSettings",
    "Settings",
    "load_settings",
    "name_models",
    "parse_settings",
]
