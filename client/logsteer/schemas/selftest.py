"""`POST /models/{id}/selftest`: what the service promises, measured on a resident model."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from logsteer.schemas.common import Answer, Float, Reply, Request, TokenId
from logsteer.schemas.views import Tabled

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
