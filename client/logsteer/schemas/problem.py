"""The error document: RFC 9457 problem details with the fields that a program decides by."""

from typing import Literal

from pydantic import Field

from logsteer.schemas.common import Reply

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
