"""`POST /gradient`: derivatives of targets' log-probabilities."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from logsteer.schemas.chat import ChatFields
from logsteer.schemas.common import (
    Answer,
    ByLayer,
    Float,
    Index,
    ItemOptions,
    NamedRefusals,
    Reply,
    Request,
    RequestOptions,
    TokenId,
)
from logsteer.schemas.interventions import AppliedInterventions, InterventionFields
from logsteer.schemas.logprob import Boundary, BoundaryFinding, LogprobItem
from logsteer.schemas.overrides import UsedOverride
from logsteer.schemas.problem import ItemResult
from logsteer.schemas.steering import (
    HOOK,
    HookName,
    PositionName,
    SlicePositions,
    VectorName,
)
from logsteer.schemas.views import Tabled

Attribution = Literal["gradient_x_input", "integrated"]
MAX_STEPS = 1000


class GradientVariable(Request):
    """What log-probabilities are differentiated with respect to: activations, or eta along a
    stored direction.

    An activation is what leaves its place, steering there included: the gradient says what a
    vector added to it would do.
    """

    layers: list[Index] | None = Field(default=None, min_length=1)
    hook: HookName = Field(default="resid_post", description=HOOK)
    positions: PositionName | SlicePositions = Field(
        default="all", description="Of the input token whose activation it is, as for steering."
    )
    override: VectorName | None = Field(
        default=None, description="Name of a direction v: d/d eta at theta + eta v, eta = 0."
    )

    @model_validator(mode="after")
    def _is_one_thing(self) -> "GradientVariable":
        if (self.layers is None) == (self.override is None):
            raise ValueError("give exactly one of layers and override")
        if self.layers is not None and len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers has an entry twice: {self.layers}; name each layer once")
        if self.override is not None and self.model_fields_set & {"hook", "positions"}:
            raise ValueError("hook and positions go with layers, not with override")
        return self


class GradientRequest(RequestOptions, ItemOptions, InterventionFields, ChatFields, NamedRefusals):
    """Targets whose summed log-probability is differentiated, one by one.

    `steering`, `override` and `adapter` say for which model: derivatives are taken there.
    """

    refused: ClassVar[dict[str, str]] = {
        "columns": "a gradient comes with log-probabilities alone; /logprob gives columns",
        "policy": "a gradient comes with log-probabilities alone; /logprob gives columns",
        "precision": "gradients are computed in the model's dtype; serve it with dtype float64",
        "probes": "a gradient comes with log-probabilities alone; /logprob gives readings",
    }

    items: list[LogprobItem] = Field(
        min_length=1, description="Contexts and the targets scored after each."
    )
    wrt: GradientVariable | None = Field(
        default=None, description="What to differentiate with respect to."
    )
    attribution: Attribution | None = Field(
        default=None,
        description="In place of wrt: what each input token, of embedding e, contributes. "
        "`gradient_x_input`: the gradient times e. `integrated`: the gradient's mean along the "
        "straight line from the baseline e' to e, times e - e' (integrated gradients, Sundararajan "
        "et al. 2017).",
    )
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = Field(
        default=100, description="Gauss-Legendre points on that line; only for `integrated`."
    )
    baseline: TokenId | None = Field(
        default=0,
        description="Only for `integrated`: e' is the embedding of this token; null: zeros, near "
        "which models with RMSNorm are not smooth: see `convergence_delta`.",
    )
    boundary: Boundary = "joint"

    @model_validator(mode="after")
    def _is_one_kind(self) -> "GradientRequest":
        if (self.wrt is None) == (self.attribution is None):
            raise ValueError("give exactly one of wrt and attribution")
        if self.attribution != "integrated" and self.model_fields_set & {"steps", "baseline"}:
            raise ValueError("steps and baseline go with attribution integrated")
        return self


class TargetGradient(Reply):
    """The derivatives of one target's summed log-probability."""

    target: str
    token_ids: list[int]
    logprobs: list[Float]
    logprob: Float = Field(description="Sum of the log-probabilities, in nats.")
    num_context: int = Field(description="Tokens before the target.")
    boundary: BoundaryFinding
    truncated_tokens: int = 0
    positions: list[int] | None = Field(
        default=None, description="Of the input tokens that the rows of `gradients` belong to."
    )
    gradients: ByLayer[list[list[Float]]] | None = Field(
        default=None, description="By layer: a row for each position, a number a dimension."
    )
    norms: ByLayer[list[Float]] | None = Field(
        default=None, description="By layer: the Euclidean norm of each row."
    )
    directional: Float = Field(default=None, description="d logprob / d eta.")
    directional_per_token: list[Float] | None = None
    input_ids: list[int] | None = Field(
        default=None, description="Of an attribution: the tokens that the model read."
    )
    input_tokens: list[str] | None = None
    attributions: list[Float] | None = Field(
        default=None, description="What each of them contributes, in nats."
    )
    baseline_logprob: Float = Field(
        default=None, description="`logprob` with every token's embedding at the baseline."
    )
    convergence_delta: Float = Field(
        default=None,
        description="Sum of the attributions, less logprob - baseline_logprob: what `steps` leave.",
    )
    flags: list[str] = Field(default_factory=list)


class ItemGradients(ItemResult, Tabled):
    """One item's targets."""

    targets: list[TargetGradient] = Field(default_factory=list)


class GradientAnswer(Answer, AppliedInterventions, Tabled):
    """One result per item, in the order given; `along` is the direction, where there is one."""

    results: list[ItemGradients]
    along: UsedOverride | None = None
