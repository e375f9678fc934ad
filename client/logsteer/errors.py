"""Every exception of logsteer, and the table that ties it to the wire's problem documents.

The client raises these when it reads a problem document; the server raises the same classes and
writes the document from them, so both sides agree on status and on what may be tried again.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, cast

from logsteer.schemas.common import Problem, ProblemCode


class ProblemKind(NamedTuple):
    """What a problem code implies: HTTP status, whether to try again, and a short title."""

    status: int
    retryable: bool
    title: str


KINDS: Mapping[ProblemCode, ProblemKind] = {
    "invalid_request": ProblemKind(422, False, "Invalid request"),
    "context_too_long": ProblemKind(422, False, "Context too long"),
    "boundary_empty": ProblemKind(422, False, "Target left without a token"),
    "unsupported_by_engine": ProblemKind(422, False, "Unsupported by this engine"),
    "invalid_vector": ProblemKind(422, False, "Invalid vector"),
    "invalid_adapter": ProblemKind(422, False, "Invalid adapter"),
    "invalid_sae": ProblemKind(422, False, "Invalid sparse autoencoder"),
    "non_finite": ProblemKind(422, False, "Beyond the dtype's numbers"),
    "unauthorized": ProblemKind(401, False, "Unauthorized"),
    "forbidden": ProblemKind(403, False, "Forbidden"),
    "not_found": ProblemKind(404, False, "Not found"),
    "unknown_model": ProblemKind(404, False, "Unknown model"),
    "unknown_vector": ProblemKind(404, False, "Unknown vector"),
    "unknown_override": ProblemKind(404, False, "Unknown override"),
    "unknown_adapter": ProblemKind(404, False, "Unknown adapter"),
    "unknown_sae": ProblemKind(404, False, "Unknown sparse autoencoder"),
    "method_not_allowed": ProblemKind(405, False, "Method not allowed"),
    "exists": ProblemKind(409, False, "Exists already"),
    "in_use": ProblemKind(409, False, "In use"),
    "payload_too_large": ProblemKind(413, False, "Payload too large"),
    "overloaded": ProblemKind(429, True, "Overloaded"),
    "rate_limited": ProblemKind(429, True, "Rate limited"),
    "model_loading": ProblemKind(503, True, "Model loading"),
    "engine_restarting": ProblemKind(503, True, "Engine restarting"),
    "out_of_memory": ProblemKind(503, True, "Out of memory"),
    "deadline_exceeded": ProblemKind(504, False, "Deadline exceeded"),
    "internal": ProblemKind(500, False, "Internal error"),
}
"""Problem code -> what it implies; the Errors section of the contract."""

_PASSING_STATUSES = frozenset({429, 502, 503})


class LogsteerError(Exception):
    """Whatever goes wrong while talking to a server; `request_id` is None if nothing was sent."""

    request_id: str | None = None

    def __init__(self, detail: str, *, request_id: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.detail} (request {self.request_id})" if self.request_id else self.detail


class TransportError(LogsteerError):
    """No complete answer came: the server was not reached, or the connection broke."""


class RequestTimeoutError(TransportError, TimeoutError):
    """The client's own time limit ran out before the answer was there."""


class AnswerError(LogsteerError):
    """An answer came that is not one of logsteer's: wrong address, or versions that do not fit."""


class APIError(LogsteerError):
    """The server's refusal: `code`, `status`, `detail`, `param`, `retryable`, `retry_after` (s).

    `status` and `retryable` come from `KINDS` unless they are given, as a client does for what it
    read from the wire. Raises ValueError for a code that belongs to another subclass.
    """

    statuses: ClassVar[frozenset[int]] = frozenset()
    """Statuses that a class stands for, and so the codes of `KINDS` that have one of them."""

    def __init__(
        self,
        code: ProblemCode,
        detail: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        request_id: str | None = None,
        status: int | None = None,
        retryable: bool | None = None,
    ) -> None:
        if self.statuses and code in KINDS and KINDS[code].status not in self.statuses:
            known = [code for code, kind in KINDS.items() if kind.status in self.statuses]
            raise ValueError(f"{type(self).__name__} does not stand for {code}: {known}")
        super().__init__(detail, request_id=request_id)
        # Pickle calls the class with `args`, and engine processes send these errors that way.
        self.args = (code, detail)
        kind = KINDS.get(code, ProblemKind(500, False, "Error"))
        self.code: str = code
        self.status = kind.status if status is None else status
        self.retryable = kind.retryable if retryable is None else retryable
        self.title = kind.title
        self.param = param
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.code}: {super().__str__()}"

    def problem(self, request_id: str) -> Problem:
        """Return the problem document of this error (RFC 9457), for the answer to `request_id`."""
        return Problem(
            type=f"urn:logsteer:problem:{self.code}",
            title=self.title,
            status=self.status,
            detail=self.detail,
            code=cast(ProblemCode, self.code),
            param=self.param,
            retryable=self.retryable,
            request_id=request_id,
        )


class InvalidRequestError(APIError):
    """The request cannot be answered as it stands: change it as `detail` says."""

    statuses = frozenset({400, 405, 422})


class AuthenticationError(APIError):
    """The API key is missing or wrong."""

    statuses = frozenset({401})


class PermissionDeniedError(APIError):
    """The API key may not do this, or a page of another site sent the request."""

    statuses = frozenset({403})


class NotFoundError(APIError):
    """The server has no such model, vector, override, adapter or path."""

    statuses = frozenset({404})


class ConflictError(APIError):
    """Another request has stored something under the name: overwrite it, or choose another name."""

    statuses = frozenset({409})


class PayloadTooLargeError(APIError):
    """The request is larger than the server takes."""

    statuses = frozenset({413})


DIVISIBLE = (InvalidRequestError, PayloadTooLargeError)
"""Refusals that may be for one of several items, such as one too long, or for too many of them."""


class OverloadedError(APIError):
    """The server, or this key, is overloaded; `retry_after` says when to try again (s)."""

    statuses = frozenset({429})


class UnavailableError(APIError):
    """The model does not answer now: it is loading, restarting, or out of memory."""

    statuses = frozenset({502, 503})


class DeadlineError(APIError):
    """The server gave up because its own time limit for the request ran out."""

    statuses = frozenset({504})


class InternalError(APIError):
    """A fault of the server; its log has the details under the request id."""

    statuses = frozenset({500})


def api_error(
    code: str,
    detail: str,
    *,
    status: int | None = None,
    param: str | None = None,
    retryable: bool | None = None,
    retry_after: float | None = None,
    request_id: str | None = None,
) -> APIError:
    """Return the error of the class for `code`, or, where that is not known here, for `status`."""
    kind = KINDS.get(cast(ProblemCode, code))
    if kind is None:
        kind = ProblemKind(status or 500, status in _PASSING_STATUSES, "Error")
    error = next((c for c in APIError.__subclasses__() if kind.status in c.statuses), APIError)
    return error(
        cast(ProblemCode, code),
        detail,
        status=status or kind.status,
        param=param,
        retryable=kind.retryable if retryable is None else retryable,
        retry_after=retry_after,
        request_id=request_id,
    )


def problem_error(
    document: Mapping[str, Any],
    *,
    status: int | None = None,
    retry_after: float | None = None,
    request_id: str | None = None,
) -> APIError:
    """Return the error that a problem document tells of; fields of the wrong type count as missing.

    `status` and `request_id` are used where the document has none; `retry_after` is in seconds.
    A code of a newer server is kept as it is, with the class that fits its status.
    """

    def field(name: str, kind: type) -> Any:
        value = document.get(name)
        return value if isinstance(value, kind) else None

    code = field("code", str)
    status = field("status", int) or status or 500
    return api_error(
        code or f"http_{status}",
        field("detail", str) or field("title", str) or f"The server answered with status {status}.",
        status=status,
        param=field("param", str),
        retryable=field("retryable", bool),
        retry_after=retry_after,
        request_id=field("request_id", str) or request_id,
    )
