"""`POST /perplexity`: log-likelihood of long texts, window by window."""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Json, model_validator

from logsteer.schemas.chat import CONVERSATIONS, ChatFields, Conversations
from logsteer.schemas.common import (
    MAX_COUNT,
    Answer,
    Columns,
    Count,
    Float,
    ItemOptions,
    ItemResult,
    NamedRefusals,
    OneForm,
    Plotted,
    PrecisionOption,
    Reply,
    RequestOptions,
    RowColumns,
    RowOptions,
    TokenActivations,
    TokenId,
    Usage,
    name_refusal,
)
from logsteer.schemas.interventions import ActivationFields, CapturingAnswer, ParameterOverride
from logsteer.schemas.steer import SteerStart
from logsteer.schemas.steering import Steering, VectorName

Protocol = Literal["sliding", "rolling", "disjoint", "llamacpp", "exl3"]
DEFAULT_ROWS = 100
"""Rows of protocol `exl3`, as in ExLlamaV3's script."""


class WindowOptions(RequestOptions):
    """How a text is cut into windows."""

    protocol: Protocol = Field(default="sliding", description="The window protocol.")
    context_length: int | None = Field(
        default=None,
        ge=2,
        le=MAX_COUNT,
        description="Tokens in a window; null: the model's own context length.",
    )
    stride: Count | None = Field(
        default=None,
        description="Tokens by which a window of sliding or exl3 moves; null: half of "
        "context_length, and for exl3 all of it.",
    )
    rows: Count | None = Field(
        default=None,
        description=f"Windows of exl3, at most; null: {DEFAULT_ROWS}, as in ExLlamaV3's script.",
    )

    @model_validator(mode="after")
    def _windows_fit(self) -> "WindowOptions":
        if self.on_overflow != "error":
            reason = (
                "a text is cut into windows that fit the context, so that nothing is truncated; "
                "leave it out"
            )
            raise name_refusal({"on_overflow": reason})
        if self.stride is not None and self.protocol not in ("sliding", "exl3"):
            reason = f"it belongs to protocols sliding and exl3, not to {self.protocol}; "
            raise name_refusal({"stride": reason + "leave it out"})
        if self.rows is not None and self.protocol != "exl3":
            reason = f"it belongs to protocol exl3, not to {self.protocol}; leave it out"
            raise name_refusal({"rows": reason})
        if self.protocol == "exl3":  # whose windows may lie apart
            return self
        if self.stride and self.context_length and self.stride > self.context_length:
            raise ValueError(
                f"stride {self.stride} is larger than context_length {self.context_length}: "
                "tokens between windows would never be scored"
            )
        return self


class PerplexityRequest(
    WindowOptions, RowOptions, ItemOptions, ActivationFields, ChatFields, OneForm
):
    """Texts to score, or conversations as their template writes them."""

    forms: ClassVar[tuple[str, ...]] = ("texts", "messages")

    texts: list[str | list[TokenId]] | None = Field(
        default=None,
        min_length=1,
        description="Texts to score; or token ids, taken as they are, in the same windows.",
    )
    messages: Conversations | None = Field(default=None, description=CONVERSATIONS)
    columns: Columns = Field(default=["logprob"], description="Columns listed with `tokens`.")
    windows: bool = Field(default=False, description="List the score of every window.")
    tokens: bool = Field(default=False, description="List the columns of every scored token.")
    reference: str | None = Field(
        default=None,
        description="A second resident model with the same vocabulary to compare with, as it is: "
        "unsteered, with its own parameters.",
    )
    stream: bool = Field(
        default=False, description="Answer with server-sent events, one per window."
    )

    @model_validator(mode="after")
    def _options_fit(self) -> "PerplexityRequest":
        if "columns" in self.model_fields_set and not self.tokens:
            raise ValueError("columns are listed with each token; send tokens: true as well")
        if self.probes is not None and not self.tokens:
            raise ValueError("probes are listed with each token; send tokens: true as well")
        if self.capture is not None and not (self.windows or self.stream or self.capture.to):
            raise ValueError("activations are listed with each window; send windows: true as well")
        if self.capture is not None and self.reference is not None:
            raise ValueError("capture goes without a reference")
        if self.protocol == "exl3" and len(self.texts or ()) > 1:
            reason = "protocol exl3 cuts one text into rows; join them, as its script does by two "
            raise name_refusal({"texts": reason + "newlines, or send them one by one"})
        return self


def _quote(text: Any) -> Any:
    """Return a vector as in mood:4@3 as JSON has it."""
    is_plain = isinstance(text, str) and not text.lstrip().startswith(("{", "[", '"'))
    return json.dumps(text) if is_plain else text


class PerplexityStreamQuery(WindowOptions, PrecisionOption, NamedRefusals):
    """Query parameters of `POST /perplexity/stream`; the body is the text, in UTF-8."""

    model_config = ConfigDict(strict=False)
    refused: ClassVar[dict[str, str]] = {
        "columns": "a stream of any length keeps no tokens; send the text to /perplexity",
        "policy": "a stream of any length keeps no columns; send the text to /perplexity",
        "tokens": "a stream of any length keeps no tokens; send the text to /perplexity",
        "windows": "the events are the windows; leave it out",
        "on_error": "a stream is one text; leave it out",
        "reference": "a stream is scored while it arrives; send the text to /perplexity",
        "probes": "a stream of any length keeps no tokens; send the text to /perplexity",
        "capture": "a stream of any length keeps no tokens; send the text to /perplexity",
    }

    steering: Annotated[Json[Steering], BeforeValidator(_quote)] | None = Field(
        default=None, description="As JSON, or a vector as in mood:4@3."
    )
    override: Json[ParameterOverride] | None = Field(default=None, description="As JSON.")
    adapter: VectorName | None = None


class Divergence(Reply):
    """How far the model's next-token distributions are from the reference's, over scored tokens."""

    reference: str
    kl_mean: Float = Field(description="Mean of KL(reference || model) per token, in nats.")
    kl_median: Float
    kl_p99: Float
    kl_max: Float
    top1_agreement: Float = Field(description="Share of tokens with the same most probable token.")
    num_tokens: int


class TextScore(Reply):
    """Sufficient statistics of a text: sums of shards add up to the sums of the whole."""

    sum_logprob: Float = Field(description="Sum of the scored tokens' log-probabilities, in nats.")
    sum_squared_logprob: Float = Field(description="Sum of their squares, so that stderr merges.")
    num_tokens: int = Field(description="Tokens of the text, without a BOS that was added.")
    num_scored: int
    num_bytes: int = Field(description="UTF-8 bytes of the text that the scored tokens cover.")
    num_chars: int = Field(description="Characters of that text.")
    num_words: int = Field(description="White-space separated words of that text.")
    perplexity: Float = Field(description="exp(-sum_logprob / num_scored).")
    word_perplexity: Float
    byte_perplexity: Float
    bits_per_byte: Float
    stderr: Float = Field(
        description="Standard error of `perplexity`: perplexity x the standard error of the mean."
    )
    flags: list[str] = Field(default_factory=list)


SUMS = (
    "sum_logprob", "sum_squared_logprob", "num_tokens", "num_scored", "num_bytes", "num_chars",
    "num_words",
)  # fmt: skip
"""Fields of `TextScore` that add up."""


def summarize_sums(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `TextScore` that follow from the sums that SUMS names.

    What is not finite is None, with a flag. `stderr` is perplexity x s / sqrt(n), s the sample
    deviation of log p: the delta method.
    """
    total, n = float(sums["sum_logprob"]), int(sums["num_scored"])
    values: dict[str, float | int | None] = {name: sums[name] for name in SUMS}
    values["perplexity"] = perplexity = exp_mean(-total, n)
    values["word_perplexity"] = exp_mean(-total, sums["num_words"])
    values["byte_perplexity"] = exp_mean(-total, sums["num_bytes"])
    num_bytes = sums["num_bytes"]
    values["bits_per_byte"] = -total / num_bytes / math.log(2) if num_bytes else None
    values["stderr"] = None
    if n >= 2 and perplexity is not None and math.isfinite(total):
        mean = total / n
        variance = max(0.0, sums["sum_squared_logprob"] / n - mean * mean)
        values["stderr"] = perplexity * math.sqrt(variance / (n - 1))
    flags = [] if n else ["nothing_scored"]
    if not math.isfinite(total):
        flags.append("non_finite")
    finite = {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}
    return {**finite, "flags": flags}


def exp_mean(total: float, count: int) -> float | None:
    """Return exp(total / count); None for a count of 0 or where it is not finite."""
    if not count or not math.isfinite(total):
        return None
    try:
        return math.exp(total / count)
    except OverflowError:
        return None


class WindowScore(Reply):
    """One window: it reads tokens [start, end) of the text and scores its last num_scored ones."""

    text: int = Field(description="Index of the text.")
    start: int
    end: int
    num_scored: int
    sum_logprob: Float
    sum_squared_logprob: Float
    activations: TokenActivations | None = Field(
        default=None, description="What was captured; positions count from the window's first."
    )


class TokenScores(RowColumns):
    """Every scored token of a text, in order; more than once where windows of exl3 overlap."""

    positions: list[int]
    token_ids: list[int]
    tokens: list[str] | None = Field(
        default=None, description="What each adds to the text; null from a server that is older."
    )
    logprobs: list[Float]


class TextResult(ItemResult, TextScore, Plotted):
    """The score of one text."""

    windows: list[WindowScore] | None = None
    tokens: TokenScores | None = None


class PerplexityAnswer(Answer, CapturingAnswer, Plotted):
    """One result per text, in the order given, and the total."""

    results: list[TextResult]
    total: TextScore
    divergence: Divergence | None = None


class WindowEvent(Reply):
    """A server-sent event of type `window`: a finished window and the totals so far."""

    window: WindowScore
    windows_done: int
    windows_total: int | None = Field(description="Null while the end of the text is not known.")
    sum_logprob: Float
    num_scored: int
    perplexity: Float


class StreamStart(SteerStart):
    """The first server-sent event, of type `start`."""

    usage: Usage | None = None
