"""`POST /activations`: the activations of a model over texts, at layers and hooks."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from logsteer.schemas.chat import ChatFields, Message
from logsteer.schemas.common import (
    Answer,
    ByLayer,
    Float,
    Index,
    NamedRefusals,
    Reply,
    Request,
    SequenceOptions,
    TokenId,
)
from logsteer.schemas.interventions import AppliedInterventions, InterventionFields
from logsteer.schemas.steering import HOOK, HookName, SlicePositions, Steering, VectorName

ActivationRead = Literal["each", "last", "mean"]
AllPositions = Literal["all"]
MAX_TOP = 1024


class ActivationItem(Request):
    """A sequence other than plain text: token ids, or a conversation through the chat template."""

    token_ids: list[TokenId] | None = Field(default=None, min_length=1)
    messages: list[Message] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_form(self) -> "ActivationItem":
        if (self.token_ids is None) == (self.messages is None):
            raise ValueError("give exactly one of token_ids and messages; a text stands by itself")
        return self


class ActivationsRequest(SequenceOptions, InterventionFields, ChatFields, NamedRefusals):
    """Sequences whose activations are read as they leave a hook, steering there included.

    Of the tokens at `positions`, `read` takes each, the last, or the mean over them.
    """

    refused: ClassVar[dict[str, str]] = {
        "columns": "activations are no scored rows; /logprob gives columns",
        "policy": "activations are no scored rows; /logprob gives columns",
        "cache": "activations are computed each time, and none are kept; leave it out",
        "on_error": "the arrays are of all items; leave out the bad ones",
        "probes": "the activations themselves are given: project them; /logprob gives readings",
        "precision": "activations are given in float32; serve the model in the dtype to compute in",
    }

    items: list[str | ActivationItem] = Field(
        min_length=1,
        description="Texts; or objects with `token_ids`, taken as they are, or `messages`.",
    )
    steering: Steering | None = Field(
        default=None, description="Steer the model; the whole sequence is the prompt."
    )
    layers: list[Index] | None = Field(
        default=None, min_length=1, description="Layers to read, 0-based."
    )
    hook: HookName = Field(default="resid_post", description=HOOK)
    positions: AllPositions | SlicePositions = Field(
        default="all",
        description="Which of the tokens that the model reads: all, or slices.",
    )
    read: ActivationRead = Field(
        default="each",
        description="Each of those tokens' activation, the last one's, or their mean.",
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
    def _layers_are_distinct(self) -> "ActivationsRequest":
        if (self.layers is None) == (self.sae is None):
            raise ValueError("give exactly one of layers and sae")
        if self.layers is not None and len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers has an entry twice: {self.layers}; name each layer once")
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


class UsedSae(Reply):
    """The sparse autoencoder that features are of."""

    name: str
    sha256: str
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
