"""`POST /steer` and `/generate`: continuations. `POST /sweep`: what steering does by its scale."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from logsteer.schemas.chat import CONVERSATIONS, ChatFields, Conversations
from logsteer.schemas.common import (
    Aggregate,
    Answer,
    Columns,
    Count,
    DrawOptions,
    Float,
    Index,
    ItemOptions,
    ItemResult,
    NamedRefusals,
    OneForm,
    Plotted,
    PrecisionOption,
    Provenance,
    Reply,
    RequestOptions,
    RowColumns,
    Tabled,
    TokenId,
    Window,
)
from logsteer.schemas.interventions import (
    ActivationFields,
    AppliedParameters,
    CapturingAnswer,
    ParameterFields,
)
from logsteer.schemas.logprob import BOUNDARY, Boundary, BoundaryFinding, LogprobItem
from logsteer.schemas.openai import FinishReason
from logsteer.schemas.steering import Finite, Steering, SteeringReceipt

MAX_SWEEP = 256


class PromptRequest(
    RequestOptions,
    ItemOptions,
    PrecisionOption,
    DrawOptions,
    ActivationFields,
    ChatFields,
    NamedRefusals,
    OneForm,
):
    """Prompts to continue, and how; one of `prompts`, `prompt_ids` and `messages`."""

    forms: ClassVar[tuple[str, ...]] = ("prompts", "prompt_ids", "messages")
    refused: ClassVar[dict[str, str]] = {
        "policy": "tokens are drawn by temperature, top_p, top_k and min_p, and the policy columns "
        "refer to those; leave it out"
    }

    prompts: list[str] | None = Field(default=None, min_length=1, description="Texts to continue.")
    prompt_ids: list[list[TokenId]] | None = Field(
        default=None, min_length=1, description="Prompts as token ids, in place of `prompts`."
    )
    messages: Conversations | None = Field(default=None, description=CONVERSATIONS)
    max_tokens: Count = Field(
        default=64, description="Maximum number of tokens in each completion."
    )
    n: int = Field(default=1, ge=1, le=1024, description="Completions of each prompt.")
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**62,
        description="Seed of the first completion; each further completion, of this prompt and the "
        "next ones, takes the next number, so all draws are independent. Null: the server draws "
        "one. In float32 a seed gives the same tokens in any batch and on every engine; in half "
        "precision a near tie may fall otherwise, unless provenance says batch_invariant.",
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, max_length=64, description="Texts that end a completion."
    )
    include_stop: bool = Field(
        default=False, description="Keep the stop string that ended a completion in its text."
    )
    ignore_eos: bool = Field(default=False, description="Continue after the end of sequence.")
    stream: bool = Field(default=False, description="Answer with server-sent events.")
    columns: Columns | None = Field(
        default=None,
        description="Columns of each generated token, read from the logits that it was drawn from, "
        "under the policy that drew it. Null: none.",
    )


class SteerRequest(PromptRequest):
    """Prompts to continue under steering."""

    steering: Steering
    baseline: bool = Field(
        default=False, description="Also continue without steering, with the same seeds."
    )


class GenerateRequest(PromptRequest):
    """Prompts to continue, with what the sampling policy saw at every step where asked for."""

    diagnostics: bool = Field(
        default=False,
        description="Add aggregates of the columns, and all columns unless named. Those of a "
        "stream come with its result.",
    )
    window: Window = 16


class Completion(RowColumns, Tabled):
    """One continuation; the arrays have one entry per token."""

    text: str
    token_ids: list[int]
    tokens: list[str]
    logprobs: list[Float] = Field(
        description="Of the (steered) model, at temperature 1 and without any cut."
    )
    logprob: Float = Field(description="Their sum, in nats.")
    num_tokens: int
    finish_reason: FinishReason
    seed: int = Field(description="Gives this completion again.")
    aggregates: dict[str, Aggregate] | None = None


class PromptCompletions(ItemResult, Tabled):
    """The continuations of one prompt."""

    completions: list[Completion] = Field(default_factory=list)
    baseline: list[Completion] | None = Field(
        default=None, description="Without steering, where asked for."
    )
    prompt_ids: list[int] = Field(
        default_factory=list,
        description="The prompt as the model read it. With a completion's `token_ids` as the "
        "target, /logprob scores that completion again.",
    )
    truncated_tokens: int = Field(
        default=0, description="Leftmost tokens of the prompt that were dropped to fit the context."
    )


class ContinuationAnswer(Answer, CapturingAnswer, Tabled):
    """One result per prompt, in the order given."""

    results: list[PromptCompletions]

    @property
    def texts(self) -> list[str]:
        """The text of every completion, prompt by prompt, without baselines; none of a problem."""
        return [one.text for result in self.results for one in result.completions]

    @property
    def text(self) -> str:
        """The text of the only completion; ValueError where there are several."""
        if len(self.texts) != 1:
            raise ValueError(f"there are {len(self.texts)} completions: read them from texts")
        return self.texts[0]

    def _headline(self) -> Mapping[str, Any]:
        receipt = self.steering and {one.name: one.scale for one in self.steering.vectors}
        return {"texts": self.texts, "model": self.model, "steered_by": receipt}


class SteerAnswer(ContinuationAnswer):
    """One result per prompt, in the order given."""

    steering: SteeringReceipt


class GenerateAnswer(ContinuationAnswer):
    """One result per prompt, in the order given."""


class SteerStart(Reply):
    """The first event of a stream."""

    id: str
    model: str
    provenance: Provenance


class SteerPiece(RowColumns):
    """New tokens of one completion; the arrays have one entry per token.

    Readings of `probes` come one token later, the last in a piece of its own after the end.
    """

    prompt: int
    completion: int
    steered: bool = Field(description="False for a baseline.")
    text: str
    token_ids: list[int]
    logprobs: list[Float]
    finish_reason: FinishReason | None


class SweepRequest(RequestOptions, PrecisionOption, ParameterFields, ChatFields, NamedRefusals):
    """Targets and texts to score at every scale, with every set of layers."""

    refused: ClassVar[dict[str, str]] = {
        "columns": "a sweep gives sums, no tokens; /logprob with steering gives columns",
        "on_error": "every point of a sweep is of the same items; leave out the bad ones",
        "policy": "a sweep gives sums, no columns; /logprob with steering gives them",
        "probes": "a sweep gives sums, no tokens; /logprob with steering gives readings",
        "capture": "a sweep gives sums, no tokens; /logprob with steering gives activations",
    }

    items: list[LogprobItem] = Field(
        default_factory=list, description="Contexts and the targets scored after each."
    )
    texts: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="Texts to score."
    )
    steering: Steering
    scales: list[Finite] = Field(
        min_length=1,
        max_length=MAX_SWEEP,
        description="Factors of the vectors' own scales; 0 is unsteered.",
    )
    layers: list[Annotated[list[Index], Field(min_length=1)]] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_SWEEP,
        description="Sets of layers, each in place of the vectors' own; null: the vectors' own.",
    )
    boundary: Boundary = "joint"

    @model_validator(mode="after")
    def _has_work(self) -> "SweepRequest":
        if not self.items and not self.texts:
            raise ValueError("give items, texts, or both: something to score at each scale")
        if any(vector.op == "clamp" for vector in self.steering.vectors):
            raise ValueError("op clamp has no scale to sweep over; leave that vector out")
        return self


class SweptTarget(Reply):
    """A target's log-probability, and its change from unsteered."""

    logprob: Float
    change: Float
    boundary: BoundaryFinding = Field(default="exact", description=BOUNDARY)
    truncated_tokens: int = Field(
        default=0, description="Leftmost tokens of the context that were dropped to fit."
    )


class SweptItem(Reply):
    """One item's targets; KL(unsteered || steered) of the token after its context, in nats."""

    targets: list[SweptTarget]
    kl: Float


class SweptText(Reply):
    """One text's perplexity, all its tokens but the first scored."""

    perplexity: Float
    sum_logprob: Float
    num_scored: int


class SweepPoint(Reply):
    """Everything at one scale with one set of layers."""

    layers: list[int] | None
    scale: float
    items: list[SweptItem]
    texts: list[SweptText]
    relative_norm: Float = Field(
        description="Mean of |change| / |activation| over steered tokens and layers, as receipts "
        "have it; null where none was steered."
    )


class SweepAnswer(Answer, AppliedParameters, Plotted):
    """The unsteered values, and a point for each set of layers and scale, in the order given."""

    unsteered: SweepPoint
    points: list[SweepPoint]
