"""One pure function per endpoint: arguments -> the call that asks for it.

Each checks its arguments with the schema of the request and raises InvalidRequestError, without a
request id, before anything is sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode

from pydantic import BaseModel

from logsteer._call import LAST_EVENT, Call, Download, as_list, checked, fields_of, to_json
from logsteer._options import (
    DiagnosticsOptions,
    GenerateOptions,
    GradientOptions,
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
    DiagnosticsRequest,
    GenerateAnswer,
    GenerateRequest,
    GradientAnswer,
    GradientRequest,
    GradientVariable,
    Health,
    InterventionFields,
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

GenerateEvent: TypeAlias = SteerStart | SteerPiece | GenerateAnswer
"""What a stream of `/generate` yields: one start, a piece at a time, and the answer."""

SteerEvent: TypeAlias = SteerStart | SteerPiece | SteerAnswer
"""What a stream of `/steer` yields: one start, a piece at a time, and the answer."""

_EVENTS: Mapping[str, type[PerplexityEvent]] = {
    "start": StreamStart,
    "window": WindowEvent,
    LAST_EVENT: PerplexityAnswer,
}
_GENERATE_EVENTS: Mapping[str, type[GenerateEvent]] = {
    "start": SteerStart,
    "piece": SteerPiece,
    LAST_EVENT: GenerateAnswer,
}
_STEER_EVENTS: Mapping[str, type[SteerEvent]] = {
    "start": SteerStart,
    "piece": SteerPiece,
    LAST_EVENT: SteerAnswer,
}


MAX_CHANGES_QUERY = 6000
"""Bytes of a query that `steering`, `override` and `adapter` may fill.

RFC 9110 wants 8000 of an address to be taken everywhere; httpx builds none beyond 65536.
"""


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
    fields = fields_of(options, default_model, items=list(items))
    if "columns" in fields:
        fields["columns"] = list(fields["columns"])
    return Call("POST", "/logprob", LogprobAnswer, to_json(checked(LogprobRequest, fields)))


def logprob_pairs(
    prompts: Sequence[str],
    targets: Sequence[str],
    options: PairOptions,
    default_model: str | None,
) -> Call[LogprobAnswer]:
    """The call that scores every target after every prompt and asks for the sums alone."""
    items = pair_items(prompts, targets)
    sums = fields_of(options, default_model, items=items, per_token=False, columns=["logprob"])
    return Call("POST", "/logprob", LogprobAnswer, to_json(checked(LogprobRequest, sums)))


def perplexity(
    texts: str | Sequence[str], options: PerplexityOptions, default_model: str | None
) -> Call[PerplexityAnswer]:
    """The call that scores texts and is answered at the end."""
    request = checked(PerplexityRequest, fields_of(options, default_model, texts=as_list(texts)))
    return Call("POST", "/perplexity", PerplexityAnswer, to_json(request))


def perplexity_events(
    texts: str | Sequence[str], options: PerplexityOptions, default_model: str | None
) -> Call[PerplexityEvent]:
    """The call that scores texts and is answered window by window."""
    fields = fields_of(options, default_model, texts=as_list(texts), stream=True)
    request = checked(PerplexityRequest, fields)
    return Call("POST", "/perplexity", body=to_json(request), events=_EVENTS)


def perplexity_stream(
    source: AsyncSource, options: WindowOptions, default_model: str | None
) -> Call[PerplexityEvent]:
    """The call that sends a text while it is read and is answered window by window."""
    changes = _write_changes(options)
    if not _fits_query(changes):
        raise InvalidRequestError(
            "invalid_request",
            f"steering takes {len(urlencode(changes))} bytes of a query, which has room for "
            f"{MAX_CHANGES_QUERY}: keep its vectors by vectors.put and name them, or send the text "
            "by perplexity_events",
            param="steering",
        )
    query = checked(PerplexityStreamQuery, fields_of(options, default_model, **changes))
    given = query.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    params = {name: changes.get(name, str(value)) for name, value in given.items()}
    return Call("POST", "/perplexity/stream", upload=Upload(source), params=params, events=_EVENTS)


def fits_query(options: WindowOptions) -> bool:
    """Whether `perplexity_stream` has room for these options; not where they hold long vectors."""
    return _fits_query(_write_changes(options))


def _fits_query(changes: Mapping[str, str]) -> bool:
    return len(urlencode(changes)) <= MAX_CHANGES_QUERY


def _write_changes(options: WindowOptions) -> dict[str, str]:
    """What the options change of the model, as the texts of a query: objects are JSON there."""
    fields = {
        name: value for name, value in options.items() if name in InterventionFields.model_fields
    }
    return {
        name: to_json(value).decode() if isinstance(value, BaseModel) else value
        for name, value in checked(InterventionFields, fields)
        if value is not None
    }


def tokenize(
    texts: str | Sequence[str], options: TokenOptions, default_model: str | None
) -> Call[TokenizeAnswer]:
    """The call that cuts texts into tokens."""
    request = checked(TokenizeRequest, fields_of(options, default_model, texts=as_list(texts)))
    return Call("POST", "/tokenize", TokenizeAnswer, to_json(request))


def detokenize(token_ids: Sequence[Sequence[int]], model: str | None) -> Call[DetokenizeAnswer]:
    """The call that writes sequences of token ids as text."""
    fields: dict[str, Any] = {"token_ids": [list(ids) for ids in token_ids]}
    if model is not None:
        fields["model"] = model
    request = checked(DetokenizeRequest, fields)
    return Call("POST", "/detokenize", DetokenizeAnswer, to_json(request))


def diagnostics(
    items: Sequence[LogprobItem | Mapping[str, Any]],
    options: DiagnosticsOptions,
    default_model: str | None,
) -> Call[LogprobAnswer]:
    """The call that looks at targets as a sampling policy saw them."""
    fields = fields_of(options, default_model, items=list(items))
    body = to_json(checked(DiagnosticsRequest, fields))
    return Call("POST", "/diagnostics", LogprobAnswer, body)


def generate(
    prompts: str | Sequence[str] | None, options: GenerateOptions, default_model: str | None
) -> Call[GenerateAnswer]:
    """The call that continues prompts and is answered at the end."""
    given = {} if prompts is None else {"prompts": as_list(prompts)}
    body = to_json(checked(GenerateRequest, fields_of(options, default_model, **given)))
    return Call("POST", "/generate", GenerateAnswer, body)


def generate_events(
    prompts: str | Sequence[str] | None, options: GenerateOptions, default_model: str | None
) -> Call[GenerateEvent]:
    """The call that continues prompts and is answered piece by piece."""
    given = {} if prompts is None else {"prompts": as_list(prompts)}
    fields = fields_of(options, default_model, **given, stream=True)
    body = to_json(checked(GenerateRequest, fields))
    return Call("POST", "/generate", body=body, events=_GENERATE_EVENTS)


def steer(
    prompts: str | Sequence[str] | None,
    steering: SteeringLike,
    options: SteerOptions,
    default_model: str | None,
) -> Call[SteerAnswer]:
    """The call that continues prompts under steering and is answered at the end."""
    body = to_json(checked(SteerRequest, _steer_fields(prompts, steering, options, default_model)))
    return Call("POST", "/steer", SteerAnswer, body)


def steer_events(
    prompts: str | Sequence[str] | None,
    steering: SteeringLike,
    options: SteerOptions,
    default_model: str | None,
) -> Call[SteerEvent]:
    """The call that continues prompts under steering and is answered piece by piece."""
    fields = _steer_fields(prompts, steering, options, default_model) | {"stream": True}
    body = to_json(checked(SteerRequest, fields))
    return Call("POST", "/steer", body=body, events=_STEER_EVENTS)


def _steer_fields(
    prompts: str | Sequence[str] | None,
    steering: SteeringLike,
    options: SteerOptions,
    default_model: str | None,
) -> dict[str, Any]:
    given = {} if prompts is None else {"prompts": as_list(prompts)}
    return fields_of(options, default_model, steering=steering, **given)


def sweep(
    steering: SteeringLike,
    scales: Sequence[float],
    options: SweepOptions,
    default_model: str | None,
) -> Call[SweepAnswer]:
    """The call that scores items and texts at every scale of a steering object."""
    fields = fields_of(options, default_model, steering=steering, scales=list(map(float, scales)))
    request = checked(SweepRequest, fields)
    return Call("POST", "/sweep", SweepAnswer, to_json(request))


def gradient(
    items: Sequence[LogprobItem | Mapping[str, Any]],
    wrt: GradientVariable | Mapping[str, Any],
    options: GradientOptions,
    default_model: str | None,
) -> Call[GradientAnswer]:
    """The call that derives targets' log-probabilities."""
    fields = fields_of(options, default_model, items=list(items), wrt=wrt)
    return Call("POST", "/gradient", GradientAnswer, to_json(checked(GradientRequest, fields)))


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
    fields = fields_of(options, default_model, name=name, pairs=list(pairs))
    if fields.get("layers") is not None:
        fields["layers"] = list(fields["layers"])
    return Call("POST", "/vectors/train", TrainAnswer, to_json(checked(TrainRequest, fields)))


def combine_vectors(
    name: str, weights: Mapping[str, float], orthogonal_to: Sequence[str]
) -> Call[VectorCard]:
    """The call that keeps a weighted sum of vectors."""
    vectors = [{"name": part, "weight": float(weight)} for part, weight in weights.items()]
    fields = {"vectors": vectors, "orthogonal_to": as_list(orthogonal_to)}
    body = to_json(checked(CombineRequest, fields))
    return Call("POST", f"{_vector_path(name)}/combine", VectorCard, body)


def _vector_path(name: str) -> str:
    if not name:
        raise InvalidRequestError("invalid_request", "the vector's name is empty", param="name")
    return f"/vectors/{quote(name, safe='')}"
