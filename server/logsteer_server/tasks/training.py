"""Steering vectors from activations of contrasting texts, and from other vectors.

Axis letters: N pairs, L layers, D width of an activation. Sums are float64, results float32.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from logsteer.errors import api_error
from logsteer.schemas import (
    BosPolicy,
    ContrastPair,
    LayerQuality,
    TrainMethod,
    TrainRequest,
    VectorAbout,
    VectorCard,
)
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import CaptureJob, CaptureOutput
from logsteer_server.interventions.interventions import Stores
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.settings import Settings
from logsteer_server.stores.layer_vectors import LayerVectors, Readout, Vector, invalid_vector
from logsteer_server.tasks.planning import Planner, Steps
from logsteer_server.tasks.run import Batch, Collector, Task, check_count
from logsteer_server.text.tokenizer import TextCodec

Double = npt.NDArray[np.float64]

NEGLIGIBLE = 1e-6
"""Of a vector's norm: what is left of it below that is rounding."""


@dataclass(frozen=True, slots=True)
class TrainedVectors:
    """Vectors, and how well each layer's tells the texts apart that it was made from."""

    vectors: LayerVectors
    quality: Mapping[int, LayerQuality]


@dataclass(frozen=True, slots=True)
class CaptureSite:
    """Which activations are read: `hook` of some layers (None: all), of the last token or mean."""

    hook: str
    layers: Sequence[int] | None
    read: str


def plan_captures(
    pairs: Sequence[ContrastPair],
    site: CaptureSite,
    bos: BosPolicy,
    codec: TextCodec,
    info: EngineInfo,
    max_bytes: int,
) -> Steps[list[CaptureJob]]:
    """Plan one job for each text: the pairs in order, of each the positive text first.

    Errors: APIError `unsupported_by_engine`, `invalid_vector`, `context_too_long`,
    `invalid_request`, and `payload_too_large` for activations of more than `max_bytes`.
    """
    if site.hook not in info.hooks:
        known = f"it has {', '.join(info.hooks)}" if info.hooks else "it gives none"
        detail = f"This model's engine does not give the activations of {site.hook}: {known}."
        raise api_error("unsupported_by_engine", detail, param="hook")
    layers = tuple(sorted(site.layers)) if site.layers else tuple(range(info.num_layers))
    if layers[-1] >= info.num_layers:
        detail = f"layers has {layers[-1]}; this model's layers are 0 to {info.num_layers - 1}."
        raise api_error("invalid_vector", detail, param="layers")
    texts = [text for pair in pairs for text in (pair.positive, pair.negative)]
    needed = 4 * len(texts) * len(layers) * info.hidden_size
    if needed > max_bytes:
        detail = (
            f"The activations would take {needed} bytes, at most {max_bytes} are held: train on "
            "fewer layers or pairs, or raise max_training_bytes."
        )
        raise api_error("payload_too_large", detail)
    jobs: list[CaptureJob] = []
    num_planned = 0
    for index, ids in enumerate(codec.encode_ids_lazily(texts)):
        tokens = codec.bos_ids(bos, ids) + ids
        place = f"pairs[{index // 2}].{'negative' if index % 2 else 'positive'}"
        if not tokens:
            raise api_error("invalid_request", f"{place} has no token.", param=place)
        if len(tokens) > info.context_length:
            detail = (
                f"{place} has {len(tokens)} tokens; this model's context holds "
                f"{info.context_length}: shorten the text."
            )
            raise api_error("context_too_long", detail, param=place)
        jobs.append(CaptureJob(np.array(tokens, dtype=np.int32), layers, site.hook, site.read))
        num_planned += len(tokens)
        yield num_planned
    return jobs


def train_vectors(
    jobs: Sequence[CaptureJob], outputs: Sequence[CaptureOutput], method: TrainMethod
) -> TrainedVectors:
    """Make vectors of the activations of `plan_captures`' jobs.

    Errors: APIError `invalid_vector` where an activation is not finite, or no layer differs.
    """
    stacked_NLD = np.stack([output.activations_LD for output in outputs])
    if not np.isfinite(stacked_NLD).all():
        raise invalid_vector("the model's activations have numbers that are not finite.")
    layers: dict[int, Vector] = {}
    readouts: dict[int, Readout] = {}
    quality: dict[int, LayerQuality] = {}
    for place, layer in enumerate(jobs[0].layers):
        both_ND = stacked_NLD[:, place].astype(np.float64)
        positive_ND, negative_ND = both_ND[0::2], both_ND[1::2]
        vector_D, readout = _make_vector(positive_ND, negative_ND, method)
        layers[layer] = vector_D.astype(np.float32)
        if readout is not None and layers[layer].any():
            readouts[layer] = readout
        quality[layer] = judge_vector(vector_D, positive_ND, negative_ND)
    if not any(vector_D.any() for vector_D in layers.values()):
        raise invalid_vector(
            "the activations of positive and negative texts do not differ at any layer; read mean "
            "in place of last, or choose texts whose last token differs in what came before."
        )
    return TrainedVectors(LayerVectors(layers, jobs[0].hook, readouts), quality)


def _make_vector(
    positive_ND: Double, negative_ND: Double, method: TrainMethod
) -> tuple[Double, Readout | None]:
    if method == "pca":
        return find_principal_direction(positive_ND - negative_ND), None
    if method == "logistic":
        return find_boundary_normal(positive_ND, negative_ND)
    mean_D: Double = positive_ND.mean(0) - negative_ND.mean(0)
    return mean_D, None


def find_principal_direction(differences_ND: Double) -> Double:
    """Return the unit vector along which the pairs' differences are longest, root mean square: [D].

    It is their first right singular vector: the first principal component about zero, not about
    their mean, which is the very thing that is looked for. repeng's `pca_center` gives the same.
    It points where the differences' mean points. Zeros where nothing differs.
    """
    norm = np.linalg.norm(differences_ND)
    if norm == 0:
        return np.zeros(differences_ND.shape[1])
    from scipy.linalg import eigh

    scaled_ND = differences_ND / norm
    num_pairs, width = scaled_ND.shape
    # The products of pairs and those of dimensions have the same largest eigenvalue: the smaller
    # table will do, and of it the one eigenvector.
    is_wide = num_pairs <= width
    products = scaled_ND @ scaled_ND.T if is_wide else scaled_ND.T @ scaled_ND
    last = len(products) - 1
    found = eigh(products, subset_by_index=(last, last))[1][:, 0]
    direction_D = scaled_ND.T @ found if is_wide else found
    direction_D = direction_D / np.linalg.norm(direction_D)
    sign = -1.0 if (differences_ND @ direction_D).sum() < 0 else 1.0
    direction: Double = sign * direction_D
    return direction


def find_boundary_normal(positive_ND: Double, negative_ND: Double) -> tuple[Double, Readout | None]:
    """Return the normal [D] of a logistic regression's boundary, as long as the means are apart.

    The activations are centred and divided by one number, the root mean square s of what is left,
    so that the penalty (L2, C = 1) means the same for every model and no direction is favoured.
    With u the unit normal and m the difference of the means, the result is (m . u) u. The readout
    gives the regression's probability of "positive" on activations x as they are: with weights w,
    intercept b and centre k it is that of w . (x - k) / s + b = (|w| / s) (x . u) + b - w . k / s.
    """
    from sklearn.linear_model import LogisticRegression

    mean_difference_D = positive_ND.mean(0) - negative_ND.mean(0)
    both_ND = np.concatenate([positive_ND, negative_ND])
    centre_D = both_ND.mean(0)
    centred_ND = both_ND - centre_D
    spread = np.sqrt((centred_ND**2).mean())
    if spread == 0:
        return np.zeros(both_ND.shape[1]), None
    labels_N = np.repeat([1, 0], len(positive_ND))
    model = LogisticRegression(max_iter=1000).fit(centred_ND / spread, labels_N)
    weights_D = model.coef_[0] / spread
    length = np.linalg.norm(weights_D)
    if length == 0:
        return np.zeros(both_ND.shape[1]), None
    normal_D = weights_D / length
    apart = float(mean_difference_D @ normal_D)
    # The vector may point against the normal; projections are on the vector.
    slope = float(np.copysign(length, apart))
    bias = float(model.intercept_[0] - weights_D @ centre_D)
    return apart * normal_D, Readout("logistic", slope, bias)


def judge_vector(vector_D: Double, positive_ND: Double, negative_ND: Double) -> LayerQuality:
    """Judge how well projections onto a vector tell the texts apart; see `LayerQuality`."""
    from sklearn.metrics import roc_auc_score

    norm = np.linalg.norm(vector_D)
    unit_D = vector_D / norm if norm else vector_D
    positive_N, negative_N = positive_ND @ unit_D, negative_ND @ unit_D
    middle = (positive_N.mean() + negative_N.mean()) / 2
    differences_ND = positive_ND - negative_ND
    squared = float((differences_ND**2).sum())
    labels_N = np.repeat([1, 0], len(positive_N))
    right = (positive_N > middle).mean() + (negative_N < middle).mean()
    return LayerQuality(
        accuracy=float(right) / 2,
        auc=float(roc_auc_score(labels_N, np.concatenate([positive_N, negative_N]))),
        pair_accuracy=float((positive_N > negative_N).mean()),
        explained_variance=(
            float(((differences_ND @ unit_D) ** 2).sum()) / squared if squared else 0.0
        ),
    )


def combine_vectors(
    parts: Sequence[tuple[LayerVectors, float]], orthogonal_to: Sequence[LayerVectors] = ()
) -> LayerVectors:
    """Sum vectors by weight, layer by layer, less what the sum shares with `orthogonal_to`.

    A layer that some of the vectors lack sums the others. Readouts are left behind: they are about
    projections on the vectors as they were. Errors: APIError `invalid_vector` where
    they do not fit together, or nothing is left.
    """
    everything = [vectors for vectors, _ in parts] + list(orthogonal_to)
    for what, values in (
        ("hook", sorted({vectors.hook for vectors in everything})),
        ("width", sorted({vectors.width for vectors in everything})),
    ):
        if len(values) > 1:
            shown = ", ".join(map(str, values))
            raise invalid_vector(f"vectors of different {what} cannot be combined: {shown}.")
    layers: dict[int, Vector] = {}
    for layer in sorted({layer for vectors, _ in parts for layer in vectors.layers}):
        terms = [
            weight * vectors.layers[layer].astype(np.float64)
            for vectors, weight in parts
            if layer in vectors.layers
        ]
        sum_D = np.sum(terms, axis=0)
        others = [v.layers[layer] for v in orthogonal_to if layer in v.layers]
        left_D = _take_away(sum_D, others)
        size = max(float(np.linalg.norm(term)) for term in terms)
        if np.linalg.norm(left_D) <= NEGLIGIBLE * size:
            left_D = np.zeros_like(sum_D)
        layers[layer] = left_D.astype(np.float32)
    if not any(vector_D.any() for vector_D in layers.values()):
        raise invalid_vector("nothing is left of this combination: every layer is zero.")
    return LayerVectors(layers, everything[0].hook)


def _take_away(vector_D: Double, others: Sequence[Vector]) -> Double:
    """Return the vector less its projection onto the space that the others span: [D]."""
    if not others:
        return vector_D
    # Least squares, because the others may depend on each other.
    basis_DK = np.stack(others, axis=1).astype(np.float64)
    weights_K = np.linalg.lstsq(basis_DK, vector_D, rcond=None)[0]
    left: Double = vector_D - basis_DK @ weights_K
    return left


class TrainTask(Task):
    """A vector from the activations of contrasting texts, stored under the name given."""

    kind = "train"
    applied_fields = ()

    def __init__(self, body: TrainRequest, models: ModelRegistry, stores: Stores) -> None:
        super().__init__(models.find(body.model))
        self._body = body
        self._stores = stores
        self._card: VectorCard | None = None

    def check_limits(self, settings: Settings) -> None:
        """Bound the number of texts. Errors: APIError `payload_too_large`."""
        check_count("pairs", 2 * len(self._body.pairs), settings.max_items)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Capture all activations in one batch, then train and store."""
        body = self._body
        self._stores.vectors.files.check_writing(body.name)
        codec, info = self.model.require()
        site = CaptureSite(body.hook, body.layers, body.read)
        limit = planner.settings.max_training_bytes
        texts = [text for pair in body.pairs for text in (pair.positive, pair.negative)]
        planner.cover_text(max(map(len, texts)))
        jobs = await planner.advance(plan_captures(body.pairs, site, body.bos, codec, info, limit))
        collector = Collector(jobs)
        yield Batch(jobs, collector.take)
        trained = await planner.call_long(train_vectors, jobs, collector.outputs, body.method)
        about = self._describe(trained, info)
        self._card = await planner.call_long(
            self._stores.vectors.put, body.name, trained.vectors, about
        )

    def _describe(self, trained: TrainedVectors, info: EngineInfo) -> VectorAbout:
        return VectorAbout(
            source="training",
            model=self.model.id,
            weights_digest=info.weights_digest,
            method=self._body.method,
            read=self._body.read,
            pairs=len(self._body.pairs),
            quality={str(layer): quality for layer, quality in trained.quality.items()},
        )

    def report(self) -> dict[str, Any]:
        """Return the card of the stored vector."""
        assert self._card is not None
        return {"vector": self._card.model_dump()}
