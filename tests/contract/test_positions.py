"""Vectors of one request at tokens of their own, on both engines, against plain hooks."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logsteer import APIError, Client
from tests.contract.agreement import PER_TOKEN
from tests.contract.conftest import clients_of
from tests.contract.steering import LAYER, HookedReference, choose_tokens

pytestmark = pytest.mark.engine

CONTEXT = "Lily went to the park. She saw a dog"
TARGET = " and she was very happy. They"
DRAW = np.random.default_rng(5)
LOUD, QUIET = (torch.from_numpy(DRAW.normal(size=128).astype(np.float32) * 0.4) for _ in range(2))


client = clients_of("vllm", "tlens")


def write_vector(vector: Tensor, positions: Any, **more: Any) -> dict[str, Any]:
    return {"data": {str(LAYER): vector.tolist()}, "positions": positions, **more}


@pytest.fixture(scope="module")
def ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The context and the target."""
    context = tokenizer(CONTEXT)["input_ids"]
    return context, tokenizer(CONTEXT + TARGET)["input_ids"][len(context) :]


def expect(hooked: HookedReference, ids: tuple[list[int], list[int]], masks: Any) -> np.ndarray:
    """Log-probabilities with each vector added at its own tokens."""

    def change(x_1TD: Tensor) -> Tensor:
        total = x_1TD.clone()
        for vector, mask in masks:
            total[:, mask] += vector
        return total

    return hooked.logprobs(*ids, change)


@pytest.mark.parametrize(
    ("loud", "quiet"),
    [
        ("all", {"last": 3}),
        ("completion", {"every": 2}),
        ({"slices": [[1, 6]]}, {"slices": [[4, 9], [11, 12]]}),
    ],
)
def test_each_vector_acts_at_its_own_tokens(
    client: Client, hooked: HookedReference, ids: Any, loud: Any, quiet: Any
) -> None:
    steering = {"vectors": [write_vector(LOUD, loud), write_vector(QUIET, quiet)]}
    item = {"context_ids": ids[0], "target_ids": [ids[1]]}
    answer = client.logprob([item], steering=steering, cache=False)
    sizes = len(ids[0]) + len(ids[1]), len(ids[0])
    masks = [choose_tokens(where, *sizes) for where in (loud, quiet)]
    expected = expect(hooked, ids, zip((LOUD, QUIET), masks, strict=True))
    found = answer.results[0].targets[0].logprobs
    assert found == pytest.approx(expected.tolist(), abs=PER_TOKEN)
    assert np.abs(expected - hooked.logprobs(*ids)).max() > 0.05
    receipt = answer.steering
    read = [mask[:-1] for mask in masks]  # the last token is not read
    assert [vector.tokens for vector in receipt.vectors] == [int(mask.sum()) for mask in read]
    assert receipt.tokens_steered == int((read[0] | read[1]).sum())


def test_tokens_are_found_by_id_and_after_a_text(
    client: Client, hooked: HookedReference, ids: Any, tokenizer: Any
) -> None:
    context, target = ids
    pieces = [tokenizer.decode([one]) for one in context]
    texts = [tokenizer.decode(context[: n + 1]) for n in range(len(context))]
    after = next(n for n, text in enumerate(texts) if "park." in text)
    chosen = [n for n, piece in enumerate(pieces) if piece.strip() in ("the", "dog")]
    assert chosen
    rules = [
        {"token_ids": [context[n] for n in chosen]},
        {"after": "park."},
    ]
    masks = [torch.zeros(len(context) + len(target), dtype=torch.bool) for _ in rules]
    masks[0][chosen] = True
    masks[1][after + 1 : len(context)] = True
    vectors = [write_vector(v, rule) for v, rule in zip((LOUD, QUIET), rules, strict=True)]
    item = {"context_ids": context, "target_ids": [target]}
    answer = client.logprob([item, item], steering={"vectors": vectors}, cache=False)
    expected = expect(hooked, (context, target), zip((LOUD, QUIET), masks, strict=True))
    for result in answer.results:
        assert result.targets[0].logprobs == pytest.approx(expected.tolist(), abs=PER_TOKEN)


def test_a_sample_is_scored_as_it_was_drawn(client: Client, ids: Any) -> None:
    vectors = [
        write_vector(LOUD, {"every": 3}),
        write_vector(QUIET, {"after": "park."}, op="ablate"),
    ]
    steering = {"vectors": vectors}
    answer = client.steer([CONTEXT], steering, max_tokens=20, n=3, seed=4, ignore_eos=True)
    for completion in answer.results[0].completions:
        item = {"context_ids": ids[0], "target_ids": [completion.token_ids]}
        again = client.logprob([item], steering=steering).results[0].targets[0]
        assert again.logprobs == pytest.approx(completion.logprobs, abs=PER_TOKEN)
    counts = [vector.tokens for vector in answer.steering.vectors]
    assert counts[0] == 3 * len(range(0, 19, 3))


def test_too_many_positions_are_refused_by_name(client: Client) -> None:
    vectors = [write_vector(LOUD, {"last": n}) for n in range(1, 6)]
    with pytest.raises(APIError, match="5 different positions, at most 4"):
        client.logprob(
            [{"context": "Once upon", "targets": [" a time"]}], steering={"vectors": vectors}
        )
    with pytest.raises(APIError, match="give exactly one of slices, token_ids, after"):
        vector = write_vector(LOUD, {"last": 1, "every": 2})
        client.logprob(
            [{"context": "Once upon", "targets": [" a time"]}], steering={"vectors": [vector]}
        )
    with pytest.raises(APIError, match="reaches no token: its positions select none"):
        client.logprob(
            [{"context": "Once upon", "targets": [" a time"]}],
            steering={"vectors": [write_vector(LOUD, {"after": "park"})]},
        )
