"""Arguments of a client's method -> the call that asks for it, as the table of endpoints says.

The parameters of a method are the fields of its endpoint's messages, as Python has them:
`LogprobRequest.items`, a list of `LogprobItem`, is a sequence of `LogprobItem`, or of mappings with
its fields. Arguments are checked with the schemas: InvalidRequestError, without a request id, is
raised before anything is sent.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import (
    Any,
    Final,
    Generic,
    SupportsFloat,
    SupportsIndex,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import quote, urlencode

from pydantic import BaseModel, Json, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError

from logsteer import schemas
from logsteer._endpoints import ENDPOINTS, LAST_EVENT, Content, Endpoint
from logsteer._upload import UploadBody
from logsteer.errors import InvalidRequestError
from logsteer.schemas.common import Request
from logsteer.schemas.faults import describe_faults


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
        types = get_type_hints(message)
        for name, info in message.model_fields.items():
            if name == "stream" or name in endpoint.hidden:
                continue
            named = name not in endpoint.positional
            required = not named and message is endpoint.request
            plain = types[name]
            rest = tuple(part for part in get_args(plain) if part is not NoneType)
            if required and name not in endpoint.optional and NoneType in get_args(plain):
                plain = Union[rest]  # noqa: UP007  # made of parts
            yield Parameter(
                name,
                plain,
                endpoint.parameters.get(name) or _describe(name, info, message is endpoint.query),
                named,
                required,
                _short_default(info),
            )


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
    files: Mapping[str, Path] = field(default_factory=dict)
    """Part -> file, of a form that is sent in place of a body."""
    media_type: str = "application/json"
    """Of the body or the upload."""
    file_type: str | None = None
    params: Mapping[str, str | list[str]] = field(default_factory=dict)
    events: Mapping[str, type[A_co]] = field(default_factory=dict)
    last_event: str = LAST_EVENT
    answer_statuses: frozenset[int] = frozenset()
    """Statuses beside 2xx whose body is an answer too."""
    retry_safe: bool = True


R = TypeVar("R", bound=BaseModel)

MAX_OBJECTS_QUERY = 6000
"""Bytes of a query that its JSON objects, such as `steering`, may fill.

RFC 9110 wants 8000 of an address to be taken everywhere; httpx builds none beyond 65536.
"""

FORMS = {
    "adapters.put": (
        "PEFT's save_pretrained (with safe_serialization)",
        {"config": "adapter_config.json", "weights": "adapter_model.safetensors"},
        {},
    ),
    "saes.put": (
        "SAELens' save_model",
        {"config": "cfg.json", "weights": "sae_weights.safetensors"},
        {"labels": "labels.json"},
    ),
}
"""Endpoint -> what writes the directory of its form, and by part the files that it has, and may
have.
"""


def build_call(
    name: str, values: Mapping[str, Any], default_model: str | None, *, events: bool = False
) -> ApiCall[Any]:
    """Return the call of the endpoint `name`, which is answered by `events` where they are wanted.

    `values` are the arguments of its method; `NOT_GIVEN` is not sent.
    Raises InvalidRequestError, and OSError for a file that cannot be read.
    """
    endpoint = ENDPOINTS[name]
    given = dict(values)
    path = _fill_path(endpoint.path, given)
    source: Any = given.pop(SOURCES[endpoint.upload]) if endpoint.upload else None
    fields = _complete(endpoint, given, default_model)
    body, params = None, {}
    if endpoint.request is not None:
        if events:
            fields["stream"] = True
        body = to_json(checked(endpoint.request, fields))
    elif endpoint.query is not None:
        params = _build_query(endpoint.query, fields)
    upload, media_type = _open_upload(endpoint, source)
    files = list_files(name, Path(source)) if endpoint.upload == "form" else {}
    answer = Download if endpoint.file_type else endpoint.answer
    return ApiCall(
        endpoint.method,
        path,
        None if events else answer,
        body,
        upload,
        files,
        media_type,
        endpoint.file_type.format(**params) if endpoint.file_type else None,
        params,
        endpoint.events if events else {},
        answer_statuses=endpoint.statuses,
        retry_safe=endpoint.retry_safe,
    )


def read_request(name: str, values: Mapping[str, Any]) -> BaseModel:
    """Return the message that these arguments make, as `build_call` does: checked, not sent."""
    endpoint = ENDPOINTS[name]
    assert endpoint.request is not None, "asked of endpoints with a request"
    return checked(endpoint.request, _complete(endpoint, values, None))


def fits_query(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether the endpoint's query has room for these objects; not for long vectors."""
    query = ENDPOINTS[name].query
    assert query is not None, "asked of endpoints with a query"
    return _measure(_write_objects(query, values)) <= MAX_OBJECTS_QUERY


def as_list(texts: str | Sequence[Any]) -> list[Any]:
    """Return the texts, or other items, as a list; one string is one text, not its characters."""
    return [texts] if isinstance(texts, str) else list(texts)


def checked(schema: type[R], fields: Any) -> R:
    """Return the fields as a message; else raise InvalidRequestError, with the first wrong one."""
    try:
        return schema.model_validate(dict(fields) if isinstance(fields, Mapping) else fields)
    except ValidationError as invalid:
        first, *others = describe_faults(invalid.errors(include_url=False), schema)
        detail = f"{first.text} (and {len(others)} more)" if others else first.text
        raise InvalidRequestError("invalid_request", detail, param=first.param) from invalid


def to_json(request: BaseModel) -> bytes:
    """Return the body of a request; InvalidRequestError where UTF-8 cannot express it."""
    try:
        return request.model_dump_json(exclude_unset=True).encode()
    except PydanticSerializationError as invalid:
        raise InvalidRequestError(
            "invalid_request",
            "a text holds a lone surrogate, which UTF-8 cannot express; decode it with "
            'errors="replace"',
        ) from invalid


def _fill_path(path: str, given: dict[str, Any]) -> str:
    """Return the path with its parameters, which are taken out of `given`."""

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        value = given.pop(name)
        if not value:
            text = f"{name} is empty: {path} needs one"
            raise InvalidRequestError("invalid_request", text, param=name)
        return quote(value, safe="")

    return re.sub(r"{(\w+)}", fill, path)


def _complete(
    endpoint: Endpoint, given: Mapping[str, Any], default_model: str | None
) -> dict[str, Any]:
    """Return the fields of the request: what was given, as plain lists, and the client's model."""
    told = {name: value for name, value in given.items() if value is not NOT_GIVEN}
    fields = {name: _plain(value) for name, value in told.items()}
    for parameter in list_parameters(endpoint):
        value = fields.get(parameter.name)
        if parameter.name in endpoint.optional and value is None:
            fields.pop(parameter.name, None)
        elif isinstance(value, str) and takes_texts(parameter):
            fields[parameter.name] = [value]
        elif parameter.name == "model" and value is None and default_model is not None:
            fields["model"] = default_model
        elif endpoint.file_type and parameter.default is not None:
            # What comes back depends on it: it is said, whatever the server's default.
            fields.setdefault(parameter.name, parameter.default)
    return fields


def _plain(value: Any) -> Any:
    """Return sequences as lists and numbers as Python's own, at every depth."""
    if value is None or isinstance(value, str | bytes | int | float | Mapping | BaseModel):
        return value
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    if isinstance(value, SupportsIndex):
        return int(value)
    return float(value) if isinstance(value, SupportsFloat) else value


def _build_query(query: type[BaseModel], fields: Mapping[str, Any]) -> dict[str, str | list[str]]:
    objects = _write_objects(query, fields)
    if (size := _measure(objects)) > MAX_OBJECTS_QUERY:
        raise InvalidRequestError(
            "invalid_request",
            f"steering takes {size} bytes of a query, which has room for {MAX_OBJECTS_QUERY}: keep "
            "its vectors by vectors.put and name them, or send the text by perplexity_events",
            param="steering",
        )
    given = {name: value for name, value in fields.items() if value is not None}
    message = checked(query, given | objects)
    texts = message.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return {
        name: objects.get(name, [str(v) for v in value] if isinstance(value, list) else str(value))
        for name, value in texts.items()
    }


def _write_objects(query: type[BaseModel], fields: Mapping[str, Any]) -> dict[str, str]:
    """Return those of the fields that a query holds as JSON, written so."""
    schema = _objects_of(query)
    given = {name: value for name, value in fields.items() if name in schema.model_fields}
    return {
        name: to_json(value).decode()
        for name, value in checked(schema, given)
        if isinstance(value, BaseModel)
    }


@cache
def _objects_of(query: type[BaseModel]) -> type[BaseModel]:
    """Return the message of a query's JSON objects, each of its own type."""
    found: dict[str, Any] = {
        name: (get_type_hints(query)[name], None)
        for name, field in query.model_fields.items()
        for part in get_args(field.annotation)
        if any(type(mark) is Json for mark in getattr(part, "__metadata__", ()))
    }
    return create_model(query.__name__, __base__=Request, **found)


def _measure(objects: Mapping[str, str]) -> int:
    return len(urlencode(objects))


def _open_upload(endpoint: Endpoint, source: Any) -> tuple[UploadBody | None, str]:
    """Return what is sent, and its media type."""
    if endpoint.upload in (None, "form"):
        return None, "application/json"
    if endpoint.upload == "text":
        return UploadBody(source), "text/plain; charset=utf-8"
    return UploadBody([source] if isinstance(source, bytes) else source), "application/octet-stream"


def list_files(name: str, directory: Path) -> dict[str, Path]:
    """Return the files of a directory that an endpoint takes as a form, by part.

    Errors: InvalidRequestError where one is missing.
    """
    maker, required, further = FORMS[name]
    files = {part: directory / file for part, file in required.items()}
    missing = [path.name for path in files.values() if not path.is_file()]
    if missing:
        detail = (
            f"{directory} has no {' and no '.join(missing)}: give the directory that {maker} "
            f"writes, {' and '.join(required.values())}"
        )
        raise InvalidRequestError("invalid_request", detail, param="directory")
    there = {part: directory / file for part, file in further.items()}
    return files | {part: path for part, path in there.items() if path.is_file()}
