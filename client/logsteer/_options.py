"""The keyword options of each kind of request, written once for both clients.

Keys that are left out are not sent, so that the server's defaults hold. A test compares the keys
with the fields of the schemas.
"""

from collections.abc import Sequence
from typing import TypedDict

from logsteer.schemas import (
    BosPolicy,
    Boundary,
    Column,
    OverflowPolicy,
    Protocol,
    SpacePolicy,
)


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


class TokenOptions(TypedDict, total=False):
    """Options of `tokenize`."""

    model: str | None
    bos: BosPolicy
