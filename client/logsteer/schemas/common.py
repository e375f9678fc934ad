"""What several endpoints share: options of a request, what every answer carries, error documents.

Errors are problem details (RFC 9457) with the fields that a program decides by.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from reprlib import Repr
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

KeyScope = Literal["score", "steer", "write", "admin"]
"""`score`: read models and what is stored. `steer`: change a model for a request, by steering, an
override or an adapter. `write`: store vectors, overrides and adapters. `admin`: write to `shared/`,
and test models."""

_FULL_HOOK = re.compile(r"blocks\.(\d+)\.(?:hook_)?(.+)")


def check_hook(name: str) -> str:
    """Refuse TransformerLens' names, which have the layer in them. Errors: ValueError."""
    if found := _FULL_HOOK.fullmatch(name):
        raise ValueError(f"a hook is named without its layer: {found[2]}, at layers: [{found[1]}]")
    return name


SCOPES: Final[tuple[KeyScope, ...]] = ("score", "steer", "write", "admin")

BosPolicy = Literal["auto", "always", "never"]
SpecialTokens = Literal["parse", "text"]
OverflowPolicy = Literal["error", "truncate_left"]
OnError = Literal["fail", "report"]
Column = Literal[
    "logprob", "rank", "entropy", "logit_mean", "logit_std", "log_q", "rb_entropy", "head_mass",
    "tail_mass", "top1_prob", "margin", "two_point_entropy", "collision", "renyi2",
    "effective_support", "eos_prob",
]  # fmt: skip
Precision = Literal["float32", "float64"]
ProbeRead = Literal["projection", "cosine", "probability", "activation"]
EngineKind = Literal["vllm", "transformer_lens", "fake"]
MAX_COUNT = 2**31 - 1
"""The largest number of tokens, layers or places that a request may name: what 32 bits hold."""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Index = Annotated[int, Field(ge=0, le=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, description="An id of the model's vocabulary.")]
Float = float | None
"""A number of an answer; null where it would be NaN or infinite, with a flag that says so."""


def _fail_fast(schema: Any) -> None:
    """Have every list in a core schema end at its first error."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Request(BaseModel):
    """A message to the server: unknown fields are refused, values are not coerced.

    Of the entries of a list the first one that does not fit is named, and no other is looked at:
    there may be hundreds of thousands.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema with lists that end at their first error."""
        schema = handler(source)
        _fail_fast(schema)
        return schema


T = TypeVar("T")
V = TypeVar("V")
_SHORT = Repr()
_SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 3, 64, 64


def check_distinct(entries: list[T]) -> list[T]:
    """Refuse a list that has an entry twice. Errors: ValueError."""
    if len(set(entries)) != len(entries):
        raise ValueError(f"an entry is there twice: {entries}; name each once")
    return entries


class ByLayer(dict[str, V]):
    """Values by layer, which a number names as well: `layers[2]` is `layers["2"]`."""

    def __getitem__(self, key: str | int) -> V:
        return super().__getitem__(str(key))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a dictionary, which becomes this class."""
        inner = handler.generate_schema(dict[str, get_args(source)[0]])  # type: ignore[misc]
        return core_schema.no_info_after_validator_function(cls, inner)


class Reply(BaseModel):
    """A message from the server: fields that a newer server adds are kept, not refused.

    Its repr is one line: what matters most of it, cut to what a terminal shows.
    """

    model_config = ConfigDict(extra="allow")

    def _headline(self) -> Mapping[str, Any]:
        """Return what the repr shows."""
        return {name: value for name, value in self if value is not None}

    def __repr__(self) -> str:
        shown = [f"{name}={_SHORT.repr(value)}" for name, value in self._headline().items()]
        line = f"{type(self).__name__}({', '.join(shown)})"
        width = get_terminal_size((100, 0)).columns
        return line if len(line) <= width else f"{line[: width - 2]}…)"

    __str__ = __repr__


class NamedRefusals(Request):
    """A request that has not every common field: the others are refused with a reason."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Field -> why it is not taken, and what to do instead."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, data: Any) -> Any:
        given = [name for name in cls.refused if isinstance(data, dict) and name in data]
        if given:
            raise name_refusal({name: cls.refused[name] for name in given})
        return data


REFUSAL = "named_refusal"
"""The type of `name_refusal`'s errors."""


def name_refusal(reasons: Mapping[str, str]) -> PydanticCustomError:
    """Return an error for fields that are not taken; its context names the first as `param`."""
    text = " ".join(f"{name}: {reason}." for name, reason in reasons.items())
    return PydanticCustomError(REFUSAL, "{text}", {"text": text, "param": next(iter(reasons))})


class OneForm(Request):
    """A message that says a thing in exactly one of several fields."""

    forms: ClassVar[tuple[str, ...]] = ()
    """Those fields."""

    @model_validator(mode="after")
    def _is_one_form(self) -> Self:
        given = [name for name in self.forms if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(self.forms)}; got {given or 'none'}")
        return self


class SequenceOptions(Request):
    """Which model reads, and how texts become what it reads."""

    model: str | None = Field(
        default=None, description="Id of a resident model; may be left out where there is only one."
    )
    bos: BosPolicy = Field(
        default="auto",
        description="Beginning-of-sequence token: as the tokenizer does, always, or never. "
        "It is never added twice.",
    )
    special_tokens: SpecialTokens = Field(
        default="parse",
        description="Control text in the request's strings, such as `<|im_end|>`: `parse`: control "
        "tokens, as the tokenizer reads it; `text`: plain text. What a chat template writes is "
        "control tokens in either case.",
    )
    on_overflow: OverflowPolicy = Field(
        default="error",
        description="What happens to a sequence longer than the model's context: an error, or its "
        "leftmost context tokens are dropped and counted in `truncated_tokens`.",
    )


class RequestOptions(SequenceOptions):
    """Fields that every request whose results are kept accepts."""

    cache: bool = Field(
        default=True,
        description="Whether cached results of equal work may answer this request, and its results "
        "be cached. They are the same numbers, bit for bit.",
    )


class ItemOptions(Request):
    """What happens to a request of several items where one of them cannot be answered."""

    on_error: OnError = Field(
        default="fail",
        description="`fail`: the first bad item refuses the request, and `param` names it. "
        "`report`: it has its `problem` in place of its result, the others have their results.",
    )


TEMPERATURE = "0, or anything below 0.00001: greedy."


class DrawOptions(Request):
    """How the tokens of a continuation are drawn."""

    temperature: float = Field(default=1.0, ge=0, le=2, description=TEMPERATURE)
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Draw from the most probable tokens whose probabilities sum to this.",
    )
    top_k: Index = Field(default=0, description="0: every token.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Never draw a token less probable than this share of the most probable one.",
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="Divides positive logits of tokens in the prompt or the continuation, and "
        "multiplies negative ones.",
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2, le=2, description="Taken off logits of tokens in the continuation."
    )
    frequency_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        description="Taken off for each time that a token is in the continuation.",
    )
    logit_bias: dict[
        Annotated[str, Field(pattern=r"^[0-9]{1,8}$")], Annotated[float, Field(ge=-100, le=100)]
    ] = Field(default_factory=dict, max_length=1024, description="Added to logits, by token id.")
    allowed_token_ids: list[TokenId] | None = Field(
        default=None, min_length=1, max_length=4096, description="The only tokens that may come."
    )
    bad_words: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, max_length=128, description="Texts whose tokens may not come."
    )
    min_tokens: Index = Field(
        default=0, description="The end of sequence may not come before so many tokens have."
    )
    stop_token_ids: list[TokenId] = Field(
        default_factory=list,
        max_length=1024,
        description="Tokens that end a continuation, beside the end of sequence.",
    )


class SamplingPolicy(DrawOptions):
    """How tokens are drawn: bans, biases and penalties, then temperature, then min_p, then top_k,
    then top_p, renormalised.

    Of equally probable tokens those with smaller ids are kept. Every engine draws by this.
    """

    temperature: float = Field(default=1.0, ge=0, le=100, description=TEMPERATURE)


Policy = SamplingPolicy


class Aggregate(Reply):
    """One column over the tokens of a sequence; null where it would not be finite."""

    sum: Float
    mean: Float
    min: Float
    max: Float
    early: Float = Field(description="Mean over the first tokens, as many as the window asked for.")
    late: Float = Field(description="Mean over the last tokens.")


ALL_COLUMNS: tuple[Column, ...] = get_args(Column)
Window = Annotated[
    int, Field(ge=1, le=2**20, description="Number of tokens in the means `early` and `late`.")
]


class PrecisionOption(Request):
    """The precision of softmax and columns."""

    precision: Precision = Field(
        default="float32",
        description="Precision in which softmax and columns are computed from the model's logits, "
        "and tokens are drawn. MessagePack answers carry float32 in any case.",
    )


Columns = Annotated[list[Column], Field(min_length=1), AfterValidator(check_distinct)]
"""Columns to read from each scored row, each once."""
Layers = Annotated[list[Index], Field(min_length=1), AfterValidator(check_distinct)]
"""Layers, 0-based, each once."""


class RowOptions(RequestOptions, PrecisionOption):
    """Which columns are read from every scored row."""

    columns: Columns = Field(
        default=["logprob", "rank"], description="Columns read from each scored row."
    )
    policy: SamplingPolicy = Field(
        default_factory=SamplingPolicy,
        description="What the policy columns refer to, and the listed tokens.",
    )


class ProbeReadings(Reply):
    """What one probe read at one layer: entry i at the position of token i, the last one included.

    In a stream a token is read after it was sent: entries come one token later, and the last of
    them in a piece without tokens. Joined in order, entry i is of token i.
    """

    name: str | None
    sha256: str
    layer: int
    hook: str
    read: ProbeRead
    before: list[Float] = Field(description="Of the activation as it came to be steered.")
    after: list[Float] | None = Field(
        default=None, description="Of the steered one; null in a request that steers nothing."
    )
    context_before: list[Float] | None = Field(
        default=None,
        description="Of all tokens before the first of those, where requested.",
    )
    context_after: list[Float] | None = None
    flags: list[str] = Field(default_factory=list)


class TokenActivations(Reply):
    """Activations of tokens that the model read, by a request's `capture`."""

    positions: list[int] = Field(
        description="Of these tokens, in the sequence that the model read, BOS included; for "
        "a mean, of the tokens it was taken over."
    )
    layers: ByLayer[list[list[Float]]] = Field(
        description="By layer: a row for each position, or one row; a number a dimension."
    )
    sinks: ByLayer[list[int]] = Field(
        default_factory=ByLayer[list[int]],
        description="By layer the positions that a mean leaves out: attention sinks.",
    )


class RowColumns(Reply):
    """What was read from the scored rows of a sequence of T tokens: an entry for each token."""

    ranks: list[int] | None = Field(
        default=None, description="1 + the number of tokens with a strictly larger logit."
    )
    columns: dict[str, list[Float]] | None = Field(
        default=None,
        description="An array for each column that was asked for, but for `logprob` and `rank`, "
        "which are `logprobs` and `ranks`.",
    )
    probes: list[ProbeReadings] | None = Field(
        default=None, description="One entry for each layer of each probe, in their order."
    )
    activations: TokenActivations | None = Field(
        default=None,
        description="What was captured; in a stream, of the tokens read since the last piece. "
        "`mean` and `last` come with the last piece.",
    )


class NamedContent(Reply):
    """A stored content, by the name that it was asked for by, and its digest."""

    name: str
    sha256: str


class Usage(Reply):
    """Tokens that a request cost."""

    prompt_tokens: int = Field(
        description="Tokens that the model was given to read, now or for a cached result."
    )
    scored_tokens: int = Field(
        description="Given tokens whose log-probability was read; generated ones count below."
    )
    generated_tokens: int = 0
    cached_tokens: int = Field(
        default=0, description="Prompt tokens that came from the prefix cache."
    )
    cached_results: int = Field(
        default=0,
        description="Scored sequences answered from the result cache, or by an equal sequence of "
        "the same request.",
    )


class Timing(Reply):
    """Milliseconds that a request waited and was worked on; 0 where every result was cached."""

    queue_ms: float = Field(description="From acceptance until the engine took the work.")
    engine_ms: float = Field(description="From then until the last result was there.")


class Provenance(Reply):
    """What computed the numbers of an answer."""

    engine: EngineKind
    engine_version: str
    model_path: str = Field(
        description="The model's id on the hub, the last name of its directory, or that of a GGUF "
        "file; which weights they are says weights_digest."
    )
    weights_digest: str
    dtype: str
    logits_dtype: str
    precision: Precision = Field(
        default="float32", description="What softmax and columns were computed in."
    )
    cast: Literal["float32"] | None = Field(
        default=None,
        description="What an override had the whole model computed in; null: in `dtype`.",
    )
    tf32: bool = Field(
        default=False, description="Whether float32 products may have been computed in TF32."
    )
    quantization: str | None
    dequantised_from: str | None = Field(
        default=None,
        description="Of a GGUF file: the type of most of its weights, such as Q4_1, which were "
        "dequantised to float32 when it was first read.",
    )
    int8_products: Literal["integer", "float32_blocks"] | None = Field(
        default=None,
        description="How the INT8 layers of a model on a CPU were computed: by instructions "
        "for 8-bit integers, found exact when the model was loaded; or, where these saturate, in "
        "float32 over blocks so short that it is exact, too.",
    )
    device: str | None = Field(
        default=None, description="What computed it: cpu, or the GPUs by name; null: not known."
    )
    tensor_parallel: int
    pipeline_parallel: int
    batch_invariant: bool
    vocab_size: int = Field(description="Number of logits that the softmax ran over.")
    tokenizer_digest: str
    protocol: str | None = Field(default=None, description="Window protocol, where one applies.")
    context_length: int | None = Field(
        default=None, description="Tokens in a window of it, at most."
    )
    stride: int | None = Field(default=None, description="Tokens from one window to the next.")
    rows: int | None = Field(
        default=None, description="Windows that were scored at most, with protocol exl3."
    )


class Answer(Reply):
    """What every answer about a model carries."""

    id: str
    model: str
    usage: Usage
    timing: Timing
    provenance: Provenance

    def _headline(self) -> Mapping[str, Any]:
        own = super()._headline()
        return {name: value for name, value in own.items() if name not in Answer.model_fields}


if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

VIEWS: dict[Literal["html", "table", "plot"], Callable[..., Any]] = {}
"""What an answer is given to, to be drawn as HTML, laid out as a table, or plotted."""


class TableViews:
    """What notebooks draw, and what is a table of pandas where one is wanted."""

    def _repr_html_(self) -> str:
        html: str = VIEWS["html"](self)
        return html

    def to_pandas(self, per: str | None = None) -> "pd.DataFrame":
        """Return the rows of this answer: a row a token, target, window or point, as `per` says.

        None is the usual one of its kind. Raises ImportError that says what to install, and
        LogsteerError, which names what there is, for rows that the answer has not.
        """
        return VIEWS["table"](self, per)


OVERWRITE = (
    "Whether to replace what another request has stored under this name, which is otherwise "
    "refused: `exists`. The same request again gets the same answer."
)


class Tabled(Reply, TableViews):
    """A reply that notebooks draw, and that is a table of pandas where one is wanted."""


class Plotted(Tabled):
    """One that matplotlib draws, too."""

    def plot(self, path: str | Path | None = None, **options: Any) -> "Figure":
        """Draw this answer, write the picture to `path` where given, and return the figure.

        `options` are those of `logsteer.plot_sweep` for a sweep; others take none. Raises
        LogsteerError without matplotlib, and where there is nothing to draw.
        """
        figure: Figure = VIEWS["plot"](self, path, **options)
        return figure


ProblemCode = Literal[
    "invalid_request",
    "context_too_long",
    "boundary_empty",
    "unsupported_by_engine",
    "invalid_vector",
    "invalid_adapter",
    "invalid_sae",
    "non_finite",
    "unauthorized",
    "forbidden",
    "not_found",
    "unknown_model",
    "unknown_vector",
    "unknown_override",
    "unknown_adapter",
    "unknown_sae",
    "method_not_allowed",
    "exists",
    "in_use",
    "payload_too_large",
    "overloaded",
    "rate_limited",
    "model_loading",
    "engine_restarting",
    "out_of_memory",
    "deadline_exceeded",
    "internal",
]


class Problem(Reply):
    """One error. `detail` says what was wrong and what to do about it."""

    type: str
    title: str
    status: int
    detail: str
    code: ProblemCode
    param: str | None = None
    retryable: bool
    request_id: str


class ItemResult(Reply):
    """The result of one of a request's items; where it has a problem, it has nothing else."""

    problem: Problem | None = Field(
        default=None,
        description="Why this item has no result, in a request with `on_error: report`.",
    )
