"""What distillation asks of a teacher: log-probabilities of any tokens, at any temperature."""

from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
import torch
from safetensors.numpy import load

from logsteer import APIError, Client
from tests.contract.agreement import PER_TOKEN
from tests.contract.conftest import clients_of
from tests.contract.steering import LAYER, HookedReference

pytestmark = pytest.mark.engine

client = clients_of("vllm", "tlens")

CONTEXT, TARGET = [1, 40, 7, 300, 12], [9, 55, 1200, 3]
K = 5
OTHERS = [[(17 * (token + place)) % 1500 for place in range(K - 1)] + [token] for token in TARGET]
"""Candidates of each token, itself the last."""


def ask(client: Client, **options: Any) -> Any:
    item = {"context_ids": CONTEXT, "target_ids": [TARGET], "alternatives": [OTHERS]}
    return client.logprob([item], model="demo", **options).results[0].targets[0]


@pytest.fixture(scope="module")
def exact() -> HookedReference:
    """The demo model in transformers, in float64."""
    from tests.conftest import DEMO_MODEL

    return HookedReference(DEMO_MODEL, dtype=torch.float64)


def read_exact(exact: HookedReference, vector: torch.Tensor | None, temperature: float) -> Any:
    """Log-probabilities [T, V] of what follows each token of the context's end and the target."""
    change = None if vector is None else lambda stream: stream + vector
    logits_TV = exact.logits(CONTEXT, TARGET, change)
    return (logits_TV / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("steered", [False, True])
def test_alternatives_are_those_of_transformers_in_float64(
    client: Client, exact: HookedReference, steered: bool, temperature: float
) -> None:
    width = client.model("demo").hidden_size
    vector = [0.3, -0.2] * (width // 2)
    steering = {"vectors": [{"data": {str(LAYER): vector}}]} if steered else None
    rows_TV = read_exact(exact, torch.tensor(vector).double() if steered else None, temperature)
    found = ask(client, top=3, tail=True, steering=steering, policy={"temperature": temperature})
    wanted_TK = rows_TV.gather(-1, torch.tensor(OTHERS))
    top = rows_TV.topk(3)
    largest = np.abs(np.array(found.alternatives.logprobs) - wanted_TK.numpy()).max()
    print(f"steered {steered}, temperature {temperature}: {largest:.1e} nats from float64")
    assert largest < PER_TOKEN
    assert np.array(found.top.logprobs) == pytest.approx(top.values.numpy(), abs=PER_TOKEN)
    for listed, ids_TK in ((found.top, top.indices), (found.alternatives, torch.tensor(OTHERS))):
        rest_T = rows_TV.exp().scatter(-1, ids_TK, 0.0).sum(-1)
        assert listed.tail == pytest.approx(rest_T.tolist(), rel=1e-4)


def test_alternatives_of_every_token_of_single_tokens_and_of_a_lens(client: Client) -> None:
    """One list for all; targets that share a row; the lens' last layer."""
    items = [
        {"context_ids": CONTEXT, "target_ids": [[9], [55], [9, 55]], "alternatives": [4, 9, 55]}
    ]
    by_item = client.logprob(items, model="demo").results[0].targets
    for target in by_item[:2]:
        assert target.alternatives.logprobs == [by_item[0].alternatives.logprobs[0]]
    one, other = by_item[0].alternatives.logprobs[0][1:]
    assert (one, other) == pytest.approx((by_item[0].logprob, by_item[1].logprob), abs=1e-5)
    assert by_item[2].alternatives.logprobs[0] == pytest.approx(
        by_item[0].alternatives.logprobs[0], abs=1e-5
    )
    lens = client.lens(items, model="demo", tail=True).results[0].targets
    for target, read in zip(by_item, lens, strict=True):
        *_, last = read.layers.values()
        assert np.array(last.alternatives.logprobs) == pytest.approx(
            np.array(target.alternatives.logprobs), abs=PER_TOKEN
        )
        assert last.alternatives.tail[0] < 1


def test_arrays_travel_as_they_are(client: Client) -> None:
    """Ids in, ids out: no text, eight bytes a listed token, six in half precision."""
    body: dict[str, Any] = {
        "items": [{"context_ids": CONTEXT, "target_ids": [TARGET], "alternatives": OTHERS[0]}],
        "model": "demo",
        "top": 256,
        "tail": True,
        "detokenize": False,
    }
    url = f"{client.base_url}/logprob"
    plain = httpx.post(url, json=body).json()["results"][0]["targets"][0]
    assert not {"tokens", "offsets"} & plain.keys() and "tokens" not in plain["top"]
    for dtype, size in (("float32", 8), ("float16", 6)):
        file = httpx.post(
            url, json=body | {"dtype": dtype}, headers={"Accept": "application/vnd.safetensors"}
        )
        tensors = load(file.content)
        assert tensors["top_ids"].tolist() == plain["top"]["token_ids"]
        assert str(tensors["top_logprobs"].dtype) == dtype
        assert tensors["top_logprobs"] == pytest.approx(
            np.array(plain["top"]["logprobs"]), rel=1e-3
        )
        assert tensors["alternatives"].shape == (len(TARGET), K)
        assert tensors["alternatives_tail"].shape == tensors["top_tail"].shape == (len(TARGET),)
        packed = httpx.post(
            url, json=body | {"dtype": dtype}, headers={"Accept": "application/msgpack"}
        )
        assert len(packed.content) < size * 256 * len(TARGET) + 3000
    same = client.logprob(body["items"], model="demo", top=256, tail=True, detokenize=False)
    assert same.results[0].targets[0].top.token_ids == plain["top"]["token_ids"]


@pytest.mark.parametrize(
    ("alternatives", "options", "param"),
    [
        ([OTHERS[:-1]], {}, "items[0].alternatives[0]"),
        ([], {}, "items[0].alternatives"),
        ([[*OTHERS[:-1], [1]]], {}, "items[0].alternatives[0]"),
        ([10**6], {}, "items[0].alternatives"),
        ([OTHERS], {"per_token": False}, None),
        (None, {"tail": True}, None),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    client: Client, alternatives: Any, options: Any, param: str | None
) -> None:
    item = {"context_ids": CONTEXT, "target_ids": [TARGET], "alternatives": alternatives}
    with pytest.raises(APIError) as caught:
        client.logprob([item], model="demo", **options)
    assert caught.value.code == "invalid_request"
    assert param is None or caught.value.param == param


def test_items_have_equally_many_alternatives_or_none(client: Client) -> None:
    plain = {"context_ids": CONTEXT, "target_ids": [TARGET]}
    for others in (plain, plain | {"alternatives": [1, 2]}):
        with pytest.raises(APIError, match="equally many"):
            client.logprob([plain | {"alternatives": [OTHERS]}, others], model="demo")


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_prompt_logprobs_are_at_the_requests_own_temperature(
    client: Client, exact: HookedReference, mode: str
) -> None:
    ids = CONTEXT + TARGET
    body = {"model": "demo", "prompt": ids, "max_tokens": 1, "prompt_logprobs": K,
            "temperature": 2.0, "top_p": 0.5, "logprobs_mode": mode}  # fmt: skip
    url = f"{client.base_url}/v1/completions"
    answer = httpx.post(url, json=body, timeout=100)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]["prompt_logprobs"]
    packed = httpx.post(url, json=body, headers={"Accept": "application/msgpack"}, timeout=100)
    assert msgpack.unpackb(packed.content)["choices"][0]["prompt_logprobs"] == found
    rows_TV = read_exact(exact, None, 2.0 if mode == "processed_logprobs" else 1.0)
    assert len(found) == len(ids)
    for entries, row_V, token in zip(found[len(CONTEXT) :], rows_TV, TARGET, strict=True):
        own = entries[str(token)]
        assert own["logprob"] == pytest.approx(float(row_V[token]), abs=PER_TOKEN)
        assert own["rank"] == 1 + int((row_V > row_V[token]).sum())
        best = row_V.topk(K)
        listed = sorted(entries.values(), key=lambda entry: entry["rank"])[:K]
        assert [one["logprob"] for one in listed] == pytest.approx(
            best.values.tolist(), abs=PER_TOKEN
        )
        assert {str(n) for n in best.indices.tolist()} <= entries.keys()
        assert [one["rank"] for one in listed] == list(range(1, K + 1))


@pytest.mark.parametrize(
    "prompts",
    [
        [
            [*CONTEXT, *TARGET],
            [*CONTEXT, *TARGET, 5],
            [*CONTEXT, 8, 9],
            [*CONTEXT, 8, 9],
            [7],
            [7, 8],
        ],
        [CONTEXT, CONTEXT[:3], CONTEXT],
    ],
)
def test_samples_of_one_prompt_have_the_numbers_that_each_has_alone(
    client: Client, prompts: list[list[int]]
) -> None:
    """What samples begin with is scored once, and written for each."""
    body = {"model": "demo", "max_tokens": 1, "prompt_logprobs": 2, "temperature": 2.0}
    url = f"{client.base_url}/v1/completions"

    def ask(prompt: Any) -> list[Any]:
        answer = httpx.post(url, json=body | {"prompt": prompt}, timeout=100).json()
        return [choice["prompt_logprobs"] for choice in answer["choices"]]

    together = ask(prompts)
    for found, prompt in zip(together, prompts, strict=True):
        (alone,) = ask(prompt)
        assert len(found) == len(prompt)
        assert found[0] is alone[0] is None
        for entries, wanted in zip(found[1:], alone[1:], strict=True):
            assert entries.keys() == wanted.keys()
            for number, entry in entries.items():
                assert entry["rank"] == wanted[number]["rank"]
                assert entry["logprob"] == pytest.approx(wanted[number]["logprob"], abs=1e-5)


def test_a_teachers_numbers_are_arrays(client: Client, exact: HookedReference) -> None:
    """Completions of several lengths, their own candidates, at a temperature, padded for torch."""
    lengths = [4, 2]
    sequences = [CONTEXT + TARGET[:count] for count in lengths]
    alternatives = [np.array(OTHERS[:count]) for count in lengths]
    scores = client.teacher(
        sequences, [len(CONTEXT)] * 2, top=3, alternatives=alternatives, temperature=2.0,
        tail=True, model="demo",
    )  # fmt: skip
    rows_TV = read_exact(exact, None, 2.0)
    assert scores.row_starts.tolist() == [0, 4, 6]
    assert scores.token_ids.tolist() == TARGET + TARGET[:2]
    for b, count in enumerate(lengths):
        own_TV, ids_T = rows_TV[:count], torch.tensor(TARGET[:count])
        padded = {
            name: scores.pad(name)[b, :count]
            for name in ("logprobs", "top_logprobs", "alternatives", "alternatives_tail")
        }
        others_TK = torch.tensor(OTHERS[:count])
        wanted = {
            "logprobs": own_TV[torch.arange(count), ids_T],
            "top_logprobs": own_TV.topk(3).values,
            "alternatives": own_TV.gather(-1, others_TK),
            "alternatives_tail": own_TV.exp().scatter(-1, others_TK, 0.0).sum(-1),
        }
        for name, values in wanted.items():
            assert padded[name] == pytest.approx(values.numpy(), abs=PER_TOKEN), name
    assert scores.pad("top_ids", -1)[1, 2:].tolist() == [[-1] * 3] * 2
    assert scores.answer["usage"]["scored_tokens"] == 6
