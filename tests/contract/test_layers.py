"""`/lens` and `/patch` on both engines, against what transformers has in its layers."""

from typing import Any

import numpy as np
import pytest
import torch

from logsteer import Client
from logsteer.errors import APIError, InvalidRequestError
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
    first, second = client.lens(ITEMS, top=3, columns=["rank", "entropy"]).results
    context = tokenizer(CONTEXT)["input_ids"]
    assert [target.target for target in first.targets] == ITEMS[0]["targets"]
    for target in first.targets:
        check_target(target, hooked, context)
    (text,) = second.targets
    assert (text.target, text.flags) == (ITEMS[1], [])
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


TARGETS = [" Paris", " Madrid and Rome"]
PAIR = {
    "clean": {"context": "The capital of France is", "targets": TARGETS},
    "corrupted": {"context": "The capital of Spain is", "targets": TARGETS},
}
SHARED = 4
"""Tokens that both begin with."""
EMPTY = {"context": "The capital of Spain is", "targets": [" Paris", ""]}
LONGER = {"context": "I say: the capital of Spain is", "targets": TARGETS}


class PatchedReference:
    """The demo model in transformers, with activations of one text put into another."""

    def __init__(self, hooked: HookedReference, tokenizer: Any) -> None:
        self._hooked, self._tokenizer = hooked, tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer(text)["input_ids"]

    def capture(self, text: str) -> torch.Tensor:
        """Return what leaves each block [L, T, D]."""
        return torch.from_numpy(self._hooked.activations(self.encode(text)))

    def _logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self._hooked.model(torch.tensor([ids])).logits[0]

    def patch(
        self, source: torch.Tensor, item: dict[str, Any], layers: list[int], moves: list[Any]
    ) -> tuple[list[float], torch.Tensor]:
        """Return the targets' log-probabilities and the next token's, under a patch."""

        def put(layer: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> Any:
                stream_1TD = output[0] if isinstance(output, tuple) else output
                for own, other in moves:
                    stream_1TD[0, own] = source[layer, other]
                return output

            return hook

        hooks = [self._hooked.layers[n].register_forward_hook(put(n)) for n in layers]
        context = self.encode(item["context"])
        sums = []
        for target in item["targets"]:
            ids = self.encode(item["context"] + target)
            log_p_TV = self._logits(ids).log_softmax(-1)
            places = range(len(context), len(ids))
            sums.append(float(sum(log_p_TV[n - 1, ids[n]] for n in places)))
        following = self._logits(context)[-1].log_softmax(-1)
        for hook in hooks:
            hook.remove()
        return sums, following


@pytest.fixture(scope="module")
def patched(hooked: HookedReference, tokenizer: Any) -> PatchedReference:
    return PatchedReference(hooked, tokenizer)


@pytest.mark.parametrize(
    ("metric", "direction", "layers"),
    [
        ("logprob", "denoise", None),
        ("difference", "noise", [[0, 1], [3], [1, 2, 4]]),
        ("kl", "denoise", [[1], [4]]),
        ("kl", "noise", [[2]]),
    ],
)
def test_every_patch_is_that_of_transformers(
    client: Client, patched: PatchedReference, metric: Any, direction: Any, layers: Any
) -> None:
    result = client.patch([PAIR], metric=metric, direction=direction, layers=layers).results[0]
    into, other = ("corrupted", "clean") if direction == "denoise" else ("clean", "corrupted")
    source = patched.capture(PAIR[other]["context"])
    _, clean_V = patched.patch(source, PAIR["clean"], [], [])

    def measure(item: dict[str, Any], layer_set: list[int], moves: list[Any]) -> float:
        sums, following_V = patched.patch(source, item, layer_set, moves)
        if metric == "kl":
            return float((clean_V.exp() * (clean_V - following_V)).sum())
        return sums[0] if metric == "logprob" else sums[0] - sums[1]

    sets = layers or [[layer] for layer in range(LAYERS)]
    assert result.layers == sets
    assert result.positions == list(range(len(patched.encode(PAIR[into]["context"]))))
    assert result.tokens[-1] == " is"
    assert result.clean == pytest.approx(measure(PAIR["clean"], [], []), abs=3 * PER_TOKEN)
    assert result.corrupted == pytest.approx(measure(PAIR["corrupted"], [], []), abs=3 * PER_TOKEN)
    expected = [[measure(PAIR[into], s, [(p, p)]) for p in result.positions] for s in sets]
    assert np.array(result.matrix) == pytest.approx(np.array(expected), abs=3 * PER_TOKEN)
    assert np.ptp(expected) > 1, "no patch changes anything"
    unpatched = result.clean if into == "clean" else result.corrupted
    assert all(row[:SHARED] == [unpatched] * SHARED for row in result.matrix), "it was computed"


def test_contexts_of_unequal_length_are_aligned(client: Client, patched: PatchedReference) -> None:
    clean, corrupted = PAIR["clean"], LONGER
    own, other = (len(patched.encode(item["context"])) for item in (corrupted, clean))
    align = [[other - n, own - n] for n in (1, 2)]
    pair = {"clean": clean, "corrupted": corrupted, "align": align}
    result = client.patch([pair, PAIR], layers=[[1]]).results[0]
    assert result.positions == [own - 2, own - 1]
    source = patched.capture(str(clean["context"]))
    for found, (theirs, place) in zip(result.matrix[0], reversed(align), strict=True):
        sums, _ = patched.patch(source, corrupted, [1], [(place, theirs)])
        assert found == pytest.approx(sums[0], abs=PER_TOKEN)


def test_a_target_that_shares_a_token_with_its_context_is_reported(vllm_client: Client) -> None:
    merged = {"context": "She was hap", "targets": ["py."]}
    pairs = [{**PAIR, "corrupted": PAIR["clean"]}, {"clean": merged, "corrupted": merged}]
    found = vllm_client.patch(pairs, layers=[[1]]).results
    assert [result.boundary for result in found] == ["exact", "merged"]
    assert found[1].tokens == ["<s>", "S", "he", " was", " happy"]


@pytest.mark.parametrize(
    ("pair", "options", "param", "message"),
    [
        ({**PAIR, "corrupted": LONGER}, {}, "pairs[0].align", "say in align which tokens"),
        ({**PAIR, "align": [[0, 99]]}, {}, "pairs[0].align", "have 6 and 6 tokens"),
        ({**PAIR, "corrupted": EMPTY}, {}, "pairs[0].corrupted.targets[1]", "this one is empty"),
        (PAIR, {"positions": [6]}, "positions", "position 6 is not a token of both"),
        (PAIR, {"layers": [[0], [9]]}, "layers", "layers are 0 to 4"),
        (
            {**PAIR, "clean": {"context": "A", "targets": ["b"]}},
            {"metric": "difference"},
            None,
            "needs two targets",
        ),
    ],
)
def test_what_cannot_be_patched_is_refused(
    vllm_client: Client, pair: Any, options: Any, param: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        vllm_client.patch([pair], **options)
    assert param is None or caught.value.param == param
