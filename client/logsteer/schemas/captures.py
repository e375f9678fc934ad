"""`/captures`: data sets of activations, which the server computes from a data set of texts."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from logsteer.schemas.chat import ChatFields
from logsteer.schemas.common import (
    OVERWRITE,
    ByLayer,
    Count,
    Float,
    Layers,
    Reply,
    Request,
    SequenceOptions,
    Tabled,
)
from logsteer.schemas.interventions import ActivationRead, InterventionFields
from logsteer.schemas.readings import ActivationItem, AllPositions
from logsteer.schemas.steering import (
    HOOK,
    CaptureName,
    HookName,
    ProbeRequest,
    SlicePositions,
    Steering,
)
from logsteer.schemas.vectors import Query

CaptureState = Literal["running", "paused", "done", "failed"]
CaptureDtype = Literal["float32", "float16"]
MAX_TOP = 1000
STORED_SOURCE = r"^store://([A-Za-z0-9_-][A-Za-z0-9._=-]*/)*[A-Za-z0-9_-][A-Za-z0-9._=-]*$"


def name_shard(number: int) -> str:
    """Return the name of a shard's file, in the store and where it is downloaded to."""
    return f"shard-{number:05d}.safetensors"


class CaptureReduce(Request):
    """What is computed of activations while they come, in float64, on the server's host.

    BOS and attention sinks are left out.
    """

    mean: bool = False
    covariance: bool = Field(default=False, description="Of the whole population: E[xx'] - mm'.")
    norms: bool = Field(default=False, description="Statistics of the Euclidean norms.")
    top: list[ProbeRequest] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Vectors and features of autoencoders, as probes: the tokens that they read "
        "highest. Each reads the captured activations of its own layer and hook.",
    )
    k: Annotated[int, Field(ge=1, le=MAX_TOP)] = Field(
        default=20, description="Tokens listed for each of `top`."
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not (self.mean or self.covariance or self.norms or self.top):
            raise ValueError("reduce asks for nothing: set mean, covariance, norms or top")
        return self


class CaptureRequest(SequenceOptions, InterventionFields, ChatFields):
    """A data set whose activations are captured, and what becomes of them.

    The data set is `items`, `source`, or what `PUT /captures/{name}/source` has stored.
    """

    reads_rows: ClassVar[bool] = True

    name: CaptureName = Field(description="What the data set of activations is called.")
    items: list[str | ActivationItem] | None = Field(
        default=None,
        min_length=1,
        description="Texts; or objects with `token_ids`, taken as they are, or `messages`. Null: "
        "the rows of `source`, or of an upload.",
    )
    source: Annotated[str, Field(max_length=1024, pattern=STORED_SOURCE)] | None = Field(
        default=None,
        description="`store://PATH`: the object `datasets/PATH` of the server's store, which every "
        "key may read: JSON lines, or Parquet whose name says so. It is copied once.",
    )
    steering: Steering | None = Field(
        default=None, description="Steer the model; the whole sequence is the prompt."
    )
    layers: Layers = Field(description="Layers to read, 0-based.")
    hook: HookName = Field(default="resid_post", description=HOOK)
    positions: AllPositions | SlicePositions = Field(
        default="all", description="Which of the tokens that the model reads: all, or slices."
    )
    read: ActivationRead = Field(
        default="each", description="Each of those tokens' activation, the last one's, or their "
        "mean, as in /activations: a document then has one row.",
    )  # fmt: skip
    dtype: CaptureDtype = Field(default="float32", description="Of the activations in the shards.")
    max_length: Count | None = Field(
        default=None,
        description="Read the first tokens of each document, at most so many; null: a document "
        "longer than the model's context is a problem, unless `on_overflow` says otherwise.",
    )
    shard_rows: Annotated[int, Field(ge=1, le=2**24)] = Field(
        default=2**15,
        description="Rows from which on a shard is written, at the end of a document; or at 64 MiB "
        "of float32.",
    )
    shards: bool | None = Field(
        default=None,
        description="Whether activations are written; null: unless `reduce` is given.",
    )
    reduce: CaptureReduce | None = Field(
        default=None, description="Statistics that are computed meanwhile."
    )
    overwrite: bool = Field(default=False, description=OVERWRITE)

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.items is not None and self.source is not None:
            raise ValueError("send one of items and source")
        return self


class CaptureQuery(Query):
    """Whether an uploaded data set replaces another, and what was captured of it."""

    overwrite: bool = Field(default=False, description=OVERWRITE)


class CaptureSource(Reply):
    """An uploaded data set."""

    name: str
    sha256: str
    documents: int = Field(description="Lines that are not blank.")
    bytes: int


class CaptureNorms(Reply):
    """Statistics of the Euclidean norms of a layer's activations."""

    mean: Float
    std: Float
    smallest: Float
    largest: Float


class CaptureExample(Reply):
    """A token whose activation a probe reads high."""

    reading: Float
    document: int
    position: int
    token_id: int
    text: str = Field(description="The last 24 tokens up to this one.")


class CaptureTop(Reply):
    """The tokens that a probe reads highest, in descending order."""

    name: str | None
    sha256: str
    layer: int
    hook: str
    read: str
    examples: list[CaptureExample]


class CaptureSums(Reply):
    """Statistics of all rows so far; means and covariances are a file of their own."""

    rows: int = Field(description="Rows that are counted in.")
    non_finite: int = Field(description="Rows that are left out, as one of their numbers is not.")
    sinks: int = Field(
        default=0,
        description="Rows that are left out: BOS, and attention sinks, whose norm at a captured "
        "layer is more than 3 times the median of their document's.",
    )
    norms: ByLayer[CaptureNorms] | None = None
    top: list[CaptureTop] | None = None


class CaptureCard(Tabled):
    """One data set of activations, and how far it has come."""

    name: str
    state: CaptureState = Field(
        description="`running` until `done`; `failed` with its `error`, and `paused`, resume when "
        "asked."
    )
    error: str | None = Field(default=None, description="Why it failed.")
    model: str
    weights_digest: str
    layers: list[int]
    hook: str
    read: ActivationRead
    dtype: CaptureDtype
    width: int = Field(description="Numbers of an activation.")
    documents: int = Field(description="Documents whose rows are stored, or that have a problem.")
    documents_total: int
    problems: int = Field(description="Documents that could not be read: the index lists them.")
    truncated: int = Field(description="Documents that were not read whole.")
    tokens: int = Field(description="Tokens that the model has read.")
    rows: int = Field(description="Activations of a layer.")
    num_shards: int
    bytes: int = Field(description="Bytes of all shards.")
    non_finite: int = Field(description="Rows with a number that is not finite in `dtype`.")
    seconds: float = Field(description="How long it has run.")
    created: str = Field(description="RFC 3339, UTC.")
    server: str = Field(
        description="Of the server that runs it: host, port, and a digest of its directory."
    )
    reduced: CaptureSums | None = None


class CaptureList(Tabled):
    """Every data set of activations, by name."""

    captures: list[CaptureCard]


class CaptureShard(Reply):
    """Consecutive documents whose rows are stored, in the file `shard-NUMBER.safetensors`.

    It has a tensor `HOOK.LAYER` [rows, width] for each layer; and `token_ids`, `document` and
    `position` [rows], int32: which token each row belongs to, numbers and positions from 0. Of a
    mean, token and position are -1. Without shards, `bytes` is 0 and there is no file.
    """

    first: int = Field(description="The first document.")
    documents: int
    rows: int
    bytes: int


class CaptureProblem(Reply):
    """A document that has no rows, and why."""

    document: int
    code: str
    detail: str


class CaptureIndex(CaptureCard):
    """All that is known of a data set of activations: the object `index.json` of the store.

    It is written whole after each shard; what it does not list does not count.
    """

    shards: list[CaptureShard]
    failures: list[CaptureProblem] = Field(description="The first 1,000 documents with a problem.")
    request: dict[str, Any] = Field(description="What was asked for.")
    source: str = Field(description="SHA-256 of the data set.")
    digest: str = Field(description="Of the request and the data set.")
    changes: str = Field(default="", description="Of the steering, override and adapter in use.")
