"""`POST /lens`: what a model would predict from the residual stream of each layer."""

from typing import ClassVar

from pydantic import Field, model_validator

from logsteer.schemas.chat import ChatFields
from logsteer.schemas.common import (
    Answer,
    ByLayer,
    Float,
    Index,
    ItemOptions,
    NamedRefusals,
    RowColumns,
    RowOptions,
    TopAlternatives,
)
from logsteer.schemas.interventions import AppliedInterventions, InterventionFields
from logsteer.schemas.logprob import Boundary, BoundaryFinding, LogprobItem
from logsteer.schemas.problem import ItemResult
from logsteer.schemas.views import Plotted, Tabled


class LensRequest(RowOptions, ItemOptions, InterventionFields, ChatFields, NamedRefusals):
    """Targets that are scored from the stream of each layer, by the model's own norm and head.

    nostalgebraist, "interpreting GPT: the logit lens" (2020).
    """

    refused: ClassVar[dict[str, str]] = {
        "probes": "a lens reads the streams with the model's own head; /logprob gives readings"
    }

    items: list[str | LogprobItem] = Field(
        min_length=1,
        description="Contexts and the targets scored after each. A string is a text that is scored "
        "whole, as the target after an empty context.",
    )
    layers: list[Index] | None = Field(
        default=None, min_length=1, description="Layers whose resid_post is read; null: all."
    )
    boundary: Boundary = "joint"
    top: int = Field(
        default=0, ge=0, le=1000, description="Most probable tokens listed per layer and row."
    )

    @model_validator(mode="after")
    def _layers_are_distinct(self) -> "LensRequest":
        if self.layers is not None and len(set(self.layers)) != len(self.layers):
            raise ValueError(f"layers has an entry twice: {self.layers}; name each layer once")
        return self


class LensRows(RowColumns):
    """A target as one layer predicts it; the arrays have one entry per token."""

    logprob: Float = Field(description="Sum of the log-probabilities, in nats.")
    logprobs: list[Float]
    top: TopAlternatives | None = None


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
    boundary: BoundaryFinding
    truncated_tokens: int = 0
    flags: list[str] = Field(default_factory=list)


class LensItem(ItemResult, Tabled):
    """The targets of one item."""

    targets: list[LensTarget] = Field(default_factory=list)


class LensAnswer(Answer, AppliedInterventions, Plotted):
    """One result per item, in the order given."""

    results: list[LensItem]
