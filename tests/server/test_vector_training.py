"""Vectors from activations, their quality, and their sums, against definitions and scikit-learn."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import ledoit_wolf
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

from logsteer.errors import APIError
from logsteer.schemas import LayerQuality, Recommendation, TrainMethod, TrainRequest
from logsteer_server.contract.captures import Capture, CapturedActivations
from logsteer_server.contract.jobs import CaptureJob, CaptureOutput
from logsteer_server.stores.layer_vectors import LayerVectors
from logsteer_server.stores.vectors import open_vectors
from logsteer_server.tasks import training
from logsteer_server.tasks.activations import CaptureSite
from logsteer_server.tasks.training import (
    find_similar,
    list_sides,
    plan_pairs,
    read_sides,
    train_vectors,
)
from logsteer_server.tasks.vector_methods import (
    Covariance,
    Double,
    FoundDirection,
    TrainedVectors,
    compare_layers,
    describe_validation,
    find_direction,
    find_principal_direction,
    hold_out,
    judge_layer,
    plan_folds,
    recommend_by_separation,
)
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.tokenizer import TextCodec
from tests.conftest import DEMO_MODEL
from tests.refusals import refused
from tests.server import steering_cases
from tests.server.scripted_model import free
from tests.server.store_cases import ABOUT

WIDTH = 24
LAYERS = (1, 5)
INFO = replace(steering_cases.INFO, context_length=16, num_layers=6)


def draw(num_pairs: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Activations [N, L, D] that differ along the first axis at layer 1, the second at 5."""
    random = np.random.default_rng(seed)
    shared = 3 * random.standard_normal((num_pairs, 2, WIDTH))
    positive = shared + 0.3 * random.standard_normal(shared.shape)
    negative = shared + 0.3 * random.standard_normal(shared.shape)
    for place in (0, 1):
        positive[:, place, place] += 2 + random.standard_normal(num_pairs)
    return positive.astype(np.float32), negative.astype(np.float32)


METHODS: list[TrainMethod] = ["mean_difference", "pca", "logistic", "lda"]


def train(
    positive: np.ndarray, negative: np.ndarray, method: TrainMethod, whiten: bool = False
) -> TrainedVectors:
    job = CaptureJob(np.array([1], dtype=np.int32), capture=Capture(LAYERS))
    both = [row for pair in zip(positive, negative, strict=True) for row in pair]
    outputs = [
        CaptureOutput(activations=CapturedActivations(row_LD[:, None], job.places))
        for row_LD in both
    ]
    folds_N = plan_folds(range(len(positive)))
    return train_vectors([job] * len(both), outputs, folds_N, method, whiten)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_pca_is_the_component_of_the_centred_pairs() -> None:
    """repeng's pca_center: each pair less its middle, in one PCA of scikit-learn's."""
    positive, negative = draw()
    trained = train(positive, negative, "pca")
    for place, layer in enumerate(LAYERS):
        middle = (positive[:, place] + negative[:, place]) / 2
        rows = np.concatenate([positive[:, place] - middle, negative[:, place] - middle])
        component = PCA(n_components=1).fit(rows.astype(float)).components_[0]
        vector = trained.vectors.layers[layer]
        assert abs(cosine(vector, component)) == pytest.approx(1, abs=1e-6)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_axis_and_points_to_the_positives(method: TrainMethod) -> None:
    positive, negative = draw(num_pairs=200)
    trained = train(positive, negative, method)
    turned = train(negative, positive, method)
    for place, layer in enumerate(LAYERS):
        vector = trained.vectors.layers[layer]
        axis = np.eye(WIDTH)[place]
        # The boundary's normal also takes the noise that the axis shares with others into account.
        assert cosine(vector, axis) > (0.85 if method in ("logistic", "lda") else 0.97)
        assert cosine(vector, turned.vectors.layers[layer]) == pytest.approx(-1, abs=1e-3)
        quality = trained.quality[layer]
        assert quality.pair_accuracy is not None and quality.pair_accuracy > 0.9
        assert quality.auc is not None and 0.5 < quality.auc <= 1


def test_a_layer_where_nothing_differs_is_zero_and_of_no_quality() -> None:
    positive, negative = draw()
    negative[:, 1] = positive[:, 1]
    for method in METHODS:
        trained = train(positive, negative, method)  # type: ignore[arg-type]
        assert not trained.vectors.layers[5].any()
        assert 5 not in trained.vectors.readouts
        assert trained.quality[5].auc == 0.5


@pytest.mark.parametrize("method", METHODS)
def test_texts_that_do_not_differ_are_an_error(method: TrainMethod) -> None:
    positive, _ = draw()
    with refused("invalid_vector", "do not differ at any layer"):
        train(positive, positive, method)


@pytest.mark.parametrize("method", METHODS)
def test_one_pair_is_enough(method: TrainMethod) -> None:
    positive, negative = draw(num_pairs=1)
    vectors = train(positive, negative, method).vectors
    difference = (positive - negative)[0, 0]
    assert cosine(vectors.layers[1], difference) == pytest.approx(1, abs=1e-3)


def test_activations_that_are_not_finite_are_an_error() -> None:
    positive, negative = draw()
    positive[0, 0, 0] = np.nan
    with pytest.raises(APIError, match="not finite"):
        train(positive, negative, "pca")


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_the_principal_direction_is_the_singular_vector(rows: int, width: int, seed: int) -> None:
    differences = np.random.default_rng(seed).standard_normal((rows, width))
    direction = find_principal_direction(differences)
    singular = np.linalg.svd(differences)
    values = singular.S
    if len(values) > 1 and values[0] - values[1] < 1e-3:
        return
    assert abs(direction @ singular.Vh[0]) == pytest.approx(1, abs=1e-6)
    assert (differences @ direction).sum() >= 0


PAIR = {"positive": "once upon a time", "negative": "the end"}


def plan(max_bytes: int = 2**30, **fields: Any) -> list[CaptureJob]:
    request = TrainRequest.model_validate({"name": "v", "pairs": [PAIR]} | fields)
    site = CaptureSite.resolve(request.hook, request.layers, request.read, INFO)
    codec = TextCodec.load(str(DEMO_MODEL))
    sides = list_sides(request.pairs)
    sequences = read_sides(sides, request.read, ChatForm(), request.bos, codec)
    return plan_pairs(sequences, len(sides), site, INFO, max_bytes, free)


@pytest.mark.parametrize(
    ("fields", "code", "param", "reason"),
    [
        ({"hook": "attn_out"}, "unsupported_by_engine", "hook", "steers resid_post, not"),
        ({"layers": [2, 6]}, "invalid_request", "layers", "has 6; this model's layers are 0 to 5"),
        ({"max_bytes": 1151}, "payload_too_large", None, "1152 bytes.*at most 1151 are allowed"),
        (
            {"pairs": [PAIR, {"positive": "a", "negative": "word " * 99}]},
            "context_too_long",
            "pairs[1].negative",
            r"pairs\[1\]\.negative has",
        ),
    ],
)
def test_requests_that_cannot_be_met(
    fields: dict[str, Any], code: str, param: str | None, reason: str
) -> None:
    with pytest.raises(APIError, match=reason) as caught:
        plan(**fields)
    assert (caught.value.code, param in (None, caught.value.param)) == (code, True)


SHAPES = [(40, 12), (8, 30)]
"""Pairs and width: more texts than dimensions, and fewer."""


def draw_texts(num_pairs: int, width: int, apart: float = 2.0) -> tuple[Double, Double]:
    """Texts [N, D] of two sides, `apart` along the first axis, longer in some directions."""
    random = np.random.default_rng(num_pairs)
    lengths_D = np.geomspace(0.3, 3, width)
    positive_ND, negative_ND = (
        1 + lengths_D * random.standard_normal((num_pairs, width)) for _ in range(2)
    )
    positive_ND[:, 0] += apart
    return positive_ND, negative_ND


def centre(positive_ND: Double, negative_ND: Double) -> Double:
    return np.concatenate([positive_ND - positive_ND.mean(0), negative_ND - negative_ND.mean(0)])


def power(matrix_DD: Double, exponent: float) -> Double:
    values_D, vectors_DD = np.linalg.eigh(matrix_DD)
    return (vectors_DD * values_D**exponent) @ vectors_DD.T


def probability(found: FoundDirection, x_ND: Double) -> Double:
    projection_N = x_ND @ found.vector_D / np.linalg.norm(found.vector_D)
    return 1 / (1 + np.exp(-(found.readout.slope * projection_N + found.readout.bias)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_covariance_is_ledoit_and_wolf_s(shape: tuple[int, int]) -> None:
    positive_ND, negative_ND = draw_texts(*shape)
    expected_DD, share = ledoit_wolf(centre(positive_ND, negative_ND), assume_centered=True)
    covariance = Covariance.within(positive_ND, negative_ND)
    assert 0 < share < 1
    for exponent in (1.0, -1.0, -0.5):
        given = covariance.apply(np.eye(shape[1]), exponent)
        assert np.allclose(given, power(expected_DD, exponent), atol=1e-8)


@pytest.mark.parametrize("width", [1, 2])
def test_a_covariance_that_is_round_already_is_its_target(width: int) -> None:
    """Nothing is left to measure the share by: 0 of 0."""
    round_ND = np.concatenate([np.eye(width), -np.eye(width)])
    covariance = Covariance.within(round_ND, round_ND)
    assert np.allclose(covariance.apply(np.eye(width), 1.0), np.eye(width) / width)


@pytest.mark.parametrize("shape", SHAPES)
def test_lda_is_fisher_s_direction_and_its_normal_distributions_probability(
    shape: tuple[int, int],
) -> None:
    positive_ND, negative_ND = draw_texts(*shape)
    found = find_direction(positive_ND, negative_ND, "lda", whiten=False)
    covariance_DD, _ = ledoit_wolf(centre(positive_ND, negative_ND), assume_centered=True)
    means = positive_ND.mean(0), negative_ND.mean(0)
    apart_D = means[0] - means[1]
    assert cosine(found.vector_D, np.linalg.solve(covariance_DD, apart_D)) == pytest.approx(1)
    length = np.linalg.norm(found.vector_D)
    assert apart_D @ found.vector_D / length == pytest.approx(length)
    x_ND = np.random.default_rng(7).normal(1, 2, (30, shape[1]))
    distances = [
        np.einsum("nd,nd->n", x_ND - mean_D, np.linalg.solve(covariance_DD, (x_ND - mean_D).T).T)
        for mean_D in means
    ]
    expected = 1 / (1 + np.exp((distances[0] - distances[1]) / 2))
    assert np.ptp(expected) > 0.3
    assert np.allclose(probability(found, x_ND), expected, atol=1e-8)


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_logistic_is_the_regression_on_the_activations_or_on_whitened_ones(
    shape: tuple[int, int], whiten: bool
) -> None:
    positive_ND, negative_ND = draw_texts(*shape)
    both_MD = np.concatenate([positive_ND, negative_ND])
    matrix_DD = np.eye(shape[1])
    if whiten:
        rows_MD = centre(positive_ND, negative_ND)
        matrix_DD = power(ledoit_wolf(rows_MD, assume_centered=True)[0], -0.5)
    measured_MD = (both_MD - both_MD.mean(0)) @ matrix_DD
    spread = measured_MD.std()
    labels_M = np.repeat([1, 0], shape[0])
    model = LogisticRegression(max_iter=1000, tol=1e-8).fit(measured_MD / spread, labels_M)
    x_ND = np.random.default_rng(7).normal(1, 2, (30, shape[1]))
    expected = model.predict_proba((x_ND - both_MD.mean(0)) @ matrix_DD / spread)[:, 1]
    found = find_direction(positive_ND, negative_ND, "logistic", whiten)
    assert found.readout.kind == "logistic"
    if not whiten:
        length = np.linalg.norm(found.vector_D)
        apart_D = positive_ND.mean(0) - negative_ND.mean(0)
        assert apart_D @ found.vector_D / length == pytest.approx(length, rel=1e-4)
    assert np.ptp(expected) > 0.3
    assert np.allclose(probability(found, x_ND), expected, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_pca_of_whitened_differences(shape: tuple[int, int]) -> None:
    positive_ND, negative_ND = draw_texts(*shape)
    rows_MD = centre(positive_ND, negative_ND)
    root_DD = power(ledoit_wolf(rows_MD, assume_centered=True)[0], -0.5)
    differences_ND = positive_ND - negative_ND
    expected_D = root_DD @ find_principal_direction(differences_ND @ root_DD)
    found = find_direction(positive_ND, negative_ND, "pca", whiten=True).vector_D
    assert abs(cosine(found, expected_D)) == pytest.approx(1)
    assert np.linalg.norm(found) == pytest.approx(1)
    assert (differences_ND @ found).sum() > 0
    plain_D = find_direction(positive_ND, negative_ND, "pca", whiten=False).vector_D
    assert abs(cosine(found, plain_D)) < 0.99


@pytest.mark.parametrize("method", METHODS)
def test_a_dimension_that_never_varies_does_no_harm(method: TrainMethod) -> None:
    positive_ND, negative_ND = draw_texts(40, 6)
    positive_ND[:, 3] = negative_ND[:, 3] = 5.0
    whiten = method in ("pca", "logistic")
    found = find_direction(positive_ND, negative_ND, method, whiten).vector_D
    assert np.isfinite(found).all() and found.any()
    assert abs(found[3]) < 1e-6 * np.linalg.norm(found)


@pytest.mark.parametrize("num_pairs", [2, 3, 10, 11, 40])
def test_each_pair_is_held_out_once(num_pairs: int) -> None:
    folds_N = plan_folds(range(num_pairs))
    assert folds_N is not None and len(folds_N) == num_pairs
    assert set(folds_N) == set(range(num_pairs if num_pairs <= 10 else 5))
    assert describe_validation(folds_N, num_pairs).folds == len(set(folds_N))


def test_pairs_of_the_same_texts_are_held_out_together() -> None:
    folds_N = plan_folds(["glad", "gay", "glad", "merry", "gay"])
    assert folds_N is not None and folds_N.tolist() == [0, 1, 0, 2, 1]
    assert plan_folds(["glad"] * 4) is None
    assert "same two continuations in all 4" in (describe_validation(None, 4).reason or "")


def find_by(method: TrainMethod) -> Callable[[Double, Double], FoundDirection]:
    return partial(find_direction, method=method, whiten=False)


def judge(positive_ND: Double, negative_ND: Double, method: TrainMethod) -> LayerQuality:
    folds_N = plan_folds(range(len(positive_ND)))
    if folds_N is None:
        return judge_layer(positive_ND, negative_ND, None)
    return judge_layer(
        positive_ND, negative_ND, hold_out(positive_ND, negative_ND, folds_N, find_by(method))
    )


def test_quality_is_what_it_says() -> None:
    positive_ND, negative_ND = np.array([[3.0], [1.0]]), np.array([[0.0], [2.0]])
    # Of the second pair the direction is -1 and the middle -1.5: the first has -1.5, 1.5 of that.
    # Of the first pair they are 1 and 1.5: the second has -0.5 and 0.5.
    held = hold_out(positive_ND, negative_ND, np.array([0, 1]), find_by("mean_difference"))
    assert (held.positive_N.tolist(), held.negative_N.tolist()) == ([-1.5, -0.5], [1.5, 0.5])
    assert held.vectors_FD.tolist() == [[-1], [3]]
    quality = judge(positive_ND, negative_ND, "mean_difference")
    assert (quality.accuracy, quality.auc, quality.pair_accuracy) == (0, 0, 0)
    assert quality.activation_norm == pytest.approx(1.5)
    tied = judge(*np.array([[[3.0], [1.0], [5.0]], [[0.0], [1.0], [2.0]]]), "mean_difference")
    assert tied.pair_accuracy == pytest.approx(2 / 3), "of the second pair neither is higher"


@pytest.mark.parametrize("method", METHODS)
def test_what_was_learnt_by_heart_counts_for_nothing(method: TrainMethod) -> None:
    """In more dimensions than texts, noise alone separates the texts that it was made from."""
    positive_ND, negative_ND = np.random.default_rng(3).standard_normal((2, 60, 400))
    direction = find_direction(positive_ND, negative_ND, method, False)
    inside = (positive_ND @ direction.vector_D > negative_ND @ direction.vector_D).mean()
    quality = judge(positive_ND, negative_ND, method)
    assert inside > 0.7 or method == "pca"  # noise is longest where it is, not where sides differ
    assert quality.auc is not None and 0.3 < quality.auc < 0.7
    apart_ND, _ = draw_texts(60, 400, apart=12.0)
    found = judge(apart_ND, negative_ND, method)
    assert found.auc is not None and found.auc > 0.9


def test_one_pair_has_no_quality() -> None:
    quality = judge(*draw_texts(1, 12), "mean_difference")
    assert (quality.accuracy, quality.auc, quality.pair_accuracy) == (None, None, None)
    assert quality.activation_norm is not None and quality.activation_norm > 0
    assert "one pair" in (describe_validation(None, 1).reason or "")


def separate(**aucs: float | None) -> Recommendation | str:
    """What is recommended of layers l0, l1, ... of eleven, of vectors and activations of norm 2."""
    vectors = LayerVectors({int(name[1:]): np.array([2.0, 0]) for name in aucs})
    quality = {int(name[1:]): LayerQuality(auc=a, activation_norm=40.0) for name, a in aucs.items()}
    return recommend_by_separation(TrainedVectors(vectors, quality, {}), 11)


def test_without_effects_a_layer_of_the_middle_and_a_small_scale() -> None:
    found = separate(l0=1.0, l4=0.8, l8=0.9, l10=1.0)
    assert isinstance(found, Recommendation)
    assert (found.layer, found.scale, found.relative_norm) == (8, 2.0, 0.1)
    assert found.recommended_by == "separation" and found.gain is None
    assert "was not measured" in found.reason and "AUC 0.9" in found.reason
    only = separate(l9=0.9, l10=0.8)
    assert isinstance(only, Recommendation) and only.layer == 9


def test_what_may_be_chance_is_not_recommended() -> None:
    assert "best AUC 0.60" in str(separate(l4=0.6, l5=0.3))
    assert isinstance(separate(l4=0.61), Recommendation)
    assert "nothing was held out" in str(separate(l4=None))


def test_cosines_between_layers() -> None:
    vectors = LayerVectors({1: np.array([2.0, 0]), 3: np.array([3.0, 4.0]), 4: np.zeros(2)})
    assert compare_layers(vectors) == [
        [1.0, pytest.approx(0.6), None], [pytest.approx(0.6), 1.0, None], [None, None, None],
    ]  # fmt: skip


def test_the_nearest_stored_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_vectors(tmp_path, 2**20)
    for name, vectors in {
        "same": LayerVectors({1: np.array([2.0, 0, 0]), 2: np.array([0, 0, 1.0])}),
        "against": LayerVectors({1: np.array([-9.0, 1, 0])}),
        "near": LayerVectors({1: np.array([9.0, 2, 0])}),
        "across": LayerVectors({1: np.array([0, 1.0, 0])}),
        "own": LayerVectors({1: np.array([1.0, 0, 0])}),
        "narrow": LayerVectors({1: np.array([1.0, 0])}),
        "elsewhere": LayerVectors({7: np.array([1.0, 0, 0])}),
        "attention": LayerVectors({1: np.array([1.0, 0, 0])}, "attn_out"),
    }.items():
        store.put(name, vectors, ABOUT)
    new = LayerVectors({1: np.array([1.0, 0, 0]), 2: np.array([1.0, 0, 0]), 3: np.ones(3)})
    found = find_similar("own", new, store)
    names = {layer: [one.name for one in near] for layer, near in found.layers.items()}
    assert names == {"1": ["same", "against", "near"], "2": ["same"], "3": []}
    assert [one.cosine for one in found.layers["1"]] == pytest.approx(
        [1, -0.9939, 0.9762], abs=1e-4
    )
    assert (found.compared, found.left_out) == (4, 0)
    with monkeypatch.context() as patch:
        patch.setattr(training, "COMPARED_VECTORS", 1)
        found = find_similar("own", new, store)
    assert [one.name for one in found.layers["1"]] == ["across"]  # the latest
    assert (found.compared, found.left_out) == (1, 3)
    path = Path(store.look_up("near")[1].source)
    path.write_bytes(path.read_bytes()[::-1])
    fresh = open_vectors(tmp_path, 2**20)
    assert find_similar("own", new, fresh).left_out == 1
