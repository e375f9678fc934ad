"""The server's configuration: the one reader of files and environment variables."""

import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml
from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from logsteer.schemas.faults import explain
from logsteer_server.settings.model import ModelSettings, VariantSettings


class ConfigurationError(ValueError):
    """A configuration that cannot be used; the message says where and what to change."""


SERVER_TOPICS = {
    "Address": "host port uds insecure allowed_hosts allowed_origins trust_request_chat_template",
    "Keys": "api_key key_file limits_url share_caches max_key_bytes",
    "Logs, metrics, traces": ("log_level log_format access_log tracing metrics_key"),
    "Bounds": (
        "max_connections stall_timeout_s request_timeout_s max_body_bytes max_text_chars max_items "
        "max_answer_bytes max_activation_bytes max_vector_bytes max_upload_bytes "
        "max_pending_tokens max_pending_bytes max_reference_bytes"
    ),
    "What is kept": (
        "cache_bytes store_directory store_url store_options store_cache_bytes store_grace_s"
    ),
    "Models while the server runs": (
        "models variants heartbeat_timeout_s max_step_s max_load_s max_restarts "
        "exit_when_given_up model_drain_s reload_beside drain_s"
    ),
}
"""Topic -> settings of the server, as its page and `--help` list them."""


class Settings(BaseSettings):
    """All that can be set, by file, then `LOGSTEER_…` variable or `.env`, then argument."""

    model_config = SettingsConfigDict(
        env_prefix="LOGSTEER_",
        env_file=".env",
        extra="ignore",
        yaml_file=None,
        hide_input_in_errors=True,  # which may be a key
    )

    models: list[ModelSettings] = Field(
        default_factory=list, description="The models to keep resident, one at least."
    )
    variants: list[VariantSettings] = Field(
        default_factory=list,
        description="Names that stand for a model and its steering, adapter or override: see "
        "[Steered models as model ids](steering.md#steered-models-as-model-ids).",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any that is free.")
    uds: Path | None = Field(
        None, description="Unix domain socket to listen on, in place of host and port."
    )
    trust_request_chat_template: bool = Field(
        False,
        description="Take `chat_template` of a request. Templates are sandboxed, but may compute "
        "for as long as they like: allow it where all callers are trusted.",
    )
    insecure: bool = Field(
        False, description="Listen on other than loopback addresses without keys."
    )
    allowed_hosts: list[str] | None = Field(
        None,
        description="Host names that requests may use, beside addresses, localhost, `host` and the "
        "machine's name; `*`: any. null: no others, or with keys any.",
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="Other origins whose pages may send requests that compute or change something, "
        "such as https://lab.example.",
    )
    api_key: str | None = Field(
        None, min_length=1, repr=False, description="The key that requests send as a bearer token."
    )
    key_file: Path | None = Field(
        None, description="Keys with scopes and limits; `logsteer-server keys` writes it."
    )
    limits_url: str | None = Field(
        None,
        pattern=r"^redis(s|\+unix)?://",
        repr=False,
        description="Redis where servers count the tokens of keys together; null: each counts "
        "alone. While it does not answer, requests are not counted. Needs logsteer-server[redis].",
    )
    share_caches: bool = Field(
        False,
        description="Share results and prefixes among all keys: each can then find out what others "
        "have scored.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level to log."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Form of the log; json: an object a line."
    )
    access_log: bool = Field(
        False, description="Log every request: caller, endpoint, times, sizes."
    )
    tracing: bool = Field(
        False,
        description="Send a trace of each request as the standard OTEL_… variables say; needs "
        "logsteer-server[otel].",
    )
    metrics_key: str | None = Field(
        None, min_length=1, repr=False, description="The key that /metrics needs as a bearer token."
    )

    max_connections: int = Field(
        2048,
        ge=1,
        description="Maximum open connections, as far as the system's descriptors reach.",
    )
    stall_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Time for a request's headers, for each part of its body, and for its caller "
        "to read some of the answer; the connection is closed at the latest after twice as long.",
    )
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="Maximum bytes of a JSON request.")
    max_text_chars: int = Field(
        1_500_000,
        ge=1024,
        description="Maximum characters of one text; /perplexity/stream has no limit.",
    )
    max_answer_bytes: int = Field(
        128 * 2**20, ge=2**10, description="Maximum bytes of one answer, estimated before any work."
    )
    max_pending_bytes: int = Field(
        768 * 2**20,
        ge=2**20,
        description="Memory for running requests and answers, estimated; all models.",
    )
    max_items: int = Field(16_384, ge=1, description="Maximum items or texts of one request.")
    max_pending_tokens: int = Field(
        8_000_000,
        ge=1,
        description="Maximum tokens of accepted unfinished work, for each replica of a model.",
    )
    max_reference_bytes: int = Field(
        2**30, ge=2**20, description="Maximum bytes on disk of all requests that compare models."
    )
    cache_bytes: int = Field(
        256 * 2**20, ge=0, description="Memory for results of earlier work; 0: none."
    )
    store_directory: Path | None = Field(
        None,
        description="Directory of vectors, overrides and adapters, one below it for each; null: "
        "logsteer under $XDG_DATA_HOME or ~/.local/share.",
    )
    store_url: str | None = Field(
        None,
        pattern=r"^[a-z][a-z0-9+.-]*://",
        description="Bucket in which several machines share vectors, overrides and adapters, such "
        "as s3://bucket/logsteer, gs://… or az://…; store_directory then caches it.",
    )
    store_options: dict[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="obstore's options of that URL, such as endpoint and region of an S3 store; "
        "others come from the vendor's variables, such as AWS_….",
    )
    store_cache_bytes: int = Field(
        2**35,
        ge=2**10,
        description="Maximum bytes of store_url's contents kept in store_directory; the least "
        "recently used goes first.",
    )
    store_grace_s: float = Field(
        3600.0,
        ge=1,
        description="Contents without a name are deleted after two to three times as long. Clocks "
        "of servers, and an upload to store_url, must stay within it.",
    )
    max_key_bytes: int = Field(
        2**33,
        ge=2**10,
        description="Maximum bytes of vectors, of overrides and of adapters that a key stores, "
        "unless its entry has stored_bytes.",
    )
    max_vector_bytes: int = Field(
        64 * 2**20, ge=2**10, description="Maximum bytes of a vector's file."
    )
    max_upload_bytes: int = Field(
        2**33,
        ge=2**10,
        description="Maximum bytes of an override's file, or of an adapter's files.",
    )
    max_activation_bytes: int = Field(
        128 * 2**20,
        ge=2**10,
        description="Maximum bytes of activations in one answer, estimated before any work.",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Longest time for a request without streaming."
    )
    heartbeat_timeout_s: float = Field(
        30.0,
        gt=0,
        description="An engine silent for this long counts as hung and is killed; while loading, "
        "one without progress for ten times as long.",
    )
    max_step_s: float | None = Field(
        600.0,
        gt=0,
        description="Longest step of an engine, which then counts as hung; null: no limit.",
    )
    max_load_s: float | None = Field(
        7200.0, gt=0, description="Longest time to load a model, download included; null: no limit."
    )
    max_restarts: int = Field(
        8,
        ge=0,
        description="Maximum restarts of an engine within ten minutes; then it is given up.",
    )
    exit_when_given_up: bool = Field(
        True,
        description="Exit with status 3 when a required model is given up. If its first load fails "
        "for a lasting reason, the server does not restart it, and stays up.",
    )
    model_drain_s: float = Field(
        600.0,
        gt=0,
        description="Time for a model's running requests before its engine ends: when it is "
        "unloaded, replaced or removed.",
    )
    reload_beside: bool = Field(
        False,
        description="Start a changed model before the old one ends, and have it take over when it "
        "is ready; needs room for both.",
    )
    drain_s: float = Field(
        30.0, ge=0, description="Time for running requests after SIGTERM or Ctrl-C."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put the environment and `.env` above the file, which arrives as init settings."""
        return env_settings, dotenv_settings, init_settings

    @field_validator("models")
    @classmethod
    def _can_be_told_apart(cls, models: list[ModelSettings]) -> list[ModelSettings]:
        ids = [model.id for model in models]
        if len(set(ids)) != len(ids):
            raise ValueError(f"model ids must differ, got {ids}")
        if len(meant := [model.id for model in models if model.default]) > 1:
            raise ValueError(f"default is set for {meant}; requests that name no model mean one")
        return models

    @model_validator(mode="after")
    def _are_whole(self) -> "Settings":
        if self.api_key is not None and self.key_file is not None:
            raise ValueError("api_key and key_file are both set; give the file alone")
        if not self.models:
            raise ValueError(
                "no model is configured: name one under `models:`, or serve MODEL or --demo"
            )
        return self

    @model_validator(mode="after")
    def _have_models(self) -> "Settings":
        ids = [model.id for model in self.models]
        names = [variant.name for variant in self.variants]
        for variant in self.variants:
            if variant.model is None and len(ids) == 1:
                variant.model = ids[0]
            if variant.model not in ids:
                raise ValueError(f"variant {variant.name}: no model {variant.model}; name of {ids}")
            if [*ids, *names].count(variant.name) > 1:
                raise ValueError(f"variant {variant.name}: the name is taken; choose another")
        return self

    _directory = PrivateAttr(default=Path())

    @property
    def directory(self) -> Path:
        """Where relative paths start: the configuration file's directory."""
        return Path(self._directory)

    @property
    def store_path(self) -> Path:
        """The directory below which vectors, overrides and adapters are stored."""
        if self.store_directory is not None:
            return self.directory / self.store_directory.expanduser()
        data = os.environ.get("XDG_DATA_HOME", "")
        # The XDG specification has relative paths ignored.
        home = Path(data) if Path(data).is_absolute() else Path.home() / ".local" / "share"
        return home / "logsteer"


def parse_settings(document: Mapping[str, Any], directory: Path) -> Settings:
    """Return the settings of a document, whose relative paths start in a directory.

    The environment stands above it. Errors: ValueError.
    """
    settings = Settings(**document)
    settings._directory = directory  # noqa: SLF001
    return settings


DEMO = Path(__file__).parents[1] / "demo"
"""The demo model; in the repository a link to `demo/model`."""


def name_models(
    names: Sequence[str], given: Mapping[str, Any] = MappingProxyType({}), revision: str = ""
) -> dict[str, Any]:
    """Return the settings of a server of these models: directories, ids of the hub, or `demo`.

    `given` are settings of each of them. The engine is the usual one, or the one that is installed.
    """
    usual = "vllm" if find_spec("vllm") else "transformer_lens"
    models = []
    for name in names:
        model: dict[str, Any] = {
            "id": name,
            "path": f"{name}@{revision}" if revision else name,
            "engine": usual,
        }
        if name == "demo":
            model |= {"path": str(DEMO), "dtype": "float32", "compile": False}
            if given.get("engine", usual) == "vllm":
                model["memory"] = "512MiB"
        else:
            # As its own maker calls it: what of the name an id may hold.
            model["id"] = re.sub(r"[^\w.:-]|^[^A-Za-z0-9]+", "", Path(name).resolve().name)
            model["id"] = model["id"].removesuffix(".gguf") or "model"
        models.append({**model, **given})
    return {"models": models} if models else {}


def load_settings(
    config: Path | None, named: Mapping[str, Any] = MappingProxyType({}), **overrides: Any
) -> Settings:
    """Load the settings of a YAML file, the environment, and the arguments that are not None.

    `named` replaces a missing file. Errors: ConfigurationError, for a file that
    cannot be read or values that do not fit.
    """
    document: dict[str, Any] = dict(named)
    if config is not None:
        try:
            loaded = yaml.safe_load(config.read_text())
        except yaml.YAMLError as error:
            raise ConfigurationError(f"{config}: cannot be read: {_explain(error)}") from error
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigurationError(f"{config}: cannot be read: {reason}") from error
        if not isinstance(loaded, dict):
            raise ConfigurationError(f"{config}: must be a mapping that begins with `models:`")
        document = loaded
        unknown = document.keys() - Settings.model_fields.keys()
        if unknown:
            known = ", ".join(Settings.model_fields)
            raise ConfigurationError(f"{config}: unknown {sorted(unknown)}; known are {known}")
    try:
        settings = parse_settings(document, Path() if config is None else config.parent)
        for name, value in overrides.items():
            if value is not None:
                Settings.__pydantic_validator__.validate_assignment(settings, name, value)
    except ValueError as error:
        reason = explain(error, Settings) if isinstance(error, ValidationError) else str(error)
        raise ConfigurationError(f"{config or 'settings'}: {reason}") from None
    return settings


def _explain(error: yaml.YAMLError) -> str:
    """Say what is wrong and where, without the line, in which a key may stand."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return "it is not YAML"
