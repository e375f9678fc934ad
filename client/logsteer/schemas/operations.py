"""`GET /models`, `/models/{id}`, `/healthz`, `/readyz`."""

from typing import Literal

from pydantic import Field

from logsteer.schemas.common import EngineKind, Provenance, Reply
from logsteer.schemas.views import Tabled

ModelState = Literal["loading", "testing", "ready", "restarting", "failed"]
"""`testing`: the engine is ready, and the self-test that `--selftest` asks for runs."""


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
    has_chat_template: bool | None = None
    columns: list[str] | None = Field(
        default=None, description="Row columns that this engine can read."
    )
    provenance: Provenance | None = None
    restarts: int = 0


class ModelList(Tabled):
    """Every configured model."""

    models: list[ModelCard]


class Health(Reply):
    """The HTTP process answers."""

    status: Literal["ok"]
    version: str


class Readiness(Reply):
    """Whether every required model answers, and the state of each."""

    ready: bool
    models: dict[str, ModelState]
