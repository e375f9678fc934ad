"""`/models`, `/models/{id}` and what changes them; `/healthz`, `/readyz`, `/startupz`."""

from typing import Literal

from pydantic import Field

from logsteer.schemas.common import EngineKind, Provenance, Reply
from logsteer.schemas.views import Tabled

ModelState = Literal["loading", "testing", "ready", "restarting", "failed", "draining", "unloaded"]
"""`testing`: the engine is ready, and the self-test that `--selftest` asks for runs. `draining`:
running requests are answered, and new ones get `model_loading`. `unloaded`: it has no engine
until it is loaded again."""


class ReplicaCard(Reply):
    """One engine process of a model."""

    state: ModelState
    detail: str = Field(description="What it does, or what is wrong with it.")
    restarts: int = 0
    num_jobs: int = Field(default=0, description="Sequences that it has now.")


class ModelCard(Reply):
    """One configured model."""

    id: str
    engine: EngineKind
    state: ModelState
    detail: str = Field(
        description="What the engine is doing, or why it failed: its self-test, where that did."
    )
    required: bool
    context_length: int | None = Field(
        default=None, description="Tokens that the model can read at once."
    )
    vocab_size: int | None = None
    num_layers: int | None = None
    hidden_size: int | None = Field(
        default=None, description="Numbers of the residual stream at a token."
    )
    hooks: list[str] | None = Field(
        default=None, description="Activations of each layer that can be steered and read."
    )
    has_chat_template: bool | None = None
    columns: list[str] | None = Field(
        default=None, description="Row columns that this engine can read."
    )
    lacks: dict[str, str] | None = Field(
        default=None,
        description="Why steering, overrides, adapters or gradients are refused, by their names.",
    )
    provenance: Provenance | None = None
    restarts: int = Field(default=0, description="Of all its replicas.")
    replicas: list[ReplicaCard] = Field(
        default_factory=list,
        description="Its engine processes; the model answers while one of them does.",
    )


class ReloadAnswer(Reply):
    """What a configuration that was read again has changed; ids of models, names of settings."""

    added: list[str]
    removed: list[str]
    replaced: list[str]
    unchanged: list[str]
    pending: list[str] = Field(
        description="Those whose change had not ended with this answer; unchanged ones, too, where "
        "an earlier change continues."
    )
    failed: dict[str, str] = Field(
        description="Models that could not be changed, and why. One to be replaced is as it was, "
        "unless a later change took the place of this one."
    )
    needs_restart: list[str] = Field(
        description="Settings that are others in the file and count from the next start on."
    )


class ModelList(Tabled):
    """Every configured model."""

    models: list[ModelCard]


class Health(Reply):
    """Whether the process is healthy. Status 503: a required model died too often and was given up,
    so that only a restart of the whole process helps.
    """

    status: Literal["ok", "failing"]
    version: str
    reason: str | None = Field(default=None, description="Why it is failing.")


class Readiness(Reply):
    """Whether every required model answers, and the state of each."""

    ready: bool
    models: dict[str, ModelState]
    reason: str | None = Field(default=None, description="Why it is not ready.")
    store: Literal["answers", "away"] | None = Field(
        default=None,
        description="Whether the store of `store_url` answers; null without one. One that is away "
        "fails requests that name what is stored, and not readiness.",
    )


class Startup(Reply):
    """Whether every required model has answered once since the process began; it stays so."""

    started: bool
    reason: str | None = Field(default=None, description="What it still waits for.")
