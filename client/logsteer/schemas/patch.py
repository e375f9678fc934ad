"""`POST /patch`: which activations of one text carry what a model says of another."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from logsteer.schemas.chat import ChatFields
from logsteer.schemas.common import (
    Answer,
    Float,
    Index,
    NamedRefusals,
    PrecisionOption,
    Request,
    RequestOptions,
)
from logsteer.schemas.interventions import AppliedParameters, ParameterFields
from logsteer.schemas.logprob import Boundary, BoundaryFinding, LogprobItem
from logsteer.schemas.steering import HOOK, HookName
from logsteer.schemas.views import Plotted, Tabled

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
    boundary: BoundaryFinding = Field(
        description="`merged` where the context's own tokens are not a prefix of the joint tokens, "
        "of any target of either run."
    )
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
