"""Training on SmolLM2: what a vector's bare name does to texts that it has never seen."""

from typing import Any

import numpy as np
import pytest

from bench.recommendation import SETS, Unseen
from logsteer import Client
from tests.conftest import Server
from tests.trained import needs_smollm2

pytestmark = [pytest.mark.engine, needs_smollm2]


@pytest.fixture(scope="module")
def trained(real_server: Server) -> Any:
    """The page's vector."""
    pairs = [(f"{b} {p}", f"{b} {n}") for b, p, n in SETS["mood"]["train"]]
    with Client(real_server.url, model="vllm", timeout=1200) as client:
        return client.vectors.train("mood", pairs, read="mean", overwrite=True).vector


def test_a_mean_is_not_the_first_token(real_client: Client, trained: Any) -> None:
    """Whose stream is 100 times as long as any other's from layer 11 to 27."""
    quality = trained.about.quality
    assert all(quality[layer].left_out == 16 for layer in range(11, 28))
    assert all(quality[layer].auc == 1.0 for layer in range(10, 28))
    for engine in ("vllm", "tlens"):
        text = "There was once a little girl named Lily."
        (each,), (mean,) = (
            real_client.activations([text], [16], read=read, model=engine)
            for read in ("each", "mean")
        )
        assert np.allclose(mean.layers[16][0], each.layers[16][1:].mean(0), atol=1e-3)
        assert mean.sinks == {16: [0]}


def test_the_name_alone_steers_unseen_texts_and_leaves_them_whole(
    real_server: Server, trained: Any
) -> None:
    advice = trained.about.recommendation
    assert (advice.recommended_by, advice.pairs) == ("effect", 8)
    assert 9 <= advice.layer <= 24 and 0 < advice.harm <= 0.1 and advice.gain > 3
    with Client(real_server.url, model="vllm", timeout=300) as client:
        unseen = Unseen(client, SETS["mood"]["unseen"])
        gain, harm = unseen.measure("mood")
        assert gain > 2 and harm < 0.2
        assert unseen.write("mood") < 2 * unseen.write(None)
