"""Features of a stored autoencoder as vectors, probes and conditions, on a real engine."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from logsteer import Client
from logsteer.schemas.steering import parse_vector
from tests.contract.steering import WIDTH
from tests.refusals import refused
from tests.server.test_saes import encode, save_sae

pytestmark = pytest.mark.engine

LAYER, SIZE, FEATURE = 2, 300, 123
TEXT, TARGETS = "Once upon a time there was a", [" little girl", " big dog who liked to play"]
CONFIG = {"architecture": "jumprelu", "d_in": WIDTH, "d_sae": SIZE, "metadata": {
    "hook_name": f"blocks.{LAYER}.hook_resid_post"}}  # fmt: skip


def draw() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "W_enc": 0.1 * torch.randn(WIDTH, SIZE), "W_dec": torch.randn(SIZE, WIDTH),
        "b_enc": 0.1 * torch.randn(SIZE), "b_dec": 0.1 * torch.randn(WIDTH),
        "threshold": 0.3 * torch.rand(SIZE),
    }  # fmt: skip


WEIGHTS = draw()


@pytest.fixture(scope="module", params=["vllm", "tlens"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    client = request.getfixturevalue(f"{request.param}_client")
    directory = save_sae(tmp_path_factory.mktemp("saes") / "sae", CONFIG, WEIGHTS)
    (directory / "labels.json").write_text('{"123": "dogs", "7": "cats", "9": "cats"}')
    client.saes.put("features", directory, overwrite=True)
    yield client
    client.saes.delete("features")


def score(client: Client, vector: Any, **options: Any) -> Any:
    return client.score(TEXT, TARGETS, steering={"vectors": [vector]}, **options)


def test_a_feature_steers_by_its_decoder_row(client: Client) -> None:
    row = WEIGHTS["W_dec"][FEATURE].tolist()
    expected = score(client, {"data": {str(LAYER): row}, "scale": 4.0})
    plain = client.score(TEXT, TARGETS)
    for vector in (
        {"sae": "features", "feature": FEATURE, "scale": 4.0},
        {"sae": "features", "feature": "dogs", "scale": 4.0},
        parse_vector("features/123:4"),
    ):
        found = score(client, vector)
        for one, other, unsteered in zip(
            found.targets, expected.targets, plain.targets, strict=True
        ):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert abs(one.logprob - unsteered.logprob) > 0.01
    answer = client.logprob([{"context": TEXT, "targets": TARGETS}], steering="features/123:4")
    (used,) = answer.steering.vectors
    assert (used.name, used.scale) == ("features/123", 4.0)


def test_a_probe_reads_the_activation_that_the_encoder_gives(client: Client) -> None:
    ids = client.tokenize(TEXT + TARGETS[1]).results[0].token_ids
    found = client.activations([{"token_ids": ids}], sae="features", top=SIZE)
    streams = client.activations([{"token_ids": ids}], [LAYER]).layers[LAYER]
    wanted_TF = encode(torch.tensor(streams), WEIGHTS, CONFIG).numpy()
    dense_TF = np.zeros_like(wanted_TF)
    for t, (own, values) in enumerate(
        zip(found.feature_ids, found.feature_activations, strict=True)
    ):
        dense_TF[t, own[own >= 0]] = values[own >= 0]
    assert np.abs(dense_TF - wanted_TF).max() < 1e-4
    feature = int(dense_TF.sum(0).argmax())
    probe = {"sae": "features", "feature": feature, "read": "activation", "context": True}
    item = {"context_ids": ids[:1], "target_ids": [ids[1:]]}
    target = client.logprob([item], probes=[probe]).results[0].targets[0]
    (reading,) = target.probes or []
    assert reading.name == f"features/{feature}"
    read = [*(reading.context_before or []), *reading.before]
    assert read == pytest.approx(dense_TF[: len(read), feature], abs=1e-4)
    assert any(read) and len(read) == len(ids)


@pytest.mark.parametrize(
    ("vector", "code", "reason"),
    [
        ({"sae": "features", "feature": SIZE}, "invalid_request", "no feature 300"),
        ({"sae": "features", "feature": "cats"}, "invalid_request", r"\[7, 9\] have the label"),
        ({"sae": "features", "feature": "birds"}, "invalid_request", "No feature has the label"),
        ({"sae": "other", "feature": 1}, "unknown_sae", "features"),
        ({"sae": "features"}, "invalid_request", "sae and feature go together"),
        ({"sae": "features", "feature": 1, "name": "mood"}, "invalid_request", "exactly one of"),
        ({"sae": "features", "feature": 1, "layers": [99]}, "invalid_vector", "used at layer 99"),
    ],
)
def test_features_that_are_refused(client: Client, vector: Any, code: str, reason: str) -> None:
    with refused(code, reason):
        score(client, vector)
