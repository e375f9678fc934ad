"""`POST /logprob`: the exact log-probability of targets given contexts."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from logsteer.schemas.chat import ChatFields, Message
from logsteer.schemas.common import (
    ALL_COLUMNS,
    Aggregate,
    Answer,
    Column,
    Columns,
    Count,
    Float,
    ItemOptions,
    ItemResult,
    NamedRefusals,
    Reply,
    Request,
    RowColumns,
    RowOptions,
    SamplingPolicy,
    Tabled,
    TokenId,
    Window,
    check_distinct,
    name_refusal,
)
from logsteer.schemas.interventions import (
    ActivationFields,
    AppliedInterventions,
    CapturingAnswer,
    InterventionFields,
)

Boundary = Literal["joint", "separate"]
BoundaryFinding = Literal["exact", "merged", "no_context"]
BOUNDARY = (
    "`merged` where the context's own tokens are not a prefix of the joint tokens; `no_context` "
    "where neither context nor BOS precedes the target: its first token is read, not scored."
)
SpacePolicy = Literal["as_given", "both", "best"]
ListedDtype = Literal["float32", "float16"]
DivergenceColumn = Literal["forward_kl", "reverse_kl", "jsd", "top1_agrees"]
ComparedColumn = Literal[Column, DivergenceColumn]
ComparedColumns = Annotated[
    list[ComparedColumn], Field(min_length=1), AfterValidator(check_distinct)
]
MAX_LISTED = 2**20
"""Tokens listed of a row: more than any vocabulary has."""


class LogprobItem(Request):
    """One context and the targets scored after it; text with text, ids with ids."""

    context: str | None = None
    context_ids: list[TokenId] | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    targets: list[str] | None = Field(default=None, min_length=1)
    target_ids: list[list[TokenId]] | None = Field(default=None, min_length=1)
    alternatives: list[TokenId] | list[list[list[TokenId]]] | None = Field(
        default=None,
        min_length=1,
        description="Tokens whose log-probability is read at each scored one, under the policy: "
        "for each target a list of K ids for each of its tokens, or K ids for every token.",
    )

    @model_validator(mode="after")
    def _one_form(self) -> "LogprobItem":
        texts, ids = self.targets, self.target_ids
        is_text, has_ids = self.context is not None, self.context_ids is not None
        pairs_up = (texts is not None) is is_text and (ids is not None) is has_ids
        if pairs_up and is_text is not has_ids and self.messages is None:
            return self  # as nearly all do; what follows says what is wrong, or is a conversation
        forms = [n for n in ("context", "context_ids", "messages") if getattr(self, n) is not None]
        if len(forms) != 1:
            raise ValueError(
                f"give exactly one of context, context_ids, messages; got {forms or 'none'}"
            )
        wanted, other = ("targets", "target_ids")
        given: Sequence[str | list[int]] | None = texts
        if self.context_ids is not None:
            wanted, other, given = other, wanted, ids
        if given is None or (texts is not None and ids is not None):
            raise ValueError(f"an item with {forms[0]} takes {wanted}, and no {other}")
        return self


class ListOptions(Request):
    """Which tokens are listed for every scored row, beside the scored one."""

    top: int = Field(
        default=0,
        ge=0,
        le=MAX_LISTED,
        description="Most probable tokens listed per row, under the policy.",
    )
    tail: bool = Field(
        default=False,
        description="Also give the mass of all tokens that are not listed, added up in float64.",
    )
    detokenize: bool = Field(
        default=True, description="False leaves out the texts of tokens and their offsets."
    )


class LogprobRequest(RowOptions, ListOptions, ItemOptions, ActivationFields, ChatFields):
    """Targets to score, and how text is cut into tokens."""

    items: list[LogprobItem] = Field(
        min_length=1, description="Contexts and the targets scored after each."
    )
    boundary: Boundary = Field(
        default="joint",
        description="`joint` encodes context + target together and cuts at the context's length; "
        "`separate` encodes each alone. Ids are taken as they are. Under `joint`, white space that "
        "ends a text context goes to the target; a conversation keeps what its template ends in.",
    )
    space: SpacePolicy = Field(
        default="as_given",
        description="`both` scores text targets with and without one leading space; `best` does, "
        "too, and gives the more probable of the two.",
    )
    dtype: ListedDtype = Field(
        default="float32",
        description="Of the listed log-probabilities in MessagePack and safetensors.",
    )
    per_token: bool = Field(
        default=True, description="False leaves out the arrays, keeps the sums."
    )
    step_tokens: Count | None = Field(
        default=None,
        description="Tokens of a sequence that a step of the engine may read: longer ones are read "
        "in several steps, more slowly, with the same scores up to rounding. Null: as many as the "
        "engine has room for.",
    )
    vocabulary: bool = Field(
        default=False,
        description="Also give the log-probability of every token of the vocabulary at each scored "
        "one, best as a file: `Accept: application/vnd.safetensors`.",
    )

    @model_validator(mode="after")
    def _options_go_together(self) -> "LogprobRequest":
        if self.space != "as_given" and any(item.target_ids is not None for item in self.items):
            raise ValueError(
                f"space: {self.space} needs text targets; use as_given with target_ids"
            )
        listed = self.items[0].alternatives is not None  # and then those of the others are, too
        if listed and (self.space != "as_given" or not self.per_token):
            raise ValueError("alternatives go with space: as_given, and without per_token: false")
        if self.tail and not (self.top or listed):
            raise ValueError("tail is the mass beside listed tokens: send top or alternatives, too")
        if self.vocabulary and (self.space != "as_given" or self.probes is not None):
            raise ValueError("vocabulary goes with space: as_given, and without probes")
        if self.probes is not None and not self.per_token:
            raise ValueError("probes are read at every token; leave out per_token: false")
        return self


class DiagnosticsRequest(LogprobRequest):
    """Sequences whose tokens are looked at as a sampling policy saw them."""

    columns: Columns = Field(
        default_factory=lambda: list(ALL_COLUMNS),
        description="Columns read from each scored row; all of them unless given.",
    )
    window: Window = 16


class ReferenceModel(InterventionFields):
    """The model that another one is compared with."""

    model: str | None = Field(
        default=None, description="A resident model, or a variant; null: the request's own."
    )


class DivergenceRequest(LogprobRequest, NamedRefusals):
    """Targets on two models: the request's own, as it changes it, and `reference`."""

    refused: ClassVar[dict[str, str]] = {
        "vocabulary": "rows are compared here; /logprob gives them",
        "space": "targets are compared as they are given",
    }

    columns: ComparedColumns = Field(  # type: ignore[assignment]
        default=["logprob", "forward_kl", "reverse_kl", "jsd"],
        description="Columns read from each scored row. With P the request's model and Q the "
        "reference, over the whole vocabulary, at the policy's temperature: `forward_kl` is KL(P "
        "|| Q), `reverse_kl` KL(Q || P), `jsd` the Jensen-Shannon divergence; `top1_agrees` is 1 "
        "where both have the same most probable token.",
    )
    reference: ReferenceModel = Field(description="Q: another model, or this one changed.")
    beta: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Of `jsd`: beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q.",
    )

    @model_validator(mode="after")
    def _policy_is_a_temperature(self) -> "DivergenceRequest":
        policy = self.policy
        if policy != SamplingPolicy(temperature=policy.temperature) or not policy.temperature:
            reason = "divergences are over the whole vocabulary: it takes a temperature above 0"
            raise name_refusal({"policy": reason})
        return self


class ListedTokens(Reply):
    """Tokens that were listed for each scored row, under the request's policy; arrays are [R][K].

    Null: an alternative that the policy cannot draw.
    """

    logprobs: list[list[Float]]
    tail: list[Float] | None = Field(
        default=None, description="The mass of all other tokens, with `tail: true`."
    )


class TopAlternatives(ListedTokens):
    """The most probable tokens of each scored row, most probable first; arrays are [R][top]."""

    token_ids: list[list[int]]
    tokens: list[list[str]] = Field(
        default_factory=list, description="Their texts; none with `detokenize: false`."
    )


class TargetScore(RowColumns, Tabled):
    """The score of one target of T tokens; the arrays have one entry per token."""

    target: str = Field(description="The target as given; for ids, their text.")
    token_ids: list[int] | None = None
    tokens: list[str] | None = None
    offsets: list[tuple[int, int]] | None = Field(
        default=None,
        description="[start, end) of each token in characters from the target's first one; "
        "negative where white space of the context was moved to the target. Null for ids.",
    )
    logprobs: list[Float] | None = None
    top: TopAlternatives | None = None
    alternatives: ListedTokens | None = None
    aggregates: dict[str, Aggregate] | None = Field(
        default=None, description="Of each column, and of surprisal; in /diagnostics alone."
    )
    logprob: Float = Field(description="Sum of the log-probabilities, in nats.")
    prob: Float = None
    perplexity: Float = Field(default=None, description="exp(-logprob / num_tokens).")
    num_tokens: int
    num_bytes: int = Field(description="UTF-8 bytes of the text that was scored.")
    is_greedy: bool | None = Field(default=None, description="Every rank is 1; null without ranks.")
    boundary: BoundaryFinding = Field(description=BOUNDARY)
    truncated_tokens: int = 0
    flags: list[str] = Field(default_factory=list)


class SpaceVariants(Reply):
    """A target with and without one leading space."""

    with_space: TargetScore
    without_space: TargetScore


class ScoredTarget(TargetScore):
    """A target of `/logprob`: its score as given, or with `space: best` that of its better variant.

    With `both` it has both variants beside it. A variant whose boundary is merged counts only where
    the other's is, too.
    """

    sequence: str | None = Field(
        default=None, description="With `space: best`, the variant that was scored."
    )
    variants: SpaceVariants | None = None
    vocabulary_logprobs: list[list[Float]] | None = Field(
        default=None,
        description="[tokens][vocabulary], float32, with `vocabulary`: a target's row is what its "
        "token was predicted from.",
    )
    logprob_any_space: Float = Field(
        default=None,
        description="log(exp(with_space) + exp(without_space)), with `space` both or best.",
    )


class ItemScore(ItemResult, Tabled):
    """The scores of one context's targets, and how they compare.

    A target whose `boundary` is merged shares a token with the context, so that its log-probability
    is of a part of it. It takes no part in `best` and `choice_probs` (null there) beside targets
    that are exact, and the flag `merged_left_out` says so. Where all are merged, all take part.
    """

    targets: list[ScoredTarget] = Field(default_factory=list)
    best: int | None = Field(default=None, description="Index of the most probable target.")
    flags: list[str] = Field(default_factory=list)
    choice_probs: list[Float] = Field(
        default_factory=list,
        description="Softmax over the targets' log-probabilities (any-space ones where asked for).",
    )

    @property
    def choice(self) -> ScoredTarget | None:
        """The most probable target: `choice.target` is its text, `choice.logprob` its score."""
        return None if self.best is None else self.targets[self.best]

    def _headline(self) -> Mapping[str, Any]:
        return {
            "best": self.choice and self.choice.target,
            "logprobs": {one.target: one.logprob for one in self.targets},
        }


class LogprobAnswer(Answer, CapturingAnswer, Tabled):
    """One result per item, in the order given.

    As a file (`Accept: application/vnd.safetensors`, with `vocabulary`, `top`, `alternatives` or
    `capture`): the tensors `vocabulary_logprobs` [rows, vocabulary], `top_ids`, `top_logprobs`
    [rows, top], `top_tail` [rows], `alternatives` [rows, K] and `alternatives_tail` [rows], as
    requested, with the rows of all targets in order, and `row_starts` [targets + 1]; of a capture
    `HOOK.LAYER` [tokens, width] for each layer, `activation_positions` [tokens], except for means,
    and `activation_starts` [targets + 1]. All else of the answer is JSON under `answer` in its
    metadata.
    """

    results: list[ItemScore]


class DivergenceSummary(Reply):
    """One divergence over all scored tokens."""

    mean: Float
    median: Float
    p99: Float
    max: Float


class AppliedReference(AppliedInterventions):
    """The model that was compared with, and what it was changed by."""

    model: str


class DivergenceAnswer(LogprobAnswer):
    """One result per item, whose targets have the divergences in `columns`; and all together."""

    reference: AppliedReference | None = None
    divergence: dict[DivergenceColumn, DivergenceSummary] = Field(default_factory=dict)
