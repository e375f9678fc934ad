"""`/vectors` and `/saes`: what the server keeps to steer and read by, how it is made and uploaded.

Layer L with hook resid_post is the residual stream that leaves block L, 0-based.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from logsteer.schemas.chat import ChatFields, TextOrTurns
from logsteer.schemas.common import (
    OVERWRITE,
    Answer,
    BosPolicy,
    ByLayer,
    Float,
    Index,
    Layers,
    NamedContent,
    Plotted,
    Reply,
    Request,
    SpecialTokens,
    name_refusal,
)
from logsteer.schemas.steering import HOOK, CaptureName, Finite, HookName, VectorName
from logsteer.schemas.stored import StoredCard, StoredList

VectorFormat = Literal["safetensors", "gguf", "pt"]
ContentFormat = Literal["safetensors", "gguf"]
VectorSource = Literal["upload", "training", "combination"]
TrainMethod = Literal["mean_difference", "pca", "logistic", "lda"]
TrainRead = Literal["last", "mean", "answer"]


class LayerQuality(Reply):
    """How well a method tells texts apart at one layer, by their projections on its vector.

    The first three are held out: each pair's texts are projected on the vector that the other
    folds' pairs give, from the middle between their two means. null where nothing could be.
    """

    accuracy: Float = Field(
        default=None,
        description="Share of texts on their own side of the middle between the two means.",
    )
    auc: Float = Field(
        default=None,
        description="Probability that a positive text projects higher than a negative one.",
    )
    pair_accuracy: Float = Field(
        default=None,
        description="Share of pairs whose positive text projects higher than their negative one.",
    )
    activation_norm: Float = Field(
        default=None,
        description="Mean norm of the texts' activations; with read mean that of their means over "
        "tokens, which are shorter than a token's own.",
    )
    left_out: int | None = Field(
        default=None,
        description="With read mean: attention sinks of all texts, which it leaves out.",
    )
    scale: Float = Field(
        default=None,
        description="Of those tried at this layer, the one with the largest gain whose harm is at "
        "most max_harm; null where none was tried, or none is.",
    )
    gain: Float = Field(default=None, description="At that scale: see `Recommendation.gain`.")
    harm: Float = Field(default=None, description="At that scale: see `Recommendation.harm`.")


class Validation(Reply):
    """How quality was measured: by as many folds of the pairs; or why it could not be."""

    folds: int | None = Field(
        default=None,
        description="Each held out in turn, with all pairs of the same continuations in one; as "
        "many as there are such texts for few.",
    )
    reason: str | None = Field(default=None, description="Why nothing was held out.")
    caution: str | None = Field(
        default=None,
        description="Why nothing is recommended: no setting that was tried raises the preference "
        "within max_harm; or held-out texts are separated no better than chance would, by an AUC "
        "of at most 0.6.",
    )


RecommendedBy = Literal["effect", "separation"]


class Recommendation(Reply):
    """The layer and the scale that a trained vector's name alone stands for."""

    layer: int
    scale: float = Field(description="With a minus in front for the opposite. Unit raw.")
    relative_norm: float = Field(
        description="|scale v| by `LayerQuality.activation_norm` of the layer."
    )
    recommended_by: RecommendedBy = Field(
        description="`effect`: what the vector does to pairs whose texts begin alike. "
        "`separation`, where none do: the layer between 30 and 80 % of the depth that tells "
        "held-out texts apart best, at a small scale; try it before you trust it."
    )
    gain: Float = Field(
        default=None,
        description="Mean over pairs of the change of log P(positive continuation) - log "
        "P(negative continuation) under steering, in nats, each by the vector of the folds without "
        "the pair, where pairs are held out.",
    )
    harm: Float = Field(
        default=None,
        description="Relative growth of perplexity: exp(KL(unsteered || steered) per token) - 1 on "
        "the unsteered model's own continuations of the pairs' beginnings; or of perplexity on "
        "harm_texts, where that is larger.",
    )
    pairs: int | None = Field(default=None, description="Pairs that gain was measured on.")
    reason: str


class VectorPart(NamedContent):
    """What a combination was made of."""

    weight: Float = None


class VectorAbout(Reply):
    """Where a vector comes from; what does not apply to its source is null."""

    source: VectorSource
    format: VectorFormat | None = Field(default=None, description="Of the file uploaded.")
    model_hint: str | None = Field(default=None, description="What that file says of its model.")
    model: str | None = Field(default=None, description="Id of the model it was trained on.")
    weights_digest: str | None = None
    method: TrainMethod | None = None
    read: TrainRead | None = None
    whiten: bool | str | None = None
    pairs: int | None = None
    validation: Validation | None = None
    quality: ByLayer[LayerQuality] | None = Field(default=None, description="By layer.")
    recommendation: Recommendation | None = None
    parts: list[VectorPart] | None = None
    orthogonal_to: list[VectorPart] | None = None


class VectorReadout(Reply):
    """What the projection c = x . v / |v| of an activation x on a layer's vector v means.

    With z = slope c + bias, `logistic` is a probability, 1 / (1 + exp(-z)), and `relu` the
    activation of a feature of a sparse autoencoder: z where it is above `threshold`, else 0.
    """

    kind: Literal["logistic", "relu"]
    slope: float
    bias: float
    threshold: float = 0.0


class VectorCard(StoredCard, Plotted):
    """One stored vector."""

    hook: str
    layers: list[int]
    width: int = Field(description="Numbers of each layer: the model's hidden size.")
    norms: ByLayer[float] = Field(description="Euclidean norm, by layer.")
    readouts: ByLayer[VectorReadout] | None = Field(
        default=None, description="What a projection on the vector means, by layer; null: unknown."
    )
    other_weights: bool = Field(
        default=False,
        description="In a list for a model: whether it was trained on other weights than the "
        "model's, so that its directions may mean nothing there.",
    )
    about: VectorAbout


class VectorList(StoredList):
    """Every stored vector, by name."""

    vectors: list[VectorCard]


class ContrastPair(Request):
    """Two texts that differ in what the vector is to stand for; [positive, negative] for short.

    Either may be a conversation: a list of messages, through the model's chat template.
    """

    positive: TextOrTurns
    negative: TextOrTurns

    @model_validator(mode="before")
    @classmethod
    def _name_sides(cls, data: Any) -> Any:
        if isinstance(data, list | tuple) and len(data) == len(cls.model_fields):
            return dict(zip(cls.model_fields, data, strict=True))
        return dict(data) if isinstance(data, Mapping) else data


PairLike: TypeAlias = ContrastPair | Mapping[str, Any] | tuple[Any, Any]
"""What a client takes for a pair: (positive, negative), or its fields."""


class TrainRequest(ChatFields):
    """Texts in pairs, and how a vector is made from the activations that they give.

    `mean_difference`: mean of positive minus mean of negative, in the activations' own units.
    `pca`: first principal direction of the pairs' differences about zero, norm 1. `logistic`: the
    normal of a logistic regression's boundary. `lda`: Fisher's linear discriminant, which counts a
    difference by how little texts of one side vary in its direction. The last two are as long as
    the two means are apart along them, and have readouts: a projection gives a probability. All of
    them point from negative to positive.
    """

    model: str | None = None
    name: VectorName
    pairs: list[ContrastPair] = Field(
        min_length=1,
        description="Texts that differ in what the vector should represent.",
    )
    method: TrainMethod = Field(
        default="mean_difference",
        description="The mean of the differences of each pair, their first principal component, "
        "the normal of a logistic regression, or Fisher's linear discriminant.",
    )
    whiten: bool | CaptureName = Field(
        default=False,
        description="Whether pca and logistic, too, discount what varies among texts of one side: "
        "whiten activations by that covariance. A capture's name: by the covariance of its "
        "activations (`reduce`), also for lda.",
    )
    read: TrainRead = Field(
        default="last",
        description="Activation after a text's last token, or their mean over tokens without BOS "
        "and attention sinks (tokens whose norm at that layer is more than 3 times the median of "
        "the text's); `answer`: after the last token that the assistant says in a conversation's "
        "last turn, before what the template closes the turn with, as contrastive activation "
        "addition reads it.",
    )
    layers: Layers | None = Field(default=None, description="null: every layer.")
    hook: HookName = Field(default="resid_post", description=HOOK)
    bos: BosPolicy = "auto"
    max_harm: float = Field(
        default=0.1,
        gt=0,
        le=10,
        description="How much the recommended scale may raise perplexity: 0.1 is a tenth.",
    )
    harm_texts: list[str] = Field(
        default=[],
        max_length=64,
        description="Further texts whose perplexity is not to grow by more, the first 64 tokens "
        "of each.",
    )
    special_tokens: SpecialTokens = "parse"
    overwrite: bool = Field(default=False, description=OVERWRITE)

    @model_validator(mode="after")
    def _can_be_trained(self) -> "TrainRequest":
        takes_capture = self.method == "lda" and isinstance(self.whiten, str)
        if self.whiten and self.method in ("mean_difference", "lda") and not takes_capture:
            raise ValueError(
                f"whiten is for pca and logistic, method is {self.method}; lda is what whitening "
                "makes of the difference of the means"
            )
        for index, pair in enumerate(self.pairs):
            if pair.positive == pair.negative:
                raise name_refusal({f"pairs[{index}]": "positive and negative are the same"})
        return self


class SimilarVector(NamedContent):
    """A stored vector, and the cosine between it and the new one at a layer."""

    cosine: float


class SimilarVectors(Reply):
    """The stored vectors that are most like a new one, of the same hook and width."""

    layers: ByLayer[list[SimilarVector]] = Field(
        description="By layer: the nearest few, by the size of the cosine."
    )
    compared: int = Field(description="Stored vectors that were compared.")
    left_out: int = Field(
        description="Vectors that were not: older ones beyond the server's bound, and damaged ones."
    )


class TrainAnswer(Answer, Plotted):
    """The vector that was made and stored, and what it is like."""

    vector: VectorCard
    layer_cosines: list[list[Float]] = Field(
        description="Between the vectors of every two layers, in the order of `vector.layers`; "
        "null for a vector of zeros."
    )
    similar: SimilarVectors


class WeightedVector(Request):
    """A stored vector and its weight in a sum."""

    name: VectorName
    weight: Finite = 1.0


class CombineRequest(Request):
    """A weighted sum of stored vectors; a layer that only some of them have sums those.

    With `orthogonal_to`, what the sum shares with those vectors is then taken away, layer by layer.
    """

    vectors: list[WeightedVector] = Field(min_length=1, max_length=64)
    orthogonal_to: list[VectorName] = Field(default=[], max_length=64)
    overwrite: bool = Field(default=False, description=OVERWRITE)


class Query(BaseModel):
    """What stands after the path of a request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class SaeQuery(Query):
    """What SAELens' files may leave open, and whether an upload replaces another."""

    layer: Index | None = Field(
        default=None,
        description="The block whose activation is read, where the hook in the configuration names "
        "none, or another.",
    )
    activation_scale: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="SAELens' norm_scaling_factor, where normalize_activations is "
        "expected_average_only_in; 1 where it was folded in.",
    )
    overwrite: bool = Field(default=False, description=OVERWRITE)


class SaeCard(StoredCard):
    """One stored sparse autoencoder."""

    architecture: str
    hook: str
    layer: int = Field(description="Its activations are those of this layer's hook.")
    width: int = Field(description="Numbers of an activation.")
    features: int
    k: int | None = Field(default=None, description="Features of a token at most, of topk alone.")
    model_hint: str | None = Field(
        default=None, description="What its configuration says of its model."
    )
    labels: int = Field(description="Features that have a label.")


class SaeList(StoredList):
    """Every stored sparse autoencoder, by name."""

    saes: list[SaeCard]


class FitQuery(Query):
    """The model that a list is for."""

    model: str | None = Field(
        default=None,
        description="Id of a resident model: list what fits it alone. Left out: everything.",
    )


class ModelQuery(Query):
    """The model that an upload is checked against."""

    model: str | None = Field(
        default=None, description="Id of a resident model; may be left out where there is only one."
    )


class WorldSizeQuery(ModelQuery):
    """The model whose ranks are counted, and whether those of all replicas are."""

    include_dp: bool = Field(default=True, description="Count the ranks of all replicas.")


class ServerInfoQuery(ModelQuery):
    """The model whose configuration is shown, and how."""

    config_format: Literal["text", "json"] = Field(
        default="text", description="Form of `vllm_config`: a line, or an object."
    )


class StoreQuery(ModelQuery):
    """The model that an upload is checked against, and whether it replaces another."""

    overwrite: bool = Field(default=False, description=OVERWRITE)


class WaitQuery(Query):
    """How long an answer may wait for its change."""

    wait_s: float = Field(
        default=0.0,
        ge=0,
        le=3600,
        description="Wait at most this many seconds for the change, which continues after.",
    )


class UploadQuery(Query):
    """The format of an uploaded vector, and whether it replaces another."""

    format: VectorFormat | None = Field(
        default=None, description="Of the file; left out: what it looks like."
    )
    overwrite: bool = Field(default=False, description=OVERWRITE)


class ContentQuery(Query):
    """The format of a downloaded vector."""

    format: ContentFormat = Field(
        default="safetensors",
        description="Of the file. The SHA-256 of the safetensors file is the vector's own.",
    )
