"""The keyword options of each kind of request, written once for both clients.

Keys that are left out are not sent, so that the server's defaults hold. A test compares the keys
with the fields of the schemas.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from logsteer.schemas import (
    BosPolicy,
    Boundary,
    Column,
    LogprobItem,
    Message,
    OverflowPolicy,
    ParameterOverride,
    Precision,
    Protocol,
    SamplingPolicy,
    SpacePolicy,
    Steering,
    TrainMethod,
    TrainRead,
)

SteeringLike: TypeAlias = Steering | Mapping[str, Any]
"""A steering object, or its fields."""
OverrideLike: TypeAlias = ParameterOverride | Mapping[str, Any]
"""An override, or its fields `name` and `eta`."""


class ParameterOptions(TypedDict, total=False):
    """Other parameters, for one request alone."""

    override: OverrideLike | None
    adapter: str | None


class ChangeOptions(ParameterOptions, total=False):
    """Other parameters and other activations, for one request alone."""

    steering: SteeringLike | None


class ModelOptions(TypedDict, total=False):
    """Options of every request about a model."""

    model: str | None
    bos: BosPolicy
    on_overflow: OverflowPolicy
    cache: bool


class PairOptions(ModelOptions, total=False):
    """Options of `get_log_prob`."""

    boundary: Boundary


class LogprobOptions(PairOptions, ChangeOptions, total=False):
    """Options of `logprob` and `score`."""

    columns: Sequence[Column]
    policy: SamplingPolicy | Mapping[str, float]
    precision: Precision
    space: SpacePolicy
    top: int
    per_token: bool


class WindowOptions(ModelOptions, ChangeOptions, total=False):
    """Options of `perplexity_stream`."""

    protocol: Protocol
    context_length: int | None
    stride: int | None


class PerplexityOptions(WindowOptions, total=False):
    """Options of `perplexity` and `perplexity_events`."""

    windows: bool
    tokens: bool
    reference: str | None


class DiagnosticsOptions(LogprobOptions, total=False):
    """Options of `diagnostics`."""

    window: int


class PromptOptions(TypedDict, total=False):
    """Options of all that continues prompts; `prompt_ids` or `messages` may stand in for them."""

    model: str | None
    prompt_ids: Sequence[Sequence[int]]
    messages: Sequence[Message | Mapping[str, str]]
    bos: BosPolicy
    max_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: Sequence[str]
    include_stop: bool
    ignore_eos: bool


class SteerOptions(PromptOptions, ParameterOptions, total=False):
    """Options of `steer` and `steer_events`."""

    baseline: bool


class GenerateOptions(PromptOptions, ChangeOptions, total=False):
    """Options of `generate` and `generate_events`."""

    diagnostics: bool
    columns: Sequence[Column]
    precision: Precision
    window: int


class SweepOptions(ParameterOptions, total=False):
    """Options of `sweep`: what is scored, and sets of layers."""

    model: str | None
    items: Sequence[LogprobItem | Mapping[str, Any]]
    texts: Sequence[str]
    layers: Sequence[Sequence[int]] | None
    boundary: Boundary
    bos: BosPolicy


class TokenOptions(TypedDict, total=False):
    """Options of `tokenize`."""

    model: str | None
    bos: BosPolicy


class GradientOptions(ChangeOptions, total=False):
    """Options of `gradient`."""

    model: str | None
    bos: BosPolicy
    on_overflow: OverflowPolicy
    boundary: Boundary


class TrainOptions(TokenOptions, total=False):
    """Options of `vectors.train`."""

    method: TrainMethod
    read: TrainRead
    layers: Sequence[int] | None
    hook: str
