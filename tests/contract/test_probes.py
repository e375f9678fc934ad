"""Probes and conditional steering on real engines: what transformers says with hooks that do it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from logsteer import APIError, Client
from logsteer.schemas import ProbeReadings, ScoredTarget, SteerPiece
from tests.contract.conftest import clients_of
from tests.contract.steering import LAYER, WIDTH, HookedReference
from tests.contract.test_steering import draw_ids

pytestmark = pytest.mark.engine

PER_TOKEN = 1e-4
READING = 1e-4
_DRAW = np.random.default_rng(21)
MOOD, TOPIC, PUSH = (_DRAW.normal(size=WIDTH).astype(np.float32) for _ in range(3))


def unit(vector: np.ndarray) -> Tensor:
    return torch.tensor(vector / np.linalg.norm(vector))


client = clients_of("vllm", "compiled", "tlens")


class Reading:
    """What transformers has of tokens: the stream that enters and leaves each layer's hook, scores.

    Of a steered text, `push` is what is added to each token [T, D] at layer `steered_at`.
    """

    def __init__(
        self,
        hooked: HookedReference,
        ids: Sequence[int],
        push: Tensor | None = None,
        steered_at: int = LAYER,
    ) -> None:
        def change(x: Tensor) -> Tensor:
            return x if push is None else x + push

        found = hooked.activations(ids, change=change, changed_at=steered_at)
        self.after = torch.from_numpy(found)
        self.before = self.after.clone()
        if push is not None:
            self.before[steered_at] -= push
        self.logprobs = hooked.logprobs(ids[:1], ids[1:], change, layer=steered_at)

    def project(self, layer: int, vector: np.ndarray, *, after: bool = False) -> np.ndarray:
        stream = self.after if after else self.before
        return np.asarray(stream[layer] @ unit(vector))


def probe(vector: np.ndarray, *layers: int, **more: Any) -> dict[str, Any]:
    return {"data": {str(layers[0]): vector.tolist()}, "layers": list(layers), **more}


def score(client: Client, context: list[int], target: list[int], **more: Any) -> ScoredTarget:
    answer = client.logprob([{"context_ids": context, "target_ids": [target]}], **more)
    return answer.results[0].targets[0]


def near(found: Sequence[float | None] | None, wanted: Any, tolerance: float = READING) -> bool:
    values, wanted = np.array(found, dtype=np.float64), np.asarray(wanted)
    return values.shape == np.shape(wanted) and bool(np.abs(values - wanted).max() < tolerance)


def by_layer(target: Any) -> dict[int, ProbeReadings]:
    return {found.layer: found for found in target.probes}


def test_a_probe_reads_what_a_hook_sees(client: Client, hooked: HookedReference) -> None:
    context, target = draw_ids(40, 1), draw_ids(8, 2)
    seen = Reading(hooked, [*context, *target])
    own = slice(40, 48)
    probes = [
        probe(MOOD, 1, 3),
        probe(TOPIC, 2, read="cosine"),
        probe(TOPIC, 0, context=True),
    ]
    for _ in range(2):  # the second time the prefix cache has the context
        found = by_layer(score(client, context, target, probes=probes))
        assert list(found) == [1, 3, 2, 0]
        for layer in (1, 3):
            assert near(found[layer].before, seen.project(layer, MOOD)[own])
            assert found[layer].after is None
            assert found[layer].context_before is None
        cosines = seen.project(2, TOPIC) / seen.before[2].norm(dim=-1).numpy()
        assert near(found[2].before, cosines[own])
        everything = seen.project(0, TOPIC)
        assert near(found[0].before, everything[own])
        assert near(found[0].context_before, everything[:40])
    alone = score(client, context, target[:1], probes=[probe(MOOD, 1)])
    assert near(by_layer(alone)[1].before, seen.project(1, MOOD)[40:41])


def test_readings_stand_before_and_after_steering(client: Client, hooked: HookedReference) -> None:
    context, target = draw_ids(20, 3), draw_ids(6, 4)

    seen = Reading(hooked, [*context, *target], torch.tensor(0.3 * PUSH), 2)
    steering = {"vectors": [{"data": {"2": PUSH.tolist()}, "scale": 0.3}]}
    target_score = score(
        client, context, target, steering=steering, probes=[probe(MOOD, 1, 2, 3)], cache=False
    )
    assert near(target_score.logprobs, seen.logprobs[19:], PER_TOKEN)
    for layer, found in by_layer(target_score).items():
        assert near(found.before, seen.project(layer, MOOD)[20:26])
        assert near(found.after, seen.project(layer, MOOD, after=True)[20:26])
        moved = np.abs(np.array(found.after) - np.array(found.before)).max()
        assert (moved > 0.05) == (layer == 2)


def push_where(open_T: Tensor, scale: float) -> Tensor:
    """PUSH at these tokens, nothing at the others [T, D]."""
    return open_T[:, None] * scale * torch.tensor(PUSH)


@pytest.mark.parametrize(("read_at", "steered_at"), [(1, 2), (2, 2), (0, 3)])
@pytest.mark.parametrize("read", ["projection", "cosine"])
def test_a_condition_acts_on_the_tokens_that_pass(
    client: Client, hooked: HookedReference, read_at: int, steered_at: int, read: str
) -> None:
    context, target = draw_ids(30, 5), draw_ids(10, 6)
    ids = [*context, *target]
    plain = Reading(hooked, ids)
    readings = torch.tensor(plain.project(read_at, MOOD))
    if read == "cosine":
        readings = readings / plain.before[read_at].norm(dim=-1)
    ordered = readings.sort().values[12:28]
    widest = int(ordered.diff().argmax())
    middle = ordered[widest : widest + 2].mean().item()
    assert (readings - middle).abs().min() > 1e-3 * readings.abs().max()
    passes_T = readings > middle

    seen = Reading(hooked, ids, push_where(passes_T, 0.4), steered_at)
    when = {"probe": probe(MOOD, read_at, read=read), "above": middle}
    vector = {"data": {str(steered_at): PUSH.tolist()}, "scale": 0.4, "when": when}
    items = [{"context_ids": context, "target_ids": [target]}]
    answer = client.logprob(items, steering={"vectors": [vector]}, cache=False)
    found = answer.results[0].targets[0]
    assert near(found.logprobs, seen.logprobs[29:], PER_TOKEN)
    assert np.abs((seen.logprobs - plain.logprobs)[29:]).max() > 0.01
    count = int(passes_T[:39].sum())
    assert answer.steering.vectors[0].passed == count
    assert answer.steering.layers[str(steered_at)].tokens == count
    assert answer.steering.tokens_steered == 39
    below = {"probe": probe(MOOD, read_at, read=read), "below": middle}
    both = {"vectors": [vector, {**vector, "when": below}]}
    all_of_them = Reading(hooked, ids, push_where(torch.ones(40), 0.4), steered_at)
    found = score(client, context, target, steering=both, cache=False)
    assert near(found.logprobs, all_of_them.logprobs[29:], PER_TOKEN)


def test_a_condition_may_ask_for_the_prompt(client: Client, hooked: HookedReference) -> None:
    contexts, target = [draw_ids(24, seed) for seed in (7, 8)], draw_ids(9, 9)
    plain = [Reading(hooked, [*context, *target]) for context in contexts]
    last = [float(read.project(1, MOOD)[23]) for read in plain]
    high, low = (0, 1) if last[0] > last[1] else (1, 0)
    when = {"probe": probe(MOOD, 1), "above": (last[0] + last[1]) / 2, "of": "prompt"}
    vector = {"data": {"3": PUSH.tolist()}, "scale": 0.5, "when": when}
    items = [{"context_ids": context, "target_ids": [target]} for context in contexts]
    answer = client.logprob(items, steering={"vectors": [vector]}, cache=False)
    behind_T = (torch.arange(33) >= 23).float()
    pushed = Reading(hooked, [*contexts[high], *target], push_where(behind_T, 0.5), 3)
    found = [result.targets[0].logprobs for result in answer.results]
    assert near(found[high], pushed.logprobs[23:], PER_TOKEN)
    assert near(found[low], plain[low].logprobs[23:], PER_TOKEN)
    assert np.abs((pushed.logprobs - plain[high].logprobs)[23:]).max() > 0.05
    assert answer.steering.vectors[0].passed == 9  # the prompt's last token, and 8 of the target
    for positions, passed in (("prompt", 1), ("completion", 8), ("predicting", 9)):
        steering = {"vectors": [vector], "positions": positions}
        again = client.logprob(items, steering=steering, cache=False)
        assert again.steering.vectors[0].passed == passed


@pytest.mark.parametrize("of", ["token", "prompt"])
def test_a_conditional_sample_is_scored_with_what_it_was_drawn_with(
    client: Client, hooked: HookedReference, of: str
) -> None:
    prompts = [draw_ids(12, seed) for seed in range(10, 14)]
    last = [float(Reading(hooked, ids).project(1, MOOD)[11]) for ids in prompts]
    when = {"probe": probe(MOOD, 1), "above": float(np.mean(sorted(last)[1:3])), "of": of}
    steering = {"vectors": [{"data": {"2": PUSH.tolist()}, "scale": 0.5, "when": when}]}
    probes = [probe(MOOD, 1, 2), probe(TOPIC, 3, context=True)]
    arguments: dict[str, Any] = {
        "prompt_ids": prompts, "max_tokens": 20, "n": 2, "seed": 8, "ignore_eos": True,
        "probes": probes, "baseline": True,
    }  # fmt: skip
    answer = client.steer(None, steering, **arguments)
    passed = answer.steering.vectors[0].passed
    assert passed
    if of == "prompt":
        assert passed == 2 * 2 * 20
    for prompt, result in zip(prompts, answer.results, strict=True):
        for completion in result.completions:
            again = score(
                client, prompt, completion.token_ids, steering=steering, probes=probes, cache=False
            )
            assert near(completion.logprobs, np.array(again.logprobs), PER_TOKEN)
            drawn, scored = by_layer(completion), by_layer(again)
            for layer in (1, 2, 3):
                assert near(drawn[layer].before, np.array(scored[layer].before))
                assert near(drawn[layer].after, np.array(scored[layer].after))
            assert near(drawn[3].context_before, np.array(scored[3].context_before))
            assert near(drawn[3].context_after, np.array(scored[3].context_after))
        plain = by_layer(result.baseline[0])
        seen = Reading(hooked, [*prompt, *result.baseline[0].token_ids])
        assert near(plain[1].before, seen.project(1, MOOD)[12:32])
        assert plain[1].after is None
    pieces: dict[tuple[int, int], list[float | None]] = {}
    arguments |= {"baseline": False}
    for event in client.steer_events(None, steering, **arguments):
        if isinstance(event, SteerPiece):
            found = by_layer(event)[2]
            pieces.setdefault((event.prompt, event.completion), []).extend(found.after or [])
    for p, result in enumerate(answer.results):
        for c, completion in enumerate(result.completions):
            assert near(pieces[p, c], np.array(by_layer(completion)[2].after))


def test_neighbours_with_other_probes_get_their_own(client: Client) -> None:
    """Requests with different probes, conditions, neither, at the same time: each as alone."""
    when = {"probe": probe(MOOD, 1), "above": 0.0}
    kinds: list[dict[str, Any]] = [
        {},
        {"probes": [probe(MOOD, 1)]},
        {"probes": [probe(TOPIC, layer) for layer in range(4)]},
        {"steering": {"vectors": [{"data": {"2": PUSH.tolist()}, "scale": 0.3}]}},
        {"steering": {"vectors": [{"data": {"2": PUSH.tolist()}, "scale": 0.3, "when": when}]},
         "probes": [probe(PUSH, 2)]},
        {"steering": {"vectors": [{"data": {"3": PUSH.tolist()}, "op": "ablate",
                                   "when": when | {"of": "prompt"}}]}},
    ]  # fmt: skip
    cases = [(draw_ids(10 + k, 30 + k), draw_ids(6, 60 + k), kinds[k % 6]) for k in range(18)]

    def ask(case: tuple[list[int], list[int], dict[str, Any]]) -> ScoredTarget:
        return score(client, case[0], case[1], cache=False, **case[2])

    alone = [ask(case) for case in cases]
    with ThreadPoolExecutor(18) as pool:
        together = list(pool.map(ask, cases))
    for case, one, other in zip(cases, alone, together, strict=True):
        assert near(other.logprobs, np.array(one.logprobs), PER_TOKEN)
        assert (one.probes is not None) == ("probes" in case[2])
        for own, beside in zip(one.probes or [], other.probes or [], strict=True):
            assert near(beside.before, np.array(own.before))


REFUSALS = [
    ({"probes": [probe(MOOD, 9)]}, "used at layer 9, the model's are 0 to"),
    ({"probes": [probe(MOOD[:5], 1)]}, "activations 128"),
    ({"probes": [probe(MOOD, 0, 1, 2, 3)] * 5}, "raise steering_probes"),
    ({"probes": [{"name": "nobody"}]}, "nobody"),
    ({"probes": [probe(MOOD, 1, read="probability")]}, "method logistic"),
    ({"probes": [probe(MOOD, 1, read="activation")]}, "PUT /saes/NAME"),
    ({"probes": [{"data": {"1": [0.0] * WIDTH, "2": MOOD.tolist()}}]}, "nothing to read"),
    ({"probes": [probe(MOOD, 1)], "per_token": False}, "per_token"),
]
CONDITIONS = [
    ({"probe": probe(MOOD, 3), "above": 0.0}, "after it"),
    ({"probe": probe(MOOD, 0, 1), "above": 0.0}, "name one"),
    ({"probe": probe(MOOD, 1)}, "above, below"),
    ({"probe": probe(MOOD, 1), "above": 2.0, "below": 1.0}, "nothing is above"),
    ({"probe": probe(MOOD, 1, read="cosine"), "above": 1.5}, "between -1 and 1"),
    ({"probe": probe(MOOD, 1, read="cosine"), "above": -1.5}, "between -1 and 1"),
    ({"probe": {"name": "nobody"}, "above": 0.0}, "nobody"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSALS, ids=[reason for _, reason in REFUSALS])
def test_what_cannot_be_read_is_refused(
    client: Client, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(APIError, match=reason):
        score(client, [5, 6], [7], **fields)


@pytest.mark.parametrize(("when", "reason"), CONDITIONS, ids=[reason for _, reason in CONDITIONS])
def test_what_cannot_be_waited_for_is_refused(
    client: Client, when: dict[str, Any], reason: str
) -> None:
    vector = {"data": {"2": PUSH.tolist()}, "when": when}
    with pytest.raises(APIError, match=reason):
        score(client, [5, 6], [7], steering={"vectors": [vector]})


PAIRS = [
    {"positive": f"{name} was happy and {verb}.", "negative": f"{name} was sad and {other}."}
    for name, verb, other in (
        ("Tom", "smiled", "cried"), ("Lily", "laughed", "wept"), ("Ben", "played", "hid"),
        ("Mia", "danced", "sat alone"), ("Sam", "sang", "was hurt"),
    )
]  # fmt: skip


def test_a_trained_vector_reads_probabilities(client: Client) -> None:
    card = client.vectors.train("glad", PAIRS, method="logistic", layers=[2]).vector
    readout = card.readouts["2"]
    texts = [text for pair in PAIRS for text in (pair["positive"], pair["negative"])]
    asked = [{"name": "glad"}, {"name": "glad", "read": "probability"}]
    ends = [part.token_ids for part in client.tokenize(texts).results]
    items = [{"context_ids": ids[:-1], "target_ids": [ids[-1:]]} for ids in ends]
    answer = client.logprob(items, probes=asked)
    read = [result.targets[0].probes for result in answer.results]
    projections, probabilities = (
        np.array([found[k].before[0] for found in read if found]) for k in (0, 1)
    )
    wanted = 1 / (1 + np.exp(-(readout.slope * projections + readout.bias)))
    assert np.abs(probabilities - wanted).max() < 1e-4
    assert (probabilities > 0.5).tolist() == [True, False] * len(PAIRS)
    ids = client.tokenize([" ".join(texts)]).results[0].token_ids
    passed = []
    # Each with a scale of its own, so that no prefix is left of the one before.
    for scale, when in (
        (1.0, {"probe": {"name": "glad", "read": "probability"}, "above": 0.5}),
        (1.1, {"probe": {"name": "glad"}, "above": -readout.bias / readout.slope}),
        (1.2, {"probe": {"name": "glad"}, "above": -1e30}),
    ):
        vector = {"data": {"3": PUSH.tolist()}, "scale": scale, "when": when}
        scored = client.logprob(
            [{"context_ids": ids[:-1], "target_ids": [ids[-1:]]}],
            steering={"vectors": [vector]}, cache=False,
        )  # fmt: skip
        passed.append(scored.steering.vectors[0].passed)
    assert passed[0] == passed[1]
    assert 0 < (passed[0] or 0) < (passed[2] or 0) == len(ids) - 1
    for bounds in ({"above": 1.0}, {"above": -0.5}, {"above": 0.0, "below": 1.0}):
        when = {"probe": {"name": "glad", "read": "probability"}, **bounds}
        with pytest.raises(APIError, match="between 0 and 1"):
            score(client, [5], [6], steering={"vectors": [{"name": "glad", "when": when}]})
    with pytest.raises(APIError, match="where it was made for, at layer 2, resid_post"):
        score(client, [5], [6], probes=[{"name": "glad", "layers": [1], "read": "probability"}])
