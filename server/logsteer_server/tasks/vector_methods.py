"""Methods that find a direction between activations of positive and of negative texts.

Their quality is measured on held-out texts. Axis letters: N pairs, M texts (two a pair), L layers,
D width of an activation, K dimensions that the texts span. All arithmetic is in float64.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logsteer.schemas import LayerQuality, Recommendation, TrainMethod, Validation
from logsteer_server.stores.layer_vectors import LayerVectors, Readout, Vector

Double = npt.NDArray[np.float64]

ROUNDING = 1e-12
"""Dimensions with an eigenvalue below this share of the largest are rounding errors."""
TOLERANCE = 1e-6
"""Tolerance of a regression's gradient; its readout has about as many correct digits."""
LEAST_SHRINKAGE = 1e-6
"""Least shrinkage of a covariance, so that it has an inverse if a dimension does not vary."""


@dataclass(frozen=True, slots=True)
class FoundDirection:
    """One layer's vector [D], and the readout of a projection on it, if the method gives one."""

    vector_D: Double
    readout: Readout | None = None


def find_direction(
    positive_ND: Double,
    negative_ND: Double,
    method: TrainMethod,
    whiten: bool,
    known: "Covariance | None" = None,
) -> FoundDirection:
    """Return the direction that a method finds; zeros if the texts do not differ.

    It is whitened with a `known` covariance, or with that of the texts if requested.
    """
    covariance = known
    if known is None and (whiten or method == "lda"):
        covariance = Covariance.within(positive_ND, negative_ND)
    if method == "pca":
        return FoundDirection(find_principal_direction(positive_ND - negative_ND, covariance))
    if method == "logistic":
        return find_boundary_normal(positive_ND, negative_ND, covariance)
    if covariance is not None:
        return find_discriminant(positive_ND, negative_ND, covariance)
    return FoundDirection(positive_ND.mean(0) - negative_ND.mean(0))


@dataclass(frozen=True, slots=True)
class Covariance:
    """A covariance: K principal axes, their variances, and the variance of all others, `floor`."""

    basis_KD: Double
    values_K: Double
    floor: float

    @classmethod
    def within(cls, positive_ND: Double, negative_ND: Double) -> "Covariance":
        """Return texts' covariance about their side's mean, shrunk towards a multiple of I.

        (1 - a) S + a m I with m the mean of S's diagonal, and the share a that Ledoit and Wolf
        derive (2004, "A well-conditioned estimator for large-dimensional covariance matrices",
        section 3.2). If the texts determine only the means, as with one pair, it is I.
        """
        rows_MD = np.concatenate(
            [positive_ND - positive_ND.mean(0), negative_ND - negative_ND.mean(0)]
        )
        count, width = rows_MD.shape
        basis_KD, squares_K = find_span(rows_MD)
        average = float(squares_K.sum()) / (count * width)
        shrinkage = find_shrinkage(rows_MD, squares_K, average)
        floor = shrinkage * average or 1.0
        return cls(basis_KD, floor + (1 - shrinkage) * squares_K / count, floor)

    @classmethod
    def of_matrix(cls, covariance_DD: Double) -> "Covariance":
        """Return a known covariance, shrunk by LEAST_SHRINKAGE so that it has an inverse."""
        values_D, found_DD = np.linalg.eigh(covariance_DD)
        floor = LEAST_SHRINKAGE * float(values_D.mean()) or 1.0
        return cls(found_DD.T, np.maximum(values_D, 0) + floor, floor)

    def apply(self, rows_ND: Double, power: float) -> Double:
        """Return rows times a power of the covariance: [.., D]."""
        # Beyond the dimensions that the texts span the covariance is a multiple of I.
        rest = self.floor**power
        own_NK = (rows_ND @ self.basis_KD.T) * (self.values_K**power - rest)
        applied: Double = rest * rows_ND + own_NK @ self.basis_KD
        return applied


def find_shrinkage(rows_MD: Double, squares_K: Double, average: float) -> float:
    """Return Ledoit and Wolf's share: see `Covariance.within`."""
    if not average:
        return 1.0
    count, width = rows_MD.shape
    total = float((squares_K**2).sum()) / count**2
    spread = total / width - average**2
    fourth = float(((rows_MD**2).sum(1) ** 2).sum())
    error = (fourth / count - total) / (count * width)
    share = min(error / spread, 1.0) if spread > 0 else 1.0
    return max(share, LEAST_SHRINKAGE)


def find_span(rows_MD: Double) -> tuple[Double, Double]:
    """Return the rows' principal axes, orthonormal [K, D], and the sums of squares along them [K].

    It uses the Gram matrix of rows or of dimensions, whichever is smaller.
    """
    is_wide = len(rows_MD) < rows_MD.shape[1]
    products = rows_MD @ rows_MD.T if is_wide else rows_MD.T @ rows_MD
    squares, found = np.linalg.eigh(products)
    kept = squares > ROUNDING * max(float(squares[-1]), 0.0)
    squares_K, found = squares[kept], found[:, kept]
    if is_wide:
        return (rows_MD.T @ found / np.sqrt(squares_K)).T, squares_K
    return found.T, squares_K


def find_principal_direction(
    differences_ND: Double, covariance: Covariance | None = None
) -> Double:
    """Return the unit vector [D] along which the pairs' differences have the largest mean square.

    It is their first right singular vector: the first principal component about zero, not about
    their mean, which is the signal. repeng's `pca_center` gives the same. Its sign is that of the
    differences' mean. It is 0 if nothing differs. With a covariance C, it uses the differences
    C^-1/2 d; for their component p the result is the direction of C^-1/2 p, so that a projection on
    it reads p.
    """
    if covariance is not None:
        differences_ND = covariance.apply(differences_ND, -0.5)
    norm = np.linalg.norm(differences_ND)
    if norm == 0:
        return np.zeros(differences_ND.shape[1])
    from scipy.linalg import eigh

    scaled_ND = differences_ND / norm
    num_pairs, width = scaled_ND.shape
    # The Gram matrices of pairs and of dimensions have the same largest eigenvalue: use the smaller
    # one, and compute one eigenvector.
    is_wide = num_pairs <= width
    products = scaled_ND @ scaled_ND.T if is_wide else scaled_ND.T @ scaled_ND
    last = len(products) - 1
    found = eigh(products, subset_by_index=(last, last))[1][:, 0]
    direction_D = scaled_ND.T @ found if is_wide else found
    sign = -1.0 if (differences_ND @ direction_D).sum() < 0 else 1.0
    if covariance is not None:
        direction_D = covariance.apply(direction_D, -0.5)
    direction: Double = sign * direction_D / np.linalg.norm(direction_D)
    return direction


def find_boundary_normal(
    positive_ND: Double, negative_ND: Double, covariance: Covariance | None = None
) -> FoundDirection:
    """Return the normal [D] of a logistic regression's boundary, as long as the means are apart.

    The activations are centred and divided by one number, the root mean square s of what is left,
    so that the penalty (L2, C = 1) means the same for every model and no direction is favoured;
    with a covariance C they are multiplied by C^-1/2 first. With u the unit normal and m the
    difference of the means, the result is (m . u) u. Its readout gives the regression's probability
    of "positive" for activations x as they are: with weights w, intercept b and centre k that of
    w . (x - k) / s + b = (|w| / s) (x . u) + b - w . k / s.
    """
    from sklearn.linear_model import LogisticRegression

    both_MD = np.concatenate([positive_ND, negative_ND])
    centre_D = both_MD.mean(0)
    centred_MD = both_MD - centre_D
    if covariance is not None:
        centred_MD = covariance.apply(centred_MD, -0.5)
    spread = np.sqrt((centred_MD**2).mean())
    if spread == 0:
        return FoundDirection(np.zeros(both_MD.shape[1]))
    labels_M = np.repeat([1, 0], len(positive_ND))
    rows = centred_MD / spread
    basis_KD = None
    if len(rows) < rows.shape[1]:  # the penalty leaves no weight outside what the rows span
        basis_KD, _ = find_span(rows)
        rows = rows @ basis_KD.T
    model = LogisticRegression(tol=TOLERANCE, max_iter=1000).fit(rows, labels_M)
    weights_D = model.coef_[0] if basis_KD is None else model.coef_[0] @ basis_KD
    weights_D = weights_D / spread
    if covariance is not None:
        weights_D = covariance.apply(weights_D, -0.5)
    bias = float(model.intercept_[0] - weights_D @ centre_D)
    return _lengthen(weights_D, bias, positive_ND.mean(0) - negative_ND.mean(0))


def find_discriminant(
    positive_ND: Double, negative_ND: Double, covariance: Covariance
) -> FoundDirection:
    """Return the direction of Fisher's linear discriminant, as long as the means are apart.

    With C the covariance, m the difference of the means and k their middle, the weights are
    w = C^-1 m. The readout gives the probability of "positive" that normal distributions with these
    means and this covariance, both sides equally likely, have: that of w . (x - k).
    """
    mean_difference_D = positive_ND.mean(0) - negative_ND.mean(0)
    middle_D = (positive_ND.mean(0) + negative_ND.mean(0)) / 2
    weights_D = covariance.apply(mean_difference_D, -1.0)
    return _lengthen(weights_D, -float(weights_D @ middle_D), mean_difference_D)


def _lengthen(weights_D: Double, bias: float, mean_difference_D: Double) -> FoundDirection:
    """Return the weights' direction, with the length of the means' distance, and its readout."""
    length = float(np.linalg.norm(weights_D))
    normal_D = weights_D / length if length else weights_D
    apart = float(mean_difference_D @ normal_D)
    if not apart:
        return FoundDirection(np.zeros(len(weights_D)))
    # The vector may point against the normal; projections are on the vector.
    return FoundDirection(
        apart * normal_D, Readout("logistic", float(np.copysign(length, apart)), bias)
    )


MAX_LEFT_OUT = 10
"""Up to this many distinct texts, each is held out alone."""
NUM_FOLDS = 5
"""Folds for more texts than that."""
SMALL_CHANGE = 0.1
"""The smallest change with a visible effect on text, as a share of an activation's norm."""
CHANCE = 0.6
"""An AUC up to this may be chance."""
MIDDLE = 0.3, 0.8
"""Range of depth, as shares of the model's: other layers separate texts by the words read or to be
written."""

Folds = npt.NDArray[np.int64]


def plan_folds(keys: Sequence[Hashable]) -> Folds | None:
    """Return the fold [N] of each pair; pairs with equal keys share a fold.

    Every k-th distinct key has the same fold, so that each fold has all topics. None for a single
    key: without it, there is no training data.
    """
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    if len(numbers) < 2:
        return None
    count = len(numbers) if len(numbers) <= MAX_LEFT_OUT else NUM_FOLDS
    return np.array([numbers[key] % count for key in keys])


def describe_validation(folds_N: Folds | None, num_pairs: int) -> Validation:
    """Describe how the quality of vectors was measured, or why it was not."""
    if folds_N is not None:
        return Validation(folds=int(folds_N.max()) + 1)
    what = "one pair" if num_pairs == 1 else f"the same two continuations in all {num_pairs} pairs"
    reason = f"{what}: none is left to learn from while it is held out; give others"
    return Validation(reason=reason)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Vectors trained without each of F folds, and the projections of the fold's texts on them.

    Projections are on the vector with norm 1, relative to the midpoint of the two sides' means in
    its training texts; otherwise folds could differ by an offset.
    """

    vectors_FD: Double
    positive_N: Double
    negative_N: Double


def hold_out(
    positive_ND: Double,
    negative_ND: Double,
    folds_N: Folds,
    find: Callable[[Double, Double], FoundDirection],
) -> HeldOut:
    """Hold out each fold: see `HeldOut`; `find` trains a vector on the other pairs."""
    positive_N, negative_N = np.zeros(len(positive_ND)), np.zeros(len(positive_ND))
    vectors = []
    for fold in range(int(folds_N.max()) + 1):
        held_N = folds_N == fold
        known_positive, known_negative = positive_ND[~held_N], negative_ND[~held_N]
        vector_D = find(known_positive, known_negative).vector_D
        vectors.append(vector_D)
        unit_D = _scale_to_unit(vector_D)
        middle = float((known_positive.mean(0) + known_negative.mean(0)) @ unit_D) / 2
        positive_N[held_N] = positive_ND[held_N] @ unit_D - middle
        negative_N[held_N] = negative_ND[held_N] @ unit_D - middle
    return HeldOut(np.stack(vectors), positive_N, negative_N)


def judge_layer(positive_ND: Double, negative_ND: Double, held: HeldOut | None) -> LayerQuality:
    """Judge how well one layer separates held-out texts; see `LayerQuality`."""
    lengths = np.linalg.norm(np.concatenate([positive_ND, negative_ND]), axis=1)
    quality = LayerQuality(activation_norm=float(lengths.mean()))
    if held is None:
        return quality
    from sklearn.metrics import roc_auc_score

    positive_N, negative_N = held.positive_N, held.negative_N
    labels_N = np.repeat([1, 0], len(positive_N))
    found = {
        "accuracy": float((positive_N > 0).mean() + (negative_N < 0).mean()) / 2,
        "auc": float(roc_auc_score(labels_N, np.concatenate([positive_N, negative_N]))),
        "pair_accuracy": float((positive_N > negative_N).mean()),
    }
    return quality.model_copy(update=found)


@dataclass(frozen=True, slots=True)
class TrainedVectors:
    """Vectors; by layer, how well they separate held-out texts, and the vectors [F, D] trained
    without each fold, if any.
    """

    vectors: LayerVectors
    quality: Mapping[int, LayerQuality]
    held: Mapping[int, Double]


def choose_middle(
    values: Mapping[int, float], num_layers: int, last: float = MIDDLE[1]
) -> dict[int, float]:
    """Return the values of the layers in MIDDLE of the model's depth, or up to another share."""
    first, end = MIDDLE[0] * (num_layers - 1), last * (num_layers - 1)
    return {layer: value for layer, value in values.items() if first <= layer <= end}


def recommend_by_separation(trained: TrainedVectors, num_layers: int) -> Recommendation | str:
    """Return the middle layer that separates held-out texts best, with a small scale, or why there
    is no recommendation.

    Separation does not imply an effect, so the scale is the smallest with a visible one.
    """
    norms, quality = trained.vectors.norms(), trained.quality
    found = {n: one.auc for n, one in quality.items() if norms[n] and one.auc is not None}
    judged = {layer: auc for layer, auc in found.items() if auc > CHANCE}
    if not judged:
        return (
            "nothing was held out, and no pair's texts begin alike"
            if not found
            else "no layer tells held-out texts apart better than chance would (best AUC "
            f"{max(found.values()):.2f}): give more pairs, another read, or texts that differ in "
            "what the vector is to stand for"
        )
    middle = choose_middle(judged, num_layers) or judged
    layer = max(middle, key=lambda one: middle[one])
    length = quality[layer].activation_norm or 1.0
    return Recommendation(
        layer=layer,
        scale=SMALL_CHANGE * length / norms[layer],
        relative_norm=SMALL_CHANGE,
        recommended_by="separation",
        reason=f"the texts of no pair begin alike, so what the vector does was not measured: layer "
        f"{layer} tells held-out texts apart best (AUC {judged[layer]:.3g}) of those in the middle "
        f"of the model, and the scale changes activations by {SMALL_CHANGE:.0%} of their length; "
        "sweep over others",
    )


def compare_layers(vectors: LayerVectors) -> list[list[float | None]]:
    """Return the cosines of all pairs of layers' vectors; None for a zero vector."""
    units_LD = np.stack([_make_unit(vector_D) for vector_D in vectors.layers.values()])
    filled = [bool(unit_D.any()) for unit_D in units_LD]
    cosines_LL = np.clip(units_LD @ units_LD.T, -1, 1).tolist()
    return [
        [cosine if first and second else None for cosine, second in zip(row, filled, strict=True)]
        for row, first in zip(cosines_LL, filled, strict=True)
    ]


def compare_vectors(one: LayerVectors, other: LayerVectors) -> dict[int, float]:
    """Return the cosine of two vectors at each layer at which both have a nonzero vector."""
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
    """Return the vector with norm 1; a zero vector stays."""
    norm = np.linalg.norm(vector_D)
    return vector_D / norm if norm else vector_D
