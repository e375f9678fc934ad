"""`/models`, what changes them and tests them; `/healthz`, `/readyz`, `/startupz`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from logsteer.schemas.common import (
    Answer,
    EngineKind,
    Float,
    Provenance,
    Reply,
    Request,
    Tabled,
    TokenId,
)
from logsteer.schemas.interventions import VariantCard

ModelState = Literal["loading", "ready", "restarting", "failed", "draining", "unloaded"]
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
        description="Why steering, overrides, adapters, gradients or step_tokens are refused, by "
        "their names.",
    )
    rounding: Float | None = Field(
        default=None,
        description="Of a model in half precision: the most that a token's log-probability was off "
        "float32's, in nats, on a text of about 100 tokens at the start; null: in float32, or not "
        "measured, because the weights are quantised or too many.",
    )
    provenance: Provenance | None = None
    restarts: int = Field(default=0, description="Of all its replicas.")
    variant_of: str | None = Field(
        default=None, description="Of a variant: the model whose card this is."
    )
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
    """Every configured model, and the variants that a caller sees."""

    models: list[ModelCard]
    variants: list[VariantCard] = Field(default=[])


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


Verdict = Literal["passed", "failed", "not_run"]
PromiseName = Literal[
    "repeated", "batched", "shuffled", "target_rows", "sampled", "steered_sampled", "drawn",
    "zero_scale", "steered_neighbour", "prefix_cached", "chunked", "replicas", "against",
    "against_steered",
]  # fmt: skip


class SelftestRequest(Request):
    """A self-test: on texts of its own and what the model makes of them, unless some are named."""

    texts: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        max_length=64,
        description="Texts to test with, in place of the built-in ones.",
    )
    token_ids: list[Annotated[list[TokenId], Field(min_length=2)]] = Field(
        default_factory=list, max_length=64, description="Texts as token ids."
    )
    against: str | None = Field(
        default=None,
        description="Id of a second resident model with the same tokenizer, such as the same "
        "checkpoint on the other engine: both score the same tokens.",
    )
    stream: bool = Field(
        default=False, description="Answer with server-sent events, one for each check."
    )

    @model_validator(mode="after")
    def _is_given_once(self) -> "SelftestRequest":
        if self.texts and self.token_ids:
            raise ValueError("give texts or token_ids, not both")
        return self


class SelftestCheck(Reply):
    """One promise, and how far what was measured is from it. Differences are in nats a token."""

    name: PromiseName
    promise: str
    verdict: Verdict
    reason: str = Field(description="What was measured, what failed, or why it was not run.")
    num_compared: int = Field(description="Values that were compared.")
    largest_difference: Float = Field(
        description="The largest; null where nothing was compared, or it is not finite."
    )
    rms_difference: Float = Field(
        description="Root mean square of the differences; it may be a quarter of the tolerance."
    )
    tolerance: float = Field(
        description="What the largest may be: 1e-4 in float32, else 12 noise floors."
    )
    noise_floor: float = Field(
        description="What rounding is expected to move a log-probability by: machine epsilon of "
        "the dtype x root mean square of the logits x sqrt(layers) / 2. Epsilon is 2^-7 in "
        "bfloat16 and for quantised models, 2^-10 in float16 and with TF32, 2^-23 in float32."
    )


class SelftestAnswer(Answer, Tabled):
    """The verdict, `failed` where one of the checks has failed, and each check."""

    verdict: Verdict
    checks: list[SelftestCheck]
    against: str | None = None
    num_texts: int
    num_tokens: int = Field(description="Tokens of the texts, samples of the model's included.")
    seconds: float
