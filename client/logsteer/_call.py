"""One request, ready to be sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import BaseModel

from logsteer._endpoints import LAST_EVENT
from logsteer._upload import UploadBody

A_co = TypeVar("A_co", bound=BaseModel, covariant=True)


class Download(BaseModel):
    """An answer that is a file."""

    data: bytes


@dataclass(frozen=True)
class ApiCall(Generic[A_co]):
    """One request, ready to be sent, and the types of what comes back.

    A call with `events` is answered by server-sent events of these names, `last_event` at the end;
    any other call by one document of type `answer`, or by a file of `file_type` as `Download`.
    """

    method: str
    path: str
    answer: type[A_co] | None = None
    body: bytes | None = None
    upload: UploadBody | None = None
    upload_type: str = "text/plain; charset=utf-8"
    file_type: str | None = None
    params: Mapping[str, str | list[str]] = field(default_factory=dict)
    events: Mapping[str, type[A_co]] = field(default_factory=dict)
    last_event: str = LAST_EVENT
    answer_statuses: frozenset[int] = frozenset()
    """Statuses beside 2xx whose body is an answer too."""
    retry_safe: bool = True
