"""One pure function per endpoint: arguments -> the call that asks for it.

Each checks its arguments with the schema of the request and raises InvalidRequestError, without a
request id, before anything is sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from logsteer._options import (
    LogprobOptions,
    PairOptions,
    PerplexityOptions,
    TokenOptions,
    WindowOptions,
)
from logsteer._pairs import pair_items
from logsteer._upload import AsyncSource, Upload
from logsteer.errors import InvalidRequestError
from logsteer.schemas import (
    DetokenizeAnswer,
    DetokenizeRequest,
    Health,
    LogprobAnswer,
    LogprobItem,
    LogprobRequest,
    ModelCard,
    ModelList,
    PerplexityAnswer,
    PerplexityRequest,
    PerplexityStreamQuery,
    Readiness,
    TokenizeAnswer,
    TokenizeRequest,
    WindowEvent,
)
from logsteer.schemas.perplexity import StreamStart

PerplexityEvent: TypeAlias = StreamStart | WindowEvent | PerplexityAnswer
"""What a stream of `/perplexity` yields: one start, a window at a time, and the answer."""

A_co = TypeVar("A_co", bound=BaseModel, covariant=True)
R = TypeVar("R", bound=BaseModel)

_LAST_EVENT = "result"
_EVENTS: Mapping[str, type[PerplexityEvent]] = {
    "start": StreamStart,
    "window": WindowEvent,
    _LAST_EVENT: PerplexityAnswer,
}


@dataclass(frozen=True)
class Call(Generic[A_co]):
    """One request, ready to be sent, and the types of what comes back.

    A call with `events` is answered by server-sent events of these names, `last_event` at the end;
    any other call by one document of type `answer`.
    """

    method: str
    path: str
    answer: type[A_co] | None = None
    body: bytes | None = None
    upload: Upload | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    events: Mapping[str, type[A_co]] = field(default_factory=dict)
    last_event: str = _LAST_EVENT
    answer_statuses: frozenset[int] = frozenset()
    """Statuses beside 2xx whose body is an answer too."""
    retry_safe: bool = True


def models() -> Call[ModelList]:
    """The call for every configured model."""
    return Call("GET", "/models", ModelList)


def model(model_id: str) -> Call[ModelCard]:
    """The call for one model's card."""
    if not model_id:
        raise InvalidRequestError("invalid_request", "the model id is empty", param="model_id")
    return Call("GET", f"/models/{quote(model_id, safe='')}", ModelCard)


def health() -> Call[Health]:
    """The call that asks whether the process answers."""
    return Call("GET", "/healthz", Health)


def ready() -> Call[Readiness]:
    """The call that asks whether every required model answers; 503 is an answer, too."""
    return Call("GET", "/readyz", Readiness, answer_statuses=frozenset({503}))


def logprob(
    items: Sequence[LogprobItem | Mapping[str, Any]],
    options: LogprobOptions,
    default_model: str | None,
) -> Call[LogprobAnswer]:
    """The call that scores targets after their contexts."""
    fields = _fields(options, default_model, items=list(items))
    if "columns" in fields:
        fields["columns"] = list(fields["columns"])
    return Call("POST", "/logprob", LogprobAnswer, _json(_checked(LogprobRequest, fields)))


def logprob_pairs(
    prompts: Sequence[str],
    targets: Sequence[str],
    options: PairOptions,
    default_model: str | None,
) -> Call[LogprobAnswer]:
    """The call that scores every target after every prompt and asks for the sums alone."""
    items = pair_items(prompts, targets)
    sums = _fields(options, default_model, items=items, per_token=False, columns=["logprob"])
    return Call("POST", "/logprob", LogprobAnswer, _json(_checked(LogprobRequest, sums)))


def perplexity(
    texts: str | Sequence[str], options: PerplexityOptions, default_model: str | None
) -> Call[PerplexityAnswer]:
    """The call that scores texts and is answered at the end."""
    request = _checked(PerplexityRequest, _fields(options, default_model, texts=as_list(texts)))
    return Call("POST", "/perplexity", PerplexityAnswer, _json(request))


def perplexity_events(
    texts: str | Sequence[str], options: PerplexityOptions, default_model: str | None
) -> Call[PerplexityEvent]:
    """The call that scores texts and is answered window by window."""
    fields = _fields(options, default_model, texts=as_list(texts), stream=True)
    request = _checked(PerplexityRequest, fields)
    return Call("POST", "/perplexity", body=_json(request), events=_EVENTS)


def perplexity_stream(
    source: AsyncSource, options: WindowOptions, default_model: str | None
) -> Call[PerplexityEvent]:
    """The call that sends a text while it is read and is answered window by window."""
    query = _checked(PerplexityStreamQuery, _fields(options, default_model))
    given = query.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    params = {name: str(value) for name, value in given.items()}
    return Call("POST", "/perplexity/stream", upload=Upload(source), params=params, events=_EVENTS)


def tokenize(
    texts: str | Sequence[str], options: TokenOptions, default_model: str | None
) -> Call[TokenizeAnswer]:
    """The call that cuts texts into tokens."""
    request = _checked(TokenizeRequest, _fields(options, default_model, texts=as_list(texts)))
    return Call("POST", "/tokenize", TokenizeAnswer, _json(request))


def detokenize(token_ids: Sequence[Sequence[int]], model: str | None) -> Call[DetokenizeAnswer]:
    """The call that writes sequences of token ids as text."""
    fields: dict[str, Any] = {"token_ids": [list(ids) for ids in token_ids]}
    if model is not None:
        fields["model"] = model
    request = _checked(DetokenizeRequest, fields)
    return Call("POST", "/detokenize", DetokenizeAnswer, _json(request))


def as_list(texts: str | Sequence[str]) -> list[str]:
    """The texts as a list; one string is one text, not its characters."""
    return [texts] if isinstance(texts, str) else list(texts)


def _fields(options: Mapping[str, Any], default_model: str | None, **more: Any) -> dict[str, Any]:
    default = {} if default_model is None else {"model": default_model}
    return {**default, **options, **more}


def _checked(schema: type[R], fields: Mapping[str, Any]) -> R:
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


def _json(request: BaseModel) -> bytes:
    try:
        return request.model_dump_json(exclude_unset=True).encode()
    except PydanticSerializationError as invalid:
        raise InvalidRequestError(
            "invalid_request",
            "a text holds a lone surrogate, which UTF-8 cannot express; decode it with "
            'errors="replace"',
        ) from invalid
