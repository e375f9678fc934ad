"""What a trained vector is worth: measured on texts held out, and which layer and scales to try.

Axis letters: N pairs, L layers, D width of an activation, H pairs held out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from logsteer.schemas import LayerQuality, Recommendation, TrainMethod, Validation
from logsteer_server.stores.layer_vectors import LayerVectors, Vector
from logsteer_server.tasks.vector_methods import Double, FoundDirection, find_direction

MAX_LEFT_OUT = 10
"""Up to this many pairs, each is held out alone."""
NUM_FOLDS = 5
"""Of more pairs than that."""
LEAST_CHANGE, LARGEST_CHANGE = 0.1, 0.5
"""Of an activation's length: what scales to try change. Less shows in no text, more in every one;
`bench/vectors.py` measures it."""
CHANCE = 0.6
"""An AUC up to this may well be chance."""


def plan_folds(num_pairs: int) -> list[slice]:
    """Return the pairs that are held out together: every k-th, so that each fold has all topics.

    Empty for one pair, of which nothing is left to learn from.
    """
    if num_pairs < 2:
        return []
    folds = num_pairs if num_pairs <= MAX_LEFT_OUT else NUM_FOLDS
    return [slice(first, None, folds) for first in range(folds)]


def describe_validation(num_pairs: int, quality: Mapping[int, LayerQuality]) -> Validation:
    """Say how the quality of vectors from as many pairs was measured, or why it was not."""
    folds = len(plan_folds(num_pairs))
    if not folds:
        reason = "one pair: none is left to learn from while it is held out; give more"
        return Validation(reason=reason)
    best = max((one.auc or 0.0 for one in quality.values()), default=0.0)
    if best > CHANCE:
        return Validation(folds=folds)
    caution = (
        f"no layer tells held-out texts apart better than chance would (best AUC {best:.2f}): give "
        "more pairs, another read, or texts that differ in what the vector is to stand for"
    )
    return Validation(folds=folds, caution=caution)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Projections of texts on unit vectors made without them, from the middle of those they know.

    The middle is that between the two sides' means; without it, projections of different folds,
    which are on different vectors, could not be told apart from an offset.
    """

    positive_N: Double
    negative_N: Double


def hold_out(
    positive_ND: Double, negative_ND: Double, method: TrainMethod, whiten: bool
) -> HeldOut | None:
    """Project each pair on the direction that the others give; None for one pair."""
    folds = plan_folds(len(positive_ND))
    if not folds:
        return None
    positive_N, negative_N = np.zeros(len(positive_ND)), np.zeros(len(positive_ND))
    for held in folds:
        known_N = np.ones(len(positive_ND), dtype=bool)
        known_N[held] = False
        known_positive, known_negative = positive_ND[known_N], negative_ND[known_N]
        vector_D = find_direction(known_positive, known_negative, method, whiten).vector_D
        unit_D = _scale_to_unit(vector_D)
        middle = float((known_positive.mean(0) + known_negative.mean(0)) @ unit_D) / 2
        positive_N[held] = positive_ND[held] @ unit_D - middle
        negative_N[held] = negative_ND[held] @ unit_D - middle
    return HeldOut(positive_N, negative_N)


def judge_direction(
    direction: FoundDirection,
    positive_ND: Double,
    negative_ND: Double,
    method: TrainMethod,
    whiten: bool,
) -> LayerQuality:
    """Judge what a method makes of one layer's texts; see `LayerQuality`."""
    norm = float(np.linalg.norm(direction.vector_D))
    unit_D = _scale_to_unit(direction.vector_D)
    apart = float((positive_ND - negative_ND).mean(0) @ unit_D)
    lengths = np.linalg.norm(np.concatenate([positive_ND, negative_ND]), axis=1)
    quality = LayerQuality(
        matching_scale=apart / norm if norm else None,
        activation_norm=float(lengths.mean()),
    )
    held = hold_out(positive_ND, negative_ND, method, whiten)
    if held is None:
        return quality
    return quality.model_copy(update=_measure(held, positive_ND - negative_ND))


def _measure(held: HeldOut, differences_ND: Double) -> dict[str, float | None]:
    from sklearn.metrics import roc_auc_score

    positive_N, negative_N = held.positive_N, held.negative_N
    labels_N = np.repeat([1, 0], len(positive_N))
    squared = float((differences_ND**2).sum())
    spread = float(np.sqrt((positive_N.var() + negative_N.var()) / 2))
    apart = float(positive_N.mean() - negative_N.mean())
    return {
        "accuracy": float((positive_N > 0).mean() + (negative_N < 0).mean()) / 2,
        "auc": float(roc_auc_score(labels_N, np.concatenate([positive_N, negative_N]))),
        "pair_accuracy": float((positive_N > negative_N).mean()),
        "explained_variance": (
            float(((positive_N - negative_N) ** 2).sum()) / squared if squared else 0.0
        ),
        "effect_size": apart / spread if spread else None,
    }


def recommend(vectors: LayerVectors, quality: Mapping[int, LayerQuality]) -> Recommendation | None:
    """Return the layer that tells held-out texts apart best, and scales to try there.

    The scales begin where the mean of the negative texts comes to that of the positive ones, and
    end where the change is half as long as an activation; they begin no lower than at a tenth of
    that length, and no higher than at half of the end. None where nothing was held out, or where
    texts are told apart no better than by chance: `describe_validation` says so.
    """
    norms = vectors.norms()
    judged = {
        layer: one
        for layer, one in quality.items()
        if (one.auc or 0.0) > CHANCE and norms.get(layer)
    }
    if not judged:
        return None
    layer = max(judged, key=lambda n: _rank(judged[n]))
    best = judged[layer]
    unit = norms[layer] / (best.activation_norm or 1.0)
    end = LARGEST_CHANGE / unit
    matching = abs(best.matching_scale or 0.0)
    begin = min(max(matching, LEAST_CHANGE / unit), end / 2)
    reason = (
        f"layer {layer} tells texts apart best that were held out: AUC {best.auc:.3g}"
        f"{'' if best.effect_size is None else f', effect size {best.effect_size:.3g}'}; scale "
        f"{matching:.3g} brings the mean of the negative texts to that of the positive ones, scale "
        f"{end:.3g} changes activations by half their length"
    )
    return Recommendation(
        layer=layer,
        scales=[begin, end],
        relative_norms=[begin * unit, end * unit],
        reason=reason,
    )


def _rank(quality: LayerQuality) -> tuple[float, float]:
    """Return AUC and effect size, which is infinite without spread."""
    return quality.auc or 0.0, math.inf if quality.effect_size is None else quality.effect_size


def compare_layers(vectors: LayerVectors) -> list[list[float | None]]:
    """Return the cosine of every layer's vector with every other's; null for one of zeros."""
    units_LD = np.stack([_make_unit(vector_D) for vector_D in vectors.layers.values()])
    filled = [bool(unit_D.any()) for unit_D in units_LD]
    cosines_LL = np.clip(units_LD @ units_LD.T, -1, 1).tolist()
    return [
        [cosine if first and second else None for cosine, second in zip(row, filled, strict=True)]
        for row, first in zip(cosines_LL, filled, strict=True)
    ]


def compare_vectors(one: LayerVectors, other: LayerVectors) -> dict[int, float]:
    """Return the cosine of two vectors at each layer that both have and neither has zeros at."""
    cosines = {}
    for layer, vector_D in one.layers.items():
        other_D = other.layers.get(layer)
        if other_D is not None and vector_D.any() and other_D.any():
            cosine = float(_make_unit(vector_D) @ _make_unit(other_D))
            cosines[layer] = min(max(cosine, -1.0), 1.0)
    return cosines


def _make_unit(vector_D: Vector) -> Double:
    return _scale_to_unit(vector_D.astype(np.float64))


def _scale_to_unit(vector_D: Double) -> Double:
    """Return the vector at length 1; zeros stay."""
    norm = np.linalg.norm(vector_D)
    return vector_D / norm if norm else vector_D
