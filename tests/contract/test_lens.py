"""`/lens` on both engines, against transformers' own final norm and head over hidden states."""

from typing import Any

import pytest
import torch

from logsteer import Client
from logsteer.errors import APIError
from logsteer.schemas import LensTarget
from tests.contract.agreement import PER_TOKEN
from tests.contract.conftest import clients_of
from tests.contract.steering import HookedReference

pytestmark = pytest.mark.engine

LAYERS = 5
CONTEXT = "The capital of France is"
ITEMS: list[Any] = [
    {"context": CONTEXT, "targets": [" Paris", " Madrid", " a big town"]},
    "Once upon a time there was a little girl.",
]
SAME = 1e-5
"""The last layer, read as all are, against `/logprob`, which reads it where it is."""


client = clients_of("vllm", "tlens")


def check_target(found: LensTarget, hooked: HookedReference, context: list[int]) -> None:
    ids = [*context, *found.token_ids]
    streams_LTD = torch.from_numpy(hooked.activations(ids))
    with torch.no_grad():
        normed_LTD = hooked.model.model.norm(streams_LTD)
        log_p_LTV = hooked.model.lm_head(normed_LTD).log_softmax(-1)
    rows = slice(len(context) - 1, len(ids) - 1)
    for layer in range(LAYERS):
        read = found.layers[layer]
        log_p_TV = log_p_LTV[layer, rows]
        expected = log_p_TV[range(len(found.token_ids)), found.token_ids]
        assert read.logprobs == pytest.approx(expected.tolist(), abs=PER_TOKEN)
        assert read.logprob == pytest.approx(float(expected.sum()), abs=PER_TOKEN * len(expected))
        top = log_p_TV.topk(3)
        assert read.top.token_ids == top.indices.tolist()
        entropy = -(log_p_TV.exp() * log_p_TV).sum(-1)
        assert read.columns["entropy"] == pytest.approx(entropy.tolist(), abs=1e-3)


def test_every_layer_is_read_as_transformers_norm_and_head_read_it(
    client: Client, hooked: HookedReference, tokenizer: Any
) -> None:
    answer = client.lens(ITEMS, top=3, columns=["rank", "entropy"])
    first, second = answer.results
    context = tokenizer(CONTEXT)["input_ids"]
    assert [target.target for target in first.targets] == ITEMS[0]["targets"]
    for target in first.targets:
        check_target(target, hooked, context)
    (text,) = second.targets
    assert text.target == ITEMS[1]
    check_target(text, hooked, [tokenizer.bos_token_id])
    spread = [rows.logprob for rows in first.targets[0].layers.values()]
    assert max(spread) - min(spread) > 1, "all layers say the same"


@pytest.mark.parametrize("positions", ["all", "completion", "predicting", "last_prompt"])
def test_the_last_layer_is_what_is_scored_under_the_same_steering(
    client: Client, positions: str
) -> None:
    """A prompt ends where the targets begin, as in `/logprob`; the receipts agree, too."""
    width = client.model("demo").hidden_size
    vector = {"data": {"1": [0.5, -0.5] * (width // 2)}, "scale": 2}
    steering = {"vectors": [vector], "positions": positions}
    items = [{"context": CONTEXT, "targets": [" a big town"]}]
    scored = client.logprob(items, steering=steering)
    read = client.lens(items, layers=[LAYERS - 1], steering=steering)
    target = read.results[0].targets[0]
    assert target.layers[4].logprobs == pytest.approx(
        scored.results[0].targets[0].logprobs, abs=SAME
    )
    assert target.layers[4].ranks == scored.results[0].targets[0].ranks
    assert read.steering.layers.keys() == scored.steering.layers.keys() == {"1"}
    assert read.steering.tokens_steered == scored.steering.tokens_steered


@pytest.mark.parametrize(
    ("items", "options", "param", "message"),
    [
        (ITEMS, {"layers": [0, 9]}, "layers", "layers are 0 to 4"),
        (["word " * 40] * 100, {}, "items", "tokens x 5 layers are"),
        ([""], {}, "items[0].targets[0]", "this one is empty"),
        (ITEMS, {"layers": [1, 1]}, None, "name each once"),
    ],
)
def test_what_cannot_be_read_is_refused(
    vllm_client: Client, items: Any, options: Any, param: str | None, message: str
) -> None:
    with pytest.raises(APIError, match=message) as caught:
        vllm_client.lens(items, **options)
    assert param is None or caught.value.param == param
