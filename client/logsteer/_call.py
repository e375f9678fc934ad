"""One request, ready to be sent; and what the functions of `_calls` make it with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from logsteer._upload import Upload
from logsteer.errors import InvalidRequestError

A_co = TypeVar("A_co", bound=BaseModel, covariant=True)
R = TypeVar("R", bound=BaseModel)

LAST_EVENT = "result"
"""The event that ends a stream of logsteer's own."""


class Download(BaseModel):
    """An answer that is a file."""

    data: bytes


@dataclass(frozen=True)
class Call(Generic[A_co]):
    """One request, ready to be sent, and the types of what comes back.

    A call with `events` is answered by server-sent events of these names, `last_event` at the end;
    any other call by one document of type `answer`, or by a file of `file_type` as `Download`.
    """

    method: str
    path: str
    answer: type[A_co] | None = None
    body: bytes | None = None
    upload: Upload | None = None
    upload_type: str = "text/plain; charset=utf-8"
    file_type: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    events: Mapping[str, type[A_co]] = field(default_factory=dict)
    last_event: str = LAST_EVENT
    answer_statuses: frozenset[int] = frozenset()
    """Statuses beside 2xx whose body is an answer too."""
    retry_safe: bool = True


def as_list(texts: str | Sequence[str]) -> list[str]:
    """The texts as a list; one string is one text, not its characters."""
    return [texts] if isinstance(texts, str) else list(texts)


def fields_of(options: Mapping[str, Any], default_model: str | None, **more: Any) -> dict[str, Any]:
    """The fields of a request: options that were given, and the client's own model."""
    default = {} if default_model is None else {"model": default_model}
    given = {**default, **options, **more}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in given.items()}


def checked(schema: type[R], fields: Mapping[str, Any]) -> R:
    """The fields as a message; InvalidRequestError, which names the first wrong one, else."""
    try:
        return schema.model_validate(dict(fields))
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        more = f" (and {invalid.error_count() - 1} more)" if invalid.error_count() > 1 else ""
        place = f"{param}: " if param else ""
        raise InvalidRequestError(
            "invalid_request", f"{place}{first['msg']}{more}", param=param
        ) from invalid


def to_json(request: BaseModel) -> bytes:
    """The body of a request; InvalidRequestError where UTF-8 cannot express it."""
    try:
        return request.model_dump_json(exclude_unset=True).encode()
    except PydanticSerializationError as invalid:
        raise InvalidRequestError(
            "invalid_request",
            "a text holds a lone surrogate, which UTF-8 cannot express; decode it with "
            'errors="replace"',
        ) from invalid
