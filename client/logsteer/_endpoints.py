"""The table of endpoints: what each is called, where it is, what goes to it and what comes back.

Both clients' methods are generated from it (`client/generator.py`), every call is built from it
(`_calls`), and the server's routes may take path, tag and answer from it; a test compares it with
`openapi.json`. It loads the schemas and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pydantic import BaseModel

from logsteer import schemas as s
from logsteer.schemas import openai
from logsteer.schemas.captures import CaptureQuery
from logsteer.schemas.perplexity import StreamStart
from logsteer.schemas.vectors import (
    ContentQuery,
    FitQuery,
    ModelQuery,
    SaeQuery,
    ServerInfoQuery,
    StoreQuery,
    UploadQuery,
    WaitQuery,
    WorldSizeQuery,
)

Method = Literal["GET", "POST", "PUT", "DELETE"]
Content = Literal["text", "file", "form"]
"""What is uploaded: UTF-8 text, a file as it is, or a form of files."""

SAFETENSORS_TYPE = "application/vnd.safetensors"
"""The media type of arrays as a file."""

LAST_EVENT = "result"
"""The event that ends a stream of logsteer's own."""

PerplexityEvent: TypeAlias = StreamStart | s.WindowEvent | s.PerplexityAnswer
"""What a stream of `/perplexity` yields: one start, a window at a time, and the answer."""

GenerateEvent: TypeAlias = s.SteerStart | s.SteerPiece | s.GenerateAnswer
"""What a stream of `/generate` yields: one start, a piece at a time, and the answer."""

SteerEvent: TypeAlias = s.SteerStart | s.SteerPiece | s.SteerAnswer
"""What a stream of `/steer` yields: one start, a piece at a time, and the answer."""

SelftestEvent: TypeAlias = StreamStart | s.SelftestCheck | s.SelftestAnswer
"""What a stream of a self-test yields: one start, a check at a time, and the answer."""


@dataclass(frozen=True, eq=False)
class Endpoint:
    """One method of one path.

    `name` is that of the client's method, with its resource in front: `logprob`, `vectors.train`.
    The fields of `request` go in the body, those of `query` after the path; `upload` is a body of
    another kind. `events` (name -> type) is what a stream yields: an endpoint with a request field
    `stream` has a second method, `NAME_events`, and one without `answer` always streams.
    `file_type` is the media type of an answer that is a file, with the query's `format` in it.
    `statuses` beside 2xx carry an answer too. `retry_safe` says whether a failed attempt may be
    repeated. `scope` is what a key needs for it, where the server has a key file; None: no key.

    The rest is about the method that is generated: `positional` are the parameters that need
    not be named, `optional` those of them that may be None; `hidden` are fields for other clients;
    `summary` and `notes` begin the docstring, `events_summary` that of the second method, and
    `parameters` describes what no schema does. Without a `summary` none is written.
    """

    name: str
    method: Method
    path: str
    tag: str
    answer: type[BaseModel] | None = None
    request: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    upload: Content | None = None
    events: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    file_type: str | None = None
    statuses: frozenset[int] = frozenset()
    retry_safe: bool = True
    scope: s.KeyScope | None = "score"
    positional: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    summary: str = ""
    notes: str = ""
    events_summary: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


def _store(
    name: str,
    noun: str,
    listed: type[BaseModel],
    card: type[BaseModel],
    *,
    upload: Content,
    query: type[BaseModel],
    source: tuple[str, str],
    listing: type[BaseModel] | None = None,
) -> list[Endpoint]:
    """Return what every store of the server has: its list; card, upload and deletion of a name.

    `source` is the parameter that the content of an upload comes from, and its description;
    `listing` is the query of the list.
    """
    path = f"/{name}/{{name}}"
    of_list = (
        "Return the card of every name; with a model, of each vector that fits it."
        if listing
        else ""
    )
    positional = [field for field in query.model_fields if field != "overwrite"]
    parameters = {"name": f"What the {noun} is called from now on.", source[0]: source[1]}
    return [
        Endpoint(f"{name}.list", "GET", f"/{name}", name, listed, query=listing, summary=of_list),
        Endpoint(f"{name}.get", "GET", path, name, card, positional=("name",)),
        Endpoint(
            f"{name}.put", "PUT", path, name, card, query=query, upload=upload,
            positional=("name", source[0], *positional), parameters=parameters,
            scope="write",
            summary=f"Upload the {noun}, store it under a name, and return its card.",
        ),
        # A second attempt would not find what the first has deleted.
        Endpoint(
            f"{name}.delete", "DELETE", path, name, s.Deleted,
            positional=("name",), retry_safe=False, scope="write",
        ),
    ]  # fmt: skip


_FILE = "A path, an open binary file, or the file's bytes: "
_PROMPTS_NOTE = "With `prompt_ids` or `messages` among the options, `prompts` is None."
_PERPLEXITY_EVENTS: Mapping[str, type[BaseModel]] = {
    "start": StreamStart,
    "window": s.WindowEvent,
    LAST_EVENT: s.PerplexityAnswer,
}

_WAIT_NOTE = "Without `wait_s` the answer comes at once, and says how far it has come."


def _change(name: str, path: str, answer: type[BaseModel], summary: str) -> Endpoint:
    """Return an endpoint that changes which models are resident."""
    of_model = "{model_id}" in path
    return Endpoint(
        name, "POST", path, "operations", answer, query=WaitQuery, scope="admin",
        positional=("model_id",) if of_model else (),
        parameters={"model_id": "Id of the model."} if of_model else {},
        summary=summary, notes=_WAIT_NOTE,
    )  # fmt: skip


_OPERATIONS = [
    Endpoint(
        "models", "GET", "/models", "operations", s.ModelList,
        summary="Return every configured model and its state.",
    ),
    Endpoint(
        "model", "GET", "/models/{model_id}", "operations", s.ModelCard,
        positional=("model_id",), parameters={"model_id": "Id of the model."},
        summary="Return the card of one model; NotFoundError for an unknown id.",
    ),
    Endpoint(
        "selftest", "POST", "/models/{model_id}/selftest", "operations", s.SelftestAnswer,
        s.SelftestRequest, positional=("model_id",), scope="admin",
        events={"start": StreamStart, "check": s.SelftestCheck, LAST_EVENT: s.SelftestAnswer},
        parameters={"model_id": "Id of the model."},
        summary="Measure on a model what the service promises; return a verdict for each promise.",
        notes="A check that fails raises nothing: see the answer's `verdict`.",
        events_summary="Yield the events of `selftest`: a start, each check as it ends, then the "
        "whole answer.",
    ),
    _change(
        "load_model", "/models/{model_id}/load", s.ModelCard,
        "Start a model that was unloaded, drained or has failed; return its card.",
    ),
    _change(
        "unload_model", "/models/{model_id}/unload", s.ModelCard,
        "Finish a model's running requests, then end its engine; return its card.",
    ),
    _change(
        "drain_model", "/models/{model_id}/drain", s.ModelCard,
        "Finish a model's running requests and refuse new ones; return its card.",
    ),
    _change(
        "reload", "/admin/reload", s.ReloadAnswer,
        "Have the server read its configuration again: add, remove and replace models.",
    ),
    Endpoint(
        "health", "GET", "/healthz", "operations", s.Health, statuses=frozenset({503}), scope=None,
        summary="Return whether the server's process is healthy, and its version.",
        notes="Status 503 is an answer, too, and raises nothing.",
    ),
    Endpoint(
        "startup", "GET", "/startupz", "operations", s.Startup, statuses=frozenset({503}),
        scope=None,
        summary="Return whether every required model has answered once.",
        notes="Status 503 is an answer, too, and raises nothing.",
    ),
    Endpoint(
        "ready", "GET", "/readyz", "operations", s.Readiness, statuses=frozenset({503}),
        scope=None,
        summary="Return whether every required model answers, and the state of each.",
        notes="Status 503 is an answer, too, and raises nothing.",
    ),
    Endpoint("metrics", "GET", "/metrics", "operations", scope=None),
]  # fmt: skip

_SCORING = [
    Endpoint(
        "logprob", "POST", "/logprob", "scoring", s.LogprobAnswer, s.LogprobRequest,
        positional=("items",),
        summary="Score each item's targets after its context, exactly.",
        notes="An item has `context` and `targets` (text), `context_ids` and `target_ids`, or "
        "`messages` and `targets`; as a mapping or as a `LogprobItem`.",
    ),
    Endpoint(
        "diagnostics", "POST", "/diagnostics", "scoring", s.LogprobAnswer, s.DiagnosticsRequest,
        positional=("items",),
        summary="Score targets as a sampling policy saw them: every column of each token, and "
        "aggregates.",
        notes="Items are those of `logprob`.",
    ),
    Endpoint(
        "divergence", "POST", "/divergence", "scoring", s.DivergenceAnswer, s.DivergenceRequest,
        positional=("items", "reference"),
        summary="Compare two models' next-token distributions at every token of targets.",
        notes="Items are those of `logprob`.",
    ),
    Endpoint(
        "perplexity", "POST", "/perplexity", "scoring", s.PerplexityAnswer, s.PerplexityRequest,
        events=_PERPLEXITY_EVENTS, positional=("texts",), optional=("texts",),
        summary="Score texts: the log-likelihood and perplexity of each, and of all together.",
        events_summary="Yield the events of scoring texts: a start, each finished window, then the "
        "whole answer.",
    ),
    Endpoint(
        "perplexity_stream", "POST", "/perplexity/stream", "scoring",
        query=s.PerplexityStreamQuery, upload="text", events=_PERPLEXITY_EVENTS,
        positional=("source",),
        parameters={"source": "A path, an open file, or an iterable of bytes or text."},
        events_summary="Score one text of any length while sending it; yield its events.",
        notes="The source is tried again after a failure only if it can be read from its beginning "
        "again. Over HTTP/1.1 httpx reads the answer after it has sent the text: events arrive "
        "from then on.",
    ),
]  # fmt: skip

_GENERATION = [
    Endpoint(
        "generate", "POST", "/generate", "generation", s.GenerateAnswer, s.GenerateRequest,
        events={"start": s.SteerStart, "piece": s.SteerPiece, LAST_EVENT: s.GenerateAnswer},
        positional=("prompts",), optional=("prompts",),
        summary="Continue prompts; with `diagnostics`, return what the policy saw at every step.",
        notes=_PROMPTS_NOTE,
        events_summary="Yield the events of `generate`: a start, pieces as they are generated, "
        "then the whole answer.",
    ),
    Endpoint(
        "steer", "POST", "/steer", "generation", s.SteerAnswer, s.SteerRequest,
        events={"start": s.SteerStart, "piece": s.SteerPiece, LAST_EVENT: s.SteerAnswer},
        positional=("prompts", "steering"), optional=("prompts",), scope="steer",
        summary="Continue prompts under steering; return them with the receipt of what was done.",
        notes=_PROMPTS_NOTE,
        events_summary="Yield the events of `steer`: a start, pieces as they are generated, then "
        "the whole answer.",
    ),
    Endpoint(
        "sweep", "POST", "/sweep", "steering", s.SweepAnswer, s.SweepRequest,
        positional=("steering", "scales"), scope="steer",
        summary="Score targets and texts at each scale of a steering object.",
    ),
    Endpoint(
        "patch", "POST", "/patch", "steering", s.PatchAnswer, s.PatchRequest,
        positional=("pairs",), scope="steer",
        summary="Score items with activations patched in from others, one place at a time.",
    ),
    Endpoint(
        "lens", "POST", "/lens", "scoring", s.LensAnswer, s.LensRequest,
        positional=("items",), scope="steer",
        summary="Score targets from the residual stream of each layer (logit lens).",
        notes="Items are those of `logprob`; a string is a text that is scored whole.",
    ),
    Endpoint(
        "gradient", "POST", "/gradient", "gradients", s.GradientAnswer, s.GradientRequest,
        positional=("items", "wrt"), optional=("wrt",), scope="steer",
        summary="Differentiate every target's log-probability, or attribute it to input tokens.",
        notes="`wrt` has `layers`, and `hook` and `positions` as in steering: a gradient with "
        "respect to each token's activation. Or `override`, a stored direction v: the derivative "
        "along it. With `attribution`, `wrt` is None. Items are those of `logprob`.",
    ),
]  # fmt: skip

_ACTIVATIONS = [
    # The client's method reads the answer's file: `_conveniences` has it.
    Endpoint(
        "activations", "POST", "/activations", "activations", s.ActivationsAnswer,
        s.ActivationsRequest, positional=("items", "layers"), optional=("layers",),
        scope="steer",
    ),
]  # fmt: skip

_VECTORS = [
    *_store(
        "vectors", "steering vector", s.VectorList, s.VectorCard,
        upload="file", query=UploadQuery,
        source=("source", _FILE + "safetensors, or a GGUF control vector."), listing=FitQuery,
    ),
    Endpoint(
        "vectors.train", "POST", "/vectors/train", "vectors", s.TrainAnswer, s.TrainRequest,
        positional=("name", "pairs"), scope="write",
        parameters={"name": "What the vector is called from now on."},
        summary="Train a vector on pairs of texts, `positive` and `negative`, and store it.",
    ),
    Endpoint(
        "vectors.combine", "POST", "/vectors/{name}/combine", "vectors", s.VectorCard,
        s.CombineRequest, positional=("name",), scope="write",
        parameters={
            "vectors": "Names of vectors, and their weights in the sum.",
            "orthogonal_to": "Names of vectors: what the sum shares with them is taken away.",
        },
    ),
    Endpoint(
        "vectors.download", "GET", "/vectors/{name}/content", "vectors",
        query=ContentQuery, file_type="application/vnd.{format}", positional=("name", "format"),
        parameters={"name": "What the vector is called."},
        summary="Return the vector as a file.",
    ),
]  # fmt: skip

_OVERRIDES = _store(
    "overrides", "direction of the parameters", s.OverrideList, s.OverrideCard,
    upload="file", query=StoreQuery,
    source=(
        "source",
        _FILE + "safetensors, a tensor for each parameter that moves, under its name in "
        "transformers' `state_dict`.",
    ),
)  # fmt: skip

_ADAPTERS = _store(
    "adapters", "LoRA adapter", s.AdapterList, s.AdapterCard,
    upload="form", query=StoreQuery,
    source=(
        "directory",
        "What PEFT's `save_pretrained` writes: adapter_config.json and adapter_model.safetensors, "
        "which are read while they are sent.",
    ),
)  # fmt: skip

_SAES = _store(
    "saes", "sparse autoencoder", s.SaeList, s.SaeCard,
    upload="form", query=SaeQuery,
    source=(
        "directory",
        "What SAELens saves: cfg.json and sae_weights.safetensors, which are read while they are "
        "sent; and labels.json, feature -> text, where it is there.",
    ),
)  # fmt: skip


def _of_capture(
    verb: str, method: Method, path: str, answer: type[BaseModel], scope: s.KeyScope, summary: str
) -> Endpoint:
    """Return an endpoint of one data set of activations."""
    return Endpoint(
        f"captures.{verb}", method, f"/captures/{{name}}{path}", "captures", answer, scope=scope,
        positional=("name",), retry_safe=method != "DELETE", summary=summary,
        parameters={"name": "What the data set of activations is called."},
    )  # fmt: skip


def _file_of_capture(verb: str, path: str, summary: str, *further: str) -> Endpoint:
    return Endpoint(
        f"captures.{verb}", "GET", f"/captures/{{name}}/{path}", "captures",
        file_type=SAFETENSORS_TYPE, positional=("name", *further), summary=summary,
        parameters={
            "name": "What the data set of activations is called.", "number": "Of the shard, from 0."
        },
    )  # fmt: skip


_CAPTURES = [
    Endpoint("captures.list", "GET", "/captures", "captures", s.CaptureList),
    _of_capture("get", "GET", "", s.CaptureCard, "score", ""),
    _of_capture("delete", "DELETE", "", s.Deleted, "write", ""),
    Endpoint(
        "captures.put", "PUT", "/captures/{name}/source", "captures", s.CaptureSource,
        query=CaptureQuery, upload="file", positional=("name", "source"), scope="write",
        parameters={
            "name": "What the data set of activations is called from now on.",
            "source": _FILE + "JSON lines, each a text, or an object with `text`, `token_ids` or "
            "`messages`.",
        },
        summary="Upload a data set, for `start` to capture its activations.",
    ),
    Endpoint(
        "captures.start", "POST", "/captures", "captures", s.CaptureCard, s.CaptureRequest,
        positional=("name", "layers"), scope="write",
        summary="Start to capture the activations of a data set; return how far it has come.",
        notes="`Client.capture` uploads the data set and waits, too.",
    ),
    _of_capture(
        "index", "GET", "/index", s.CaptureIndex, "score",
        "Return all that is known of a data set of activations, its shards among it.",
    ),
    _of_capture(
        "pause", "POST", "/pause", s.CaptureCard, "write", "Stop a job until it is resumed."
    ),
    _of_capture(
        "resume", "POST", "/resume", s.CaptureCard, "write",
        "Resume a job after its last whole shard.",
    ),
    _file_of_capture("shard", "shards/{number}", "Return a shard as a safetensors file.", "number"),
    _file_of_capture(
        "statistics", "statistics", "Return means and covariances as a safetensors file."
    ),
]  # fmt: skip

_VARIANTS = [
    Endpoint("variants.list", "GET", "/variants", "variants", s.VariantList),
    Endpoint(
        "variants.get", "GET", "/variants/{name}", "variants", s.VariantCard, positional=("name",)
    ),
    Endpoint(
        "variants.put", "PUT", "/variants/{name}", "variants", s.VariantCard, s.VariantRequest,
        positional=("name",), scope="write",
        parameters={"name": "What it is called as a model from now on."},
        summary="Store a steered model under a name, which is then a model in every endpoint.",
    ),
    Endpoint(
        "variants.delete", "DELETE", "/variants/{name}", "variants", s.Deleted,
        positional=("name",), retry_safe=False, scope="write",
    ),
]  # fmt: skip

_TOKENS = [
    Endpoint(
        "tokenize", "POST", "/tokenize", "tokens", s.TokenizeAnswer, s.TokenizeRequest,
        positional=("texts",), optional=("texts",), hidden=("prompt", "add_special_tokens"),
        summary="Cut each text into tokens, and return them with their places in it.",
    ),
    Endpoint(
        "detokenize", "POST", "/detokenize", "tokens", s.DetokenizeAnswer, s.DetokenizeRequest,
        positional=("token_ids",), hidden=("tokens",),
        summary="Write each sequence of token ids as text.",
    ),
]  # fmt: skip

_OPENAI = [
    Endpoint(
        "tokenizer_info", "GET", "/tokenizer_info", "openai", openai.TokenizerInfo,
        query=ModelQuery,
    ),
    Endpoint("v1.models", "GET", "/v1/models", "openai"),
    Endpoint("v1.model", "GET", "/v1/models/{model_id}", "openai"),
    Endpoint(
        "v1.completions", "POST", "/v1/completions", "openai", openai.CompletionAnswer,
        openai.CompletionRequest,
    ),
    Endpoint(
        "v1.chat.completions", "POST", "/v1/chat/completions", "openai",
        openai.ChatCompletionAnswer, openai.ChatCompletionRequest,
    ),
    Endpoint("v1.score", "POST", "/v1/score", "openai", openai.ScoreAnswer, openai.ScoreRequest),
    Endpoint("vllm.health", "GET", "/health", "openai", scope=None),
    Endpoint("vllm.ping", "GET", "/ping", "openai", scope=None),
    Endpoint("vllm.post_ping", "POST", "/ping", "openai", scope=None),
    Endpoint("vllm.version", "GET", "/version", "openai", scope=None),
    Endpoint(
        "vllm.server_info", "GET", "/server_info", "openai", query=ServerInfoQuery, scope="admin"
    ),
    Endpoint("vllm.get_world_size", "GET", "/get_world_size", "openai", query=WorldSizeQuery),
    Endpoint("vllm.reset_prefix_cache", "POST", "/reset_prefix_cache", "openai", scope="admin"),
]  # fmt: skip

ENDPOINTS: Mapping[str, Endpoint] = {
    endpoint.name: endpoint
    for group in (
        _OPERATIONS, _SCORING, _GENERATION, _ACTIVATIONS, _VECTORS, _OVERRIDES, _ADAPTERS,
        _SAES, _CAPTURES, _VARIANTS, _TOKENS, _OPENAI,
    )
    for endpoint in group
}  # fmt: skip
"""Name -> endpoint."""
