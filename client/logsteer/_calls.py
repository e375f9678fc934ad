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
    SteeringLike,
    SteerOptions,
    SweepOptions,
    TokenOptions,
    TrainOptions,
    WindowOptions,
)
from logsteer._pairs import pair_items
from logsteer._upload import AsyncSource, Upload
from logsteer.errors import InvalidRequestError
from logsteer.schemas import (
    CombineRequest,
    ContentFormat,
    ContrastPair,
    DeletedVector,
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
    SteerAnswer,
    SteerPiece,
    SteerRequest,
    SteerStart,
    SweepAnswer,
    SweepRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TrainAnswer,
    TrainRequest,
    VectorCard,
    VectorFormat,
    VectorList,
    WindowEvent,
)
from logsteer.schemas.perplexity import StreamStart

PerplexityEvent: TypeAlias = StreamStart | WindowEvent | PerplexityAnswer
"""What a stream of `/perplexity` yields: one start, a window at a time, and the answer."""

A_co = TypeVar("A_co", bound=BaseModel, covariant=True)
R = TypeVar("R", bound=BaseModel)

SteerEvent: TypeAlias = SteerStart | SteerPiece | SteerAnswer
"""What a stream of `/steer` yields: one start, a piece at a time, and the answer."""

_LAST_EVENT = "result"
_EVENTS: Mapping[str, type[PerplexityEvent]] = {
    "start": StreamStart,
    "window": WindowEvent,
    _LAST_EVENT: PerplexityAnswer,
}
_STEER_EVENTS: Mapping[str, type[SteerEvent]] = {
    "start": SteerStart,
    "piece": SteerPiece,
    _LAST_EVENT: SteerAnswer,
}


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


def steer(
    prompts: str | Sequence[str] | None,
    steering: SteeringLike,
    options: SteerOptions,
    default_model: str | None,
) -> Call[SteerAnswer]:
    """The call that continues prompts under steering and is answered at the end."""
    body = _json(_checked(SteerRequest, _steer_fields(prompts, steering, options, default_model)))
    return Call("POST", "/steer", SteerAnswer, body)


def steer_events(
    prompts: str | Sequence[str] | None,
    steering: SteeringLike,
    options: SteerOptions,
    default_model: str | None,
) -> Call[SteerEvent]:
    """The call that continues prompts under steering and is answered piece by piece."""
    fields = _steer_fields(prompts, steering, options, default_model) | {"stream": True}
    body = _json(_checked(SteerRequest, fields))
    return Call("POST", "/steer", body=body, events=_STEER_EVENTS)


def _steer_fields(
    prompts: str | Sequence[str] | None,
    steering: SteeringLike,
    options: SteerOptions,
    default_model: str | None,
) -> dict[str, Any]:
    given = {} if prompts is None else {"prompts": as_list(prompts)}
    return _fields(options, default_model, steering=steering, **given)


def sweep(
    steering: SteeringLike,
    scales: Sequence[float],
    options: SweepOptions,
    default_model: str | None,
) -> Call[SweepAnswer]:
    """The call that scores items and texts at every scale of a steering object."""
    fields = _fields(options, default_model, steering=steering, scales=list(map(float, scales)))
    request = _checked(SweepRequest, fields)
    return Call("POST", "/sweep", SweepAnswer, _json(request))


def list_vectors() -> Call[VectorList]:
    """The call for every kept vector."""
    return Call("GET", "/vectors", VectorList)


def show_vector(name: str) -> Call[VectorCard]:
    """The call for one vector's card."""
    return Call("GET", _vector_path(name), VectorCard)


def put_vector(
    name: str, source: AsyncSource | bytes, file_format: VectorFormat | None
) -> Call[VectorCard]:
    """The call that uploads a vector's file."""
    upload = Upload([source] if isinstance(source, bytes) else source)
    params = {"format": file_format} if file_format else {}
    return Call(
        "PUT",
        _vector_path(name),
        VectorCard,
        upload=upload,
        upload_type="application/octet-stream",
        params=params,
    )


def download_vector(name: str, file_format: ContentFormat) -> Call[Download]:
    """The call for a vector's file."""
    return Call(
        "GET",
        f"{_vector_path(name)}/content",
        Download,
        params={"format": file_format},
        file_type=f"application/vnd.{file_format}",
    )


def delete_vector(name: str) -> Call[DeletedVector]:
    """The call that forgets a vector; it is not repeated, because it would not find it again."""
    return Call("DELETE", _vector_path(name), DeletedVector, retry_safe=False)


def train_vector(
    name: str,
    pairs: Sequence[ContrastPair | Mapping[str, str]],
    options: TrainOptions,
    default_model: str | None,
) -> Call[TrainAnswer]:
    """The call that trains a vector on pairs of texts."""
    fields = _fields(options, default_model, name=name, pairs=list(pairs))
    if fields.get("layers") is not None:
        fields["layers"] = list(fields["layers"])
    return Call("POST", "/vectors/train", TrainAnswer, _json(_checked(TrainRequest, fields)))


def combine_vectors(
    name: str, weights: Mapping[str, float], orthogonal_to: Sequence[str]
) -> Call[VectorCard]:
    """The call that keeps a weighted sum of vectors."""
    vectors = [{"name": part, "weight": float(weight)} for part, weight in weights.items()]
    fields = {"vectors": vectors, "orthogonal_to": as_list(orthogonal_to)}
    body = _json(_checked(CombineRequest, fields))
    return Call("POST", f"{_vector_path(name)}/combine", VectorCard, body)


def _vector_path(name: str) -> str:
    if not name:
        raise InvalidRequestError("invalid_request", "the vector's name is empty", param="name")
    return f"/vectors/{quote(name, safe='')}"


def as_list(texts: str | Sequence[str]) -> list[str]:
    """The texts as a list; one string is one text, not its characters."""
    return [texts] if isinstance(texts, str) else list(texts)


def _fields(options: Mapping[str, Any], default_model: str | None, **more: Any) -> dict[str, Any]:
    default = {} if default_model is None else {"model": default_model}
    given = {**default, **options, **more}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in given.items()}


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
