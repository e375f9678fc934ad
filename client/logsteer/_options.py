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
    Protocol,
    SpacePolicy,
    Steering,
    TrainMethod,
    TrainRead,
)

SteeringLike: TypeAlias = Steering | Mapping[str, Any]
"""A steering object, or its fields."""


class ModelOptions(TypedDict, total=False):
    """Options of every request about a model."""

    model: str | None
    bos: BosPolicy
    on_overflow: OverflowPolicy
    cache: bool


class PairOptions(ModelOptions, total=False):
    """Options of `get_log_prob`."""

    boundary: Boundary


class LogprobOptions(PairOptions, total=False):
    """Options of `logprob` and `score`."""

    columns: Sequence[Column]
    space: SpacePolicy
    top: int
    per_token: bool
    steering: SteeringLike | None


class WindowOptions(ModelOptions, total=False):
    """Options of `perplexity_stream`."""

    protocol: Protocol
    context_length: int | None
    stride: int | None


class PerplexityOptions(WindowOptions, total=False):
    """Options of `perplexity` and `perplexity_events`."""

    windows: bool
    tokens: bool
    reference: str | None
    steering: SteeringLike | None


class SteerOptions(TypedDict, total=False):
    """Options of `steer` and `steer_events`; `prompt_ids` or `messages` stand in for prompts."""

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
    ignore_eos: bool
    baseline: bool


class SweepOptions(TypedDict, total=False):
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


class TrainOptions(TokenOptions, total=False):
    """Options of `vectors.train`."""

    method: TrainMethod
    read: TrainRead
    layers: Sequence[int] | None
    hook: str
