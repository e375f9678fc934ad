"""What is read of a model's inside: `POST /gradient`, `/activations`, `/lens` and `/patch`."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from logsteer.schemas.chat import ChatFields, Message
from logsteer.schemas.common import (
    Answer,
    ByLayer,
    Float,
    Index,
    ItemOptions,
    ItemResult,
    Layers,
    NamedContent,
    NamedRefusals,
    OneForm,
    Plotted,
    PrecisionOption,
    Reply,
    Request,
    RequestOptions,
    RowColumns,
    RowOptions,
    SequenceOptions,
    Tabled,
    TokenId,
)
from logsteer.schemas.interventions import (
    ActivationRead,
    AppliedInterventions,
    AppliedParameters,
    InterventionFields,
    ParameterFields,
    UsedOverride,
)
from logsteer.schemas.logprob import (
    BOUNDARY,
    Boundary,
    BoundaryFinding,
    ListedTokens,
    ListOptions,
    LogprobItem,
    TopAlternatives,
)
from logsteer.schemas.steering import (
    HOOK,
    HookName,
    PositionName,
    SlicePositions,
    Steering,
    VectorName,
)

Attribution = Literal["gradient_x_input", "integrated"]
MAX_STEPS = 1000


class GradientVariable(OneForm):
    """What log-probabilities are differentiated with respect to: activations, or eta along a
    stored direction.

    An activation is what leaves its place, steering there included: the gradient says what a
    vector added to it would do.
    """

    forms: ClassVar[tuple[str, ...]] = ("layers", "override")

    layers: Layers | None = None
    hook: HookName = Field(default="resid_post", description=HOOK)
    positions: PositionName | SlicePositions = Field(
        default="all", description="Of the input token whose activation it is, as for steering."
    )
    override: VectorName | None = Field(
        default=None, description="Name of a direction v: d/d eta at theta + eta v, eta = 0."
    )

    @model_validator(mode="after")
    def _places_go_with_layers(self) -> Self:
        if self.override is not None and self.model_fields_set & {"hook", "positions"}:
            raise ValueError("hook and positions go with layers, not with override")
        return self


class GradientRequest(
    RequestOptions, ItemOptions, InterventionFields, ChatFields, NamedRefusals, OneForm
):
    """Targets whose summed log-probability is differentiated, one by one.

    `steering`, `override` and `adapter` say for which model: derivatives are taken there.
    """

    forms: ClassVar[tuple[str, ...]] = ("wrt", "attribution")
    refused: ClassVar[dict[str, str]] = {
        "columns": "a gradient comes with log-probabilities alone; /logprob gives columns",
        "policy": "a gradient comes with log-probabilities alone; /logprob gives columns",
        "precision": "gradients are computed in the model's dtype; serve it with dtype float64",
        "probes": "a gradient comes with log-probabilities alone; /logprob gives readings",
        "capture": "a gradient comes with log-probabilities alone; /logprob gives activations",
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
    def _steps_go_with_integrated(self) -> Self:
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
    boundary: BoundaryFinding = Field(description=BOUNDARY)
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


AllPositions = Literal["all"]
MAX_TOP = 1024


class ActivationItem(OneForm):
    """A sequence other than plain text: token ids, or a conversation through the chat template."""

    forms: ClassVar[tuple[str, ...]] = ("token_ids", "messages")

    token_ids: list[TokenId] | None = Field(default=None, min_length=1)
    messages: list[Message] | None = Field(default=None, min_length=1)


class ActivationsRequest(SequenceOptions, InterventionFields, ChatFields, NamedRefusals, OneForm):
    """Sequences whose activations are read as they leave a hook, steering there included.

    Of the tokens at `positions`, `read` takes each, the last, or the mean over them.
    """

    forms: ClassVar[tuple[str, ...]] = ("layers", "sae")
    refused: ClassVar[dict[str, str]] = {
        "columns": "activations are no scored rows; /logprob gives columns",
        "policy": "activations are no scored rows; /logprob gives columns",
        "cache": "activations are computed each time, and none are kept; leave it out",
        "on_error": "the arrays are of all items; leave out the bad ones",
        "probes": "the activations themselves are given: project them; /logprob gives readings",
        "capture": "layers, hook, positions and read say what is given; leave it out",
        "precision": "activations are given in float32; serve the model in the dtype to compute in",
    }

    items: list[str | ActivationItem] = Field(
        min_length=1,
        description="Texts; or objects with `token_ids`, taken as they are, or `messages`.",
    )
    steering: Steering | None = Field(
        default=None, description="Steer the model; the whole sequence is the prompt."
    )
    layers: Layers | None = Field(default=None, description="Layers to read, 0-based.")
    hook: HookName = Field(default="resid_post", description=HOOK)
    positions: AllPositions | SlicePositions = Field(
        default="all",
        description="Which of the tokens that the model reads: all, or slices.",
    )
    read: ActivationRead = Field(
        default="each",
        description="Each of those tokens' activation, the last one's, or their mean, which leaves "
        "out BOS where positions is all, and attention sinks.",
    )

    sae: VectorName | None = Field(
        default=None,
        description="A stored sparse autoencoder, in place of layers and hook: return the "
        "strongest features of each token.",
    )
    top: Annotated[int, Field(ge=1, le=MAX_TOP)] = Field(
        default=10, description="Maximum number of features for each token; only with sae."
    )

    @model_validator(mode="after")
    def _options_go_with_their_form(self) -> Self:
        if self.sae is not None and "hook" in self.model_fields_set:
            raise ValueError("hook goes with layers: an autoencoder says which it reads")
        if self.sae is not None and self.read == "mean":
            raise ValueError("features are of tokens: read each or last with sae")
        if self.sae is None and "top" in self.model_fields_set:
            raise ValueError("top goes with sae")
        return self


class TokenFeatures(Reply):
    """The strongest features of each token, in descending order."""

    ids: list[list[int]] = Field(
        description="A row for each position; -1 where no further feature is active."
    )
    activations: list[list[Float]] = Field(
        description="What the encoder gives; 0 where the id is -1."
    )


class UsedSae(NamedContent):
    """The sparse autoencoder that features are of."""

    layer: int
    labels: dict[str, str] = Field(description="Of the features that are given, where known.")


class ItemActivations(Reply):
    """The activations of one sequence."""

    token_ids: list[int] = Field(description="What the model read, BOS included.")
    truncated_tokens: int = 0
    positions: list[int] = Field(
        description="Of the tokens in `token_ids` whose activations are given; for a mean, of "
        "the tokens it was taken over."
    )
    activations: ByLayer[list[list[Float]]] | None = Field(
        default=None,
        description="By layer: a row for each position, or one row; a number a dimension.",
    )
    sinks: ByLayer[list[int]] = Field(
        default_factory=ByLayer[list[int]],
        description="By layer the positions that a mean leaves out: attention sinks, whose norm is "
        "more than 3 times the median of the tokens'.",
    )
    features: TokenFeatures | None = Field(default=None, description="In place of activations.")
    flags: list[str] = Field(default_factory=list)


class ActivationsHeader(Answer, AppliedInterventions):
    """What an answer says beside its arrays."""

    hook: str
    read: ActivationRead
    sae: UsedSae | None = None


class ActivationsAnswer(ActivationsHeader):
    """One result per item, in the order given.

    As a file (`Accept: application/vnd.safetensors`): a tensor `HOOK.LAYER` [rows, width] for each
    layer, with the rows of all items, in order; `row_starts` [items + 1] says where each item's
    begin, `token_ids` and `token_starts` what it read, and `positions` [rows] whose
    they are, except for means. With `sae` these are `feature_ids` and `feature_activations` [rows,
    top] in place of layers. All else of the answer is JSON under `answer` in its metadata.
    """

    results: list[ItemActivations]


class LensRequest(
    RowOptions, ListOptions, ItemOptions, InterventionFields, ChatFields, NamedRefusals
):
    """Targets that are scored from the stream of each layer, by the model's own norm and head.

    nostalgebraist, "interpreting GPT: the logit lens" (2020).
    """

    refused: ClassVar[dict[str, str]] = {
        "probes": "a lens reads the streams with the model's own head; /logprob gives readings",
        "capture": "a lens reads the streams with the model's own head; /logprob gives activations",
    }

    items: list[str | LogprobItem] = Field(
        min_length=1,
        description="Contexts and the targets scored after each. A string is a text that is scored "
        "whole, as the target after an empty context: without BOS, from its second token.",
    )
    layers: Layers | None = Field(
        default=None, description="Layers whose resid_post is read; null: all."
    )
    boundary: Boundary = "joint"


class LensRows(RowColumns):
    """A target as one layer predicts it; the arrays have one entry per token."""

    logprob: Float = Field(description="Sum of the log-probabilities, in nats.")
    logprobs: list[Float]
    top: TopAlternatives | None = None
    alternatives: ListedTokens | None = None


class LensTarget(Plotted):
    """One target of T tokens, by layer. The last layer's numbers are those of `/logprob`."""

    target: str = Field(description="The target as given; for ids, their text.")
    token_ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]] | None = Field(
        default=None,
        description="[start, end) of each token in characters from the target's first one; "
        "negative where white space of the context was moved to the target. Null for ids.",
    )
    layers: ByLayer[LensRows]
    boundary: BoundaryFinding = Field(description=BOUNDARY)
    truncated_tokens: int = 0
    flags: list[str] = Field(default_factory=list)


class LensItem(ItemResult, Tabled):
    """The targets of one item."""

    targets: list[LensTarget] = Field(default_factory=list)


class LensAnswer(Answer, AppliedInterventions, Plotted):
    """One result per item, in the order given."""

    results: list[LensItem]


PatchMetric = Literal["logprob", "difference", "kl"]
PatchDirection = Literal["denoise", "noise"]


class PatchPair(Request):
    """A clean item and a corrupted one, whose contexts differ in what is asked about."""

    clean: LogprobItem
    corrupted: LogprobItem
    align: list[Annotated[list[Index], Field(min_length=2, max_length=2)]] | None = Field(
        default=None,
        min_length=1,
        description="Tokens that correspond, each `[clean, corrupted]`, where the contexts have "
        "different numbers of tokens; null: those at equal places.",
    )


class PatchRequest(RequestOptions, PrecisionOption, ParameterFields, ChatFields, NamedRefusals):
    """Pairs to run, and where activations of one run are put into the other."""

    refused: ClassVar[dict[str, str]] = {
        "columns": "a patch gives one number a place; /logprob gives columns",
        "policy": "a patch gives one number a place; /logprob gives columns",
        "on_error": "every patch is of the same pairs; leave out the bad ones",
        "probes": "a patch gives one number a place; /logprob gives readings",
        "capture": "a patch gives one number a place; /logprob gives activations",
        "steering": "a patch changes activations itself; /sweep compares settings of steering",
    }

    pairs: list[PatchPair] = Field(
        min_length=1, description="Items that are run, clean and corrupted."
    )
    hook: HookName = Field(default="resid_post", description=HOOK)
    layers: list[Annotated[list[Index], Field(min_length=1)]] | None = Field(
        default=None,
        min_length=1,
        description="Sets of layers, each patched together; null: each layer alone.",
    )
    positions: list[Index] | None = Field(
        default=None,
        min_length=1,
        description="Tokens of the context that is patched into, one at a time; null: each.",
    )
    metric: PatchMetric = Field(
        default="logprob",
        description="`logprob` of the first target; `difference`: of the first two; `kl`: "
        "KL(clean || patched) of the token after the context, in nats.",
    )
    direction: PatchDirection = Field(
        default="denoise",
        description="`denoise` puts clean activations into the corrupted run, `noise` corrupted "
        "ones into the clean run.",
    )
    boundary: Boundary = "joint"

    @model_validator(mode="after")
    def _has_targets(self) -> "PatchRequest":
        for n, pair in enumerate(self.pairs):
            for item in (pair.clean, pair.corrupted):
                if self.metric == "difference" and len(item.targets or item.target_ids or ()) < 2:
                    raise ValueError(
                        f"pairs[{n}] needs two targets in clean and in corrupted for the metric "
                        "difference; add one, or ask for logprob"
                    )
        return self


class PatchResult(Tabled):
    """The metric of one pair: unpatched, and under each patch."""

    clean: Float
    corrupted: Float
    layers: list[list[int]]
    positions: list[int] = Field(description="Of the tokens that are patched.")
    tokens: list[str] = Field(description="Their text, as the patched run has them.")
    matrix: list[list[Float]] = Field(description="By set of layers, by position.")
    boundary: BoundaryFinding = Field(description=f"Of any target of either run: {BOUNDARY}")
    truncated_tokens: int = Field(
        default=0,
        description="Leftmost tokens that were dropped to fit, of the context that lost more; "
        "positions count what is left.",
    )


class PatchAnswer(Answer, AppliedParameters, Plotted):
    """One result per pair, in the order given."""

    hook: str
    metric: PatchMetric
    direction: PatchDirection
    results: list[PatchResult]
