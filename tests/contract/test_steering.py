"""Steering on real engines: the same as a plain hook, the same for generation and scoring, and
nothing of it in anybody else's answer."""

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import corpus
from logsteer import APIError, Client
from logsteer.schemas import SteerAnswer, SteerPiece, SteerStart
from logsteer_server.stores.layer_vectors import LayerVectors
from tests.conftest import Server
from tests.contract.agreement import check_agreement
from tests.contract.conftest import clients_of
from tests.contract.steering import (
    DATA,
    LAYER,
    OPERATIONS,
    POSITIONS,
    VECTOR,
    HookedReference,
)

pytestmark = pytest.mark.engine

PER_TOKEN = 1e-4
STEERING = {"vectors": [DATA | {"scale": 1.5}]}


client = clients_of("vllm", "compiled", "tlens")


@pytest.fixture
def unsteered_client(compiled_server: Server) -> Any:
    with Client(compiled_server.url, model="unsteered", timeout=300) as found:
        yield found


def draw_ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 1400) for _ in range(count)]


def score(
    client: Client, context: list[int], target: list[int], steering: Any = None
) -> np.ndarray:
    answer = client.logprob(
        [{"context_ids": context, "target_ids": [target]}], steering=steering, cache=False
    )
    return np.array(answer.results[0].targets[0].logprobs)


def test_a_model_without_steering_gives_no_activations(unsteered_client: Client) -> None:
    with pytest.raises(APIError, match="steering_slots above 0"):
        unsteered_client.activations("Once upon a time", [1])


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_a_plain_hook(client: Client, hooked: HookedReference, name: str) -> None:
    """And the receipt says how many tokens it moved, and by how much of their length."""
    vector, change = OPERATIONS[name]
    context, target = draw_ids(12, 1), draw_ids(8, 2)
    moves: list[Tensor] = []

    def act(x: Tensor) -> Tensor:
        moves.append(((change(x) - x).norm(dim=-1) / x.norm(dim=-1))[0, :-1])
        return change(x)

    item = {"context_ids": context, "target_ids": [target]}
    steering = {"vectors": [DATA | vector]}
    answer = client.logprob([item], steering=steering, cache=False)
    wanted = hooked.logprobs(context, target, act)
    found = np.array(answer.results[0].targets[0].logprobs)
    assert np.abs(found - wanted).max() < PER_TOKEN
    assert np.abs(wanted - hooked.logprobs(context, target)).max() > 0.05
    moved = moves[0][moves[0] > 0]  # of the last token nothing is read
    average = moves[0][1:][moves[0][1:] > 0].mean()  # the first is a sink in many models
    site = answer.steering.layers[str(LAYER)]
    assert (site.tokens, site.relative_norm) == (
        len(moved), pytest.approx(float(average), rel=1e-3),
    )  # fmt: skip


def test_what_is_added_is_there_before_operations(client: Client, hooked: HookedReference) -> None:
    context, target = draw_ids(12, 1), draw_ids(8, 2)
    vectors = [DATA | {"scale": 1.5}, DATA | {"op": "ablate"}]
    found = score(client, context, target, {"vectors": vectors})
    wanted = hooked.logprobs(context, target, OPERATIONS["ablate"][1])
    assert np.abs(found - wanted).max() < PER_TOKEN


def test_one_layer_s_direction_is_ablated_at_every_layer(
    client: Client, hooked: HookedReference
) -> None:
    context, target = draw_ids(12, 1), draw_ids(8, 2)
    wanted = hooked.logprobs(context, target, OPERATIONS["ablate"][1], layer=None)
    own = {"data": {"0": VECTOR[::-1].tolist(), str(LAYER): VECTOR.tolist()}}
    vector = own | {"op": "ablate", "from_layer": LAYER}
    assert np.abs(score(client, context, target, {"vectors": [vector]}) - wanted).max() < PER_TOKEN
    client.vectors.put("ablated", LayerVectors({0: VECTOR[::-1], LAYER: VECTOR}).content)
    found = score(client, context, target, f"ablated@{LAYER}:all")
    assert np.abs(found - wanted).max() < PER_TOKEN
    assert np.abs(wanted - hooked.logprobs(context, target)).max() > 0.05


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_each_kind_of_positions_is_a_plain_hook(
    client: Client, hooked: HookedReference, positions: Any
) -> None:
    context, target = draw_ids(12, 3), draw_ids(8, 4)
    found = score(client, context, target, STEERING | {"positions": positions})
    wanted = hooked.logprobs(context, target, OPERATIONS["add"][1], positions)
    assert np.abs(found - wanted).max() < PER_TOKEN
    assert np.abs(wanted - hooked.logprobs(context, target)).max() > 0.01


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_scores_of_a_steered_sample_are_what_it_was_sampled_with(
    client: Client, positions: Any
) -> None:
    steering = STEERING | {"positions": positions}
    prompt = draw_ids(10, 5)
    answer = client.steer(
        None, steering, prompt_ids=[prompt], max_tokens=30, n=3, seed=8, ignore_eos=True
    )
    assert answer.steering.tokens_steered > 0
    for completion in answer.results[0].completions:
        assert completion.num_tokens == 30
        again = score(client, prompt, completion.token_ids, steering)
        assert np.abs(again - np.array(completion.logprobs)).max() < PER_TOKEN


def test_receipts_say_what_was_measured(client: Client, hooked: HookedReference) -> None:
    context, target = draw_ids(12, 6), draw_ids(5, 7)
    item = {"context_ids": context, "target_ids": [target]}
    for positions, tokens in (("all", 16), ("prompt", 12), ("last_prompt", 1)):
        answer = client.logprob([item], steering=STEERING | {"positions": positions}, cache=False)
        receipt = answer.steering
        assert receipt.tokens_steered == tokens
        assert list(receipt.layers) == [str(LAYER)]
        assert receipt.vectors[0].scale == 1.5
    norms: list[float] = []

    def measure(x_1D: Tensor) -> Tensor:
        norms.append(float(x_1D.norm()))
        return x_1D

    hooked.logprobs(context, target, measure, "last_prompt")
    site = receipt.layers[str(LAYER)]
    assert site.tokens == 1
    wanted = 1.5 * float(np.linalg.norm(VECTOR)) / norms[0]
    assert site.relative_norm == pytest.approx(wanted, rel=1e-4)


def test_half_a_batch_steered_leaves_the_other_half_alone(
    client: Client, unsteered_client: Client
) -> None:
    prompts = [draw_ids(10 + n, n) for n in range(8)]
    options: Any = {"max_tokens": 24, "seed": 4, "ignore_eos": True, "temperature": 0.0}
    mixed = client.steer(None, STEERING, prompt_ids=prompts, baseline=True, **options)
    for prompt, result in zip(prompts, mixed.results, strict=True):
        (plain,) = result.baseline or []
        (steered,) = result.completions
        assert steered.logprobs != plain.logprobs
        alone = score(unsteered_client, prompt, plain.token_ids)
        assert np.abs(alone - np.array(plain.logprobs)).max() < PER_TOKEN


def test_the_prefix_cache_leaks_neither_way(client: Client, hooked: HookedReference) -> None:
    change = OPERATIONS["add"][1]
    for order, seed in ((("plain", "steered"), 21), (("steered", "plain"), 22)):
        context, target = draw_ids(300, seed), draw_ids(6, seed + 10)
        for kind in (*order, *order):
            steering = STEERING if kind == "steered" else None
            found = score(client, context, target, steering)
            wanted = hooked.logprobs(context, target, change if kind == "steered" else None)
            assert np.abs(found - wanted).max() < PER_TOKEN, (order, kind)


def test_more_plans_at_once_than_there_are_slots(client: Client) -> None:
    context, target = draw_ids(20, 31), draw_ids(4, 32)
    scales = [0.05 * (n + 1) for n in range(80)]
    item = {"context_ids": context, "target_ids": [target]}
    swept = client.sweep({"vectors": [DATA]}, scales, items=[item])

    def ask(scale: float) -> float:
        return float(score(client, context, target, {"vectors": [DATA | {"scale": scale}]}).sum())

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, scales))
    alone = [ask(scale) for scale in scales[::16]]
    found = [point.items[0].targets[0].logprob for point in swept.points]
    np.testing.assert_allclose(found, together, atol=4 * PER_TOKEN)
    np.testing.assert_allclose(together[::16], alone, atol=4 * PER_TOKEN)
    assert len({round(value, 3) for value in together}) > 60


def test_scale_0_is_unsteered(client: Client) -> None:
    context, target = draw_ids(20, 41), draw_ids(4, 42)
    nothing = {"vectors": [DATA | {"scale": 0.0}]}
    found, wanted = [], []
    for _ in range(50):
        found.append(score(client, context, target, nothing))
        wanted.append(score(client, context, target))
        if np.array_equal(found[-1], wanted[-1]):
            break  # else another file's requests were in the batch of one, and rounded its sums
    np.testing.assert_allclose(found, wanted, atol=PER_TOKEN)
    np.testing.assert_array_equal(found[-1], wanted[-1])


def test_every_endpoint_takes_steering(client: Client) -> None:
    check_agreement(client, steering=STEERING)


def test_streams_give_the_same_as_the_whole(client: Client) -> None:
    options: Any = {"max_tokens": 12, "seed": 3, "n": 2, "baseline": True}
    events = list(client.steer_events("Once upon a time", STEERING, **options))
    whole = client.steer("Once upon a time", STEERING, **options)
    assert isinstance(events[0], SteerStart)
    last = events[-1]
    assert isinstance(last, SteerAnswer)
    assert last.results[0].completions[1].token_ids == whole.results[0].completions[1].token_ids
    assert last.steering.tokens_steered == whole.steering.tokens_steered
    pieces = [event for event in events if isinstance(event, SteerPiece)]
    assert len(pieces) > 8
    for steered, completions in (
        (True, whole.results[0].completions), (False, whole.results[0].baseline or []),
    ):  # fmt: skip
        for index, completion in enumerate(completions):
            own = [p for p in pieces if p.completion == index and p.steered == steered]
            assert "".join(piece.text for piece in own) == completion.text
            assert own[-1].finish_reason == completion.finish_reason


def test_a_vector_trained_by_the_service_moves_the_mood(client: Client) -> None:
    pairs = [
        {
            "positive": corpus.story(random.Random(seed), "happy"),
            "negative": corpus.story(random.Random(seed), "sad"),
        }
        for seed in range(40)
    ]
    card = client.vectors.train("happiness", pairs, method="mean_difference", read="mean").vector
    assert card.layers == [0, 1, 2, 3, 4]
    openings = [f"One day, {name} was very" for name in ("Tom", "Lily", "Mia", "Ben")]
    items = [{"context": text, "targets": [" happy", " sad"]} for text in openings]
    steering = {"vectors": [{"name": "happiness", "layers": [LAYER]}]}
    scales = [-6.0, -3.0, -1.0, 0.0, 1.0, 3.0, 6.0]
    swept = client.sweep(steering, scales, items=items)
    moods = [
        sum((item.targets[0].change or 0) - (item.targets[1].change or 0) for item in point.items)
        for point in swept.points
    ]
    assert moods[3] == pytest.approx(0, abs=1e-4)
    assert all(low + 0.05 < high for low, high in pairwise(moods)), moods
    divergences = [point.items[0].kl for point in swept.points]
    assert divergences.pop(3) == pytest.approx(0, abs=1e-5)
    assert all((kl or 0) > 1e-4 for kl in divergences), divergences
