"""`POST /v1/score` on every engine, in SGLang's shape: against `/logprob` on the same tokens."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from logsteer import Client
from tests.contract.steering import DATA

QUERY = "Once upon a time there was a cat named Tom, and a dog named Rex. " * 3 + "The cat was"
ITEMS = [" very", " happy and", " sad because the dog was"]
LABELS = [40, 99, 300, 7]


@pytest.fixture
def http(client: Client) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=client.base_url, timeout=300) as found:
        yield found


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/score", json={"label_token_ids": LABELS} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["object"] == "scoring"
    return answer


def refuse(http: httpx.Client, **body: Any) -> tuple[str, str]:
    """Param and message of an error in OpenAI's shape."""
    response = http.post("/v1/score", json={"label_token_ids": LABELS} | body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def look_up(client: Client, texts: list[str], **options: Any) -> np.ndarray:
    """Probabilities of LABELS after each text, by `/logprob` on its tokens."""
    ids = [encoded.token_ids for encoded in client.tokenize(texts).results]
    items: Any = [
        {"context_ids": each, "target_ids": [[label] for label in LABELS]} for each in ids
    ]
    results = client.logprob(items, **options).results
    return np.array([[target.prob for target in item.targets] for item in results], np.float64)


@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_the_probabilities_of_logprob(
    client: Client, http: httpx.Client, model: str, item_first: bool
) -> None:
    texts = [item + QUERY if item_first else QUERY + item for item in ITEMS]
    wanted = look_up(client, texts)
    body = {"query": QUERY, "items": ITEMS, "item_first": item_first, "model": model}
    answer = ask(http, **body)
    assert answer["model"] == model
    assert np.array(answer["scores"]) == pytest.approx(wanted, rel=1e-4)
    shares = np.array(ask(http, **body, apply_softmax=True)["scores"])
    assert shares == pytest.approx(wanted / wanted.sum(axis=1, keepdims=True), rel=1e-4)
    assert shares.sum(axis=1) == pytest.approx(1)
    read = sum(len(each.token_ids) for each in client.tokenize(texts).results)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (read, 0)
    assert usage["total_tokens"] == read


def test_ids_are_read_as_they_are_and_one_label_is_enough(
    client: Client, http: httpx.Client, model: str
) -> None:
    query, *items = (
        each.token_ids for each in client.tokenize([QUERY, *ITEMS], bos="never").results
    )
    front = client.tokenize("").results[0].token_ids
    body = {"query": [*front, *query], "items": items, "model": model}
    as_ids = ask(http, **body)["scores"]
    assert len(as_ids) == len(ITEMS)
    one = ask(http, **body, label_token_ids=LABELS[1:2])["scores"]
    assert [row[:1] for row in one] == [[pytest.approx(row[1], rel=1e-4)] for row in as_ids]
    assert [len(row) for row in one] == [1] * len(ITEMS)
    alone = ask(http, query=QUERY, items=ITEMS[0], model=model)["scores"]
    assert np.array(alone) == pytest.approx(look_up(client, [QUERY + ITEMS[0]]), rel=1e-4)
    assert ask(http, query=QUERY, items=[], model=model)["scores"] == []
    first = ask(http, items=[ITEMS[0] + QUERY], model=model)["scores"]
    assert first == [
        pytest.approx(
            ask(http, query=QUERY, items=ITEMS[:1], item_first=True, model=model)["scores"][0],
            rel=1e-4,
        )
    ]


@pytest.mark.engine
def test_the_prefix_of_the_query_is_read_once(vllm_client: Client) -> None:
    query = " ".join(f"A story of cat number {n} and its hat." for n in range(30))
    with httpx.Client(base_url=vllm_client.base_url, timeout=300) as http:
        items = [f" It is {n}" for n in range(8)]
        usage = ask(http, query=query, items=items, model="demo")["usage"]
        shared = len(vllm_client.tokenize(query).results[0].token_ids)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        # Whole blocks of 32 tokens, for every item but the first.
        assert cached >= 7 * (shared - 32)
        other = [f"It is {n} again. " for n in range(8)]
        turned = ask(http, query=query, items=other, item_first=True, model="demo")["usage"]
        assert turned["prompt_tokens_details"]["cached_tokens"] < shared


@pytest.mark.engine
@pytest.mark.parametrize("client", ["vllm", "tlens"], indirect=True)
def test_steering_counts_as_in_logprob(client: Client, http: httpx.Client) -> None:
    steering = {"vectors": [DATA | {"scale": 3.0}]}
    body = {"query": QUERY, "items": ITEMS, "model": "demo"}
    answer = ask(http, **body, steering=steering)
    wanted = look_up(client, [QUERY + item for item in ITEMS], steering=steering)
    assert np.array(answer["scores"]) == pytest.approx(wanted, rel=1e-4)
    assert answer["scores"] != ask(http, **body)["scores"]
    assert answer["steering"]["tokens_steered"] > 0


def test_what_cannot_be_scored_is_refused_by_name(http: httpx.Client, model: str) -> None:
    body = {"query": QUERY, "items": ITEMS, "model": model}
    for change, param, told in (
        ({"label_token_ids": [5, 5]}, "label_token_ids", "twice"),
        ({"label_token_ids": [2**31 - 1]}, "label_token_ids", "vocabulary ends"),
        ({"query": [1, 2]}, "items", "query as text"),
        ({"query": [1], "items": [[2**31 - 1]]}, "items[0]", "There is no token"),
        ({"query": "", "items": [[]]}, "items[0]", "is empty"),
        ({"query": "cat " * 10_000}, "items[0]", "shorten"),
        ({"temperature": 0.5}, "temperature", "leave it out"),
        ({"text_1": "a"}, "text_1", "not vLLM's"),
    ):
        found = refuse(http, **(body | change))
        assert found[0] == param and told in found[1]
    assert len(ask(http, **body, temperature=1, return_token_logprobs=False)["scores"]) == 3
