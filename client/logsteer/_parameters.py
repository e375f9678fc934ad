"""The parameters of each client method: the fields of its endpoint's messages, as Python has them.

`LogprobRequest.items`, a list of `LogprobItem`, is the parameter `items`: a sequence of
`LogprobItem`, or of mappings with its fields.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from logsteer import schemas
from logsteer._endpoints import Content, Endpoint


class NotGiven(Enum):
    """The type of `NOT_GIVEN`."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return self.name


NOT_GIVEN: Final = NotGiven.NOT_GIVEN
"""The default of every option: it is not sent, so that the server's own default holds.

None would not do, as null is a value of some fields.
"""

SOURCES: dict[Content, str] = {"text": "source", "file": "source", "form": "directory"}
"""The parameter that the content of an upload comes from."""

_ELSEWHERE = (
    schemas.LogprobRequest, schemas.PerplexityRequest, schemas.GenerateRequest,
)  # fmt: skip
"""Requests whose descriptions serve for fields of the same name that have none of their own."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a client's method.

    `type` is the field's, without bounds and JSON encoding; `default` is the server's, None where
    it has none or no short form; one that is `named` cannot be given by position. A
    `source` is where the content of an upload comes from, and has no type of the schemas.
    """

    name: str
    type: Any
    description: str
    named: bool = False
    required: bool = True
    default: Any = None
    source: Content | None = None


@cache
def list_parameters(endpoint: Endpoint) -> tuple[Parameter, ...]:
    """Return the parameters of an endpoint's method, without the keyword-only ones."""
    found = {parameter.name: parameter for parameter in _derive(endpoint)}
    front = [found.pop(name) for name in endpoint.positional]
    # Behind one that may be left out, Python has none that may not.
    for index, parameter in enumerate(front):
        if any(one.name in endpoint.optional for one in front[: index + 1]):
            front[index] = replace(parameter, required=False)
    return (*front, *found.values())


def takes_texts(parameter: Parameter) -> bool:
    """Return whether the parameter is a list of texts, or ids, for which one string may stand."""
    return not parameter.named and find_texts(parameter.type) is not None


def find_texts(kind: Any) -> Any:
    """Return the list of texts (and ids) that a type is or may be; None: it is not one."""
    for part in (kind, *get_args(kind)):
        if get_origin(part) is list:
            (entry,) = get_args(part)
            others = [get_origin(one) for one in get_args(entry) if one is not str]
            if entry is str or (str in get_args(entry) and others == [list]):
                return part
    return None


def _derive(endpoint: Endpoint) -> Iterator[Parameter]:
    for name in re.findall(r"{(\w+)}", endpoint.path):
        yield Parameter(name, str, endpoint.parameters.get(name, ""))
    if endpoint.upload is not None:
        name = SOURCES[endpoint.upload]
        yield Parameter(name, None, endpoint.parameters[name], source=endpoint.upload)
    for message in filter(None, (endpoint.request, endpoint.query)):
        for name, field in message.model_fields.items():
            if name == "stream" or name in endpoint.hidden:
                continue
            named = name not in endpoint.positional
            required = not named and message is endpoint.request
            plain = strip_type(field.annotation)
            if required and name not in endpoint.optional:
                plain = _drop_none(plain)
            yield Parameter(
                name,
                plain,
                endpoint.parameters.get(name) or _describe(name, field, message is endpoint.query),
                named,
                required,
                _short_default(field),
            )


def strip_type(annotation: Any) -> Any:
    """Return a type without what `Annotated` adds at any depth: bounds, and encoding as JSON."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return strip_type(parts[0])
    if origin in (Union, UnionType):
        return _union(map(strip_type, parts))
    if origin in (list, dict):
        return origin[tuple(map(strip_type, parts))]
    return annotation


def _drop_none(plain: Any) -> Any:
    if get_origin(plain) not in (Union, UnionType):
        return plain
    return _union(part for part in get_args(plain) if part is not NoneType)


def _union(parts: Iterable[Any]) -> Any:
    return Union[tuple(parts)]  # noqa: UP007  # made of parts


def _describe(name: str, field: FieldInfo, in_query: bool) -> str:
    others = [message.model_fields[name] for message in _ELSEWHERE if name in message.model_fields]
    # In a query, a field says how it is written there.
    texts = [one.description for one in ((*others, field) if in_query else (field, *others))]
    return next(filter(None, texts), "")


def _short_default(field: FieldInfo) -> Any:
    if field.is_required() or field.default is None or isinstance(field.default, BaseModel):
        return None
    # A default that is made, as a list of every column, is told by the description.
    return None if field.default_factory is not None else field.default
