"""Vectors from activations, against their definitions and scikit-learn; and their combinations."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from logsteer.errors import APIError
from logsteer.schemas import TrainMethod, TrainRequest
from logsteer_server.contract.jobs import CaptureJob, CaptureOutput
from logsteer_server.stores.layer_vectors import LayerVectors
from logsteer_server.tasks.activations import CaptureSite
from logsteer_server.tasks.training import (
    TrainedVectors,
    check_parts,
    combine_layer,
    list_sides,
    plan_pairs,
    read_sides,
    train_vectors,
)
from logsteer_server.tasks.vector_methods import find_principal_direction
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.tokenizer import TextCodec
from tests.conftest import DEMO_MODEL
from tests.server import steering_cases
from tests.server.plan_steps import finish

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


METHODS = ["mean_difference", "pca", "logistic", "lda"]


def train(
    positive: np.ndarray, negative: np.ndarray, method: TrainMethod, whiten: bool = False
) -> TrainedVectors:
    job = CaptureJob(np.array([1], dtype=np.int32), LAYERS)
    both = [row for pair in zip(positive, negative, strict=True) for row in pair]
    outputs = [CaptureOutput(row_LD[:, None]) for row_LD in both]
    return train_vectors([job] * len(both), outputs, method, whiten)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_mean_difference_is_that() -> None:
    positive, negative = draw()
    trained = train(positive, negative, "mean_difference")
    for place, layer in enumerate(LAYERS):
        expected = (positive[:, place].astype(float) - negative[:, place]).mean(0)
        assert np.allclose(trained.vectors.layers[layer], expected, atol=1e-6)


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
        assert trained.quality[5].explained_variance == 0


@pytest.mark.parametrize("method", METHODS)
def test_texts_that_do_not_differ_are_an_error(method: TrainMethod) -> None:
    positive, _ = draw()
    with pytest.raises(APIError, match="do not differ at any layer") as caught:
        train(positive, positive, method)
    assert caught.value.code == "invalid_vector"


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
    site = CaptureSite(request.hook, request.layers, request.read)
    codec = TextCodec.load(str(DEMO_MODEL))
    sides = list_sides(request.pairs)
    sequences = read_sides(sides, request.read, ChatForm(), request.bos, codec)
    return finish(plan_pairs(sequences, len(sides), site, INFO, max_bytes))


def test_a_job_for_each_text() -> None:
    codec = TextCodec.load(str(DEMO_MODEL))
    jobs = plan(layers=[4, 2], read="mean", bos="never")
    texts = [codec.decode(job.tokens.tolist()) for job in jobs]
    assert [text.strip() for text in texts] == ["once upon a time", "the end"]
    assert {(job.layers, job.hook, job.read) for job in jobs} == {((2, 4), "resid_post", "mean")}
    every = plan(max_bytes=2 * 6 * WIDTH * 4)  # two texts, all layers, float32
    assert (every[0].layers, every[0].tokens[0]) == (tuple(range(6)), codec.bos_id)


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


def test_a_layer_is_summed_in_place() -> None:
    one, other = np.array([3, 4], np.float32), np.array([10, 0], np.float32)
    assert combine_layer(iter([(one, 2.0), (other, -1.0)])).tolist() == [-4, 8]
    assert one.tolist() == [3, 4]
    assert not combine_layer([(one, 1.0), (one, -1.0)]).any()


def test_a_sum_is_made_orthogonal() -> None:
    one = np.array([1, 2, 3], np.float32)
    away = [np.array(numbers, np.float32) for numbers in ([0, 2, 0], [0, 1, 1e-3], [0, 3, 0])]
    assert np.allclose(combine_layer([(one, 1.0)], away), [1, 0, 0], atol=1e-6)
    assert not combine_layer([(one, 3.0)], [one]).any()  # rounding alone is nothing


def test_combinations_that_make_no_sense_are_refused() -> None:
    one, narrow = LayerVectors({1: np.ones(3)}), LayerVectors({1: np.ones(2)})
    attention = LayerVectors({1: np.ones(3)}, "attn_out")
    check_parts([one, one])
    for parts, reason in (
        ([one, narrow], "different width cannot be combined: 2, 3"),
        ([one, attention], "different hook cannot be combined: attn_out, resid"),
    ):
        with pytest.raises(APIError, match=reason) as caught:
            check_parts(parts)
        assert caught.value.code == "invalid_vector"
