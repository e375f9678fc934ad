"""Two replicas of the demo model on vLLM: the same answers as one, and as many prefix hits."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logsteer import Client
from tests.conftest import Server, vllm_model
from tests.faults.processes import running, wait_for

pytestmark = pytest.mark.engine

CONTEXTS, TARGETS = 24, 4
READY_S = 600.0
"""An engine starts in some 20 s; on a busy machine later."""
WORDS = ["the", "a", "little", "cat", "dog", "saw", "ran", "house", "big", "happy", "sad", "garden"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = [vllm_model("one"), vllm_model("two") | {"replicas": 2}]
    config = {"models": models, "cache_bytes": 0}
    with running(config, tmp_path_factory.mktemp("replicas")) as server:
        server.wait_until_ready()
        with Client(server.url) as client:
            wait_for(lambda: all(n.state == "ready" for n in client.model("two").replicas), READY_S)
        yield server


def write(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def make_items(seed: int) -> list[dict[str, Any]]:
    return [
        {
            "context": write(seed + n, 120),
            "targets": [f" {write(n + t, 3)}" for t in range(TARGETS)],
        }
        for n in range(0, 1000 * CONTEXTS, 1000)
    ]


def list_logprobs(client: Client, model: str, items: list[dict[str, Any]]) -> list[float]:
    answer = client.logprob(items, model=model)
    return [
        value or 0.0
        for result in answer.results
        for target in result.targets
        for value in target.logprobs or []
    ]


def test_two_replicas_say_what_one_says(server: Server) -> None:
    items = make_items(1)
    with Client(server.url) as client:
        one, two = (list_logprobs(client, model, items) for model in ("one", "two"))
        assert len(one) == len(two) > CONTEXTS * TARGETS
        assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-5
        texts = [write(n, 80) for n in range(40)]
        scores = [client.perplexity(texts, model=model).results for model in ("one", "two")]
        for mine, other in zip(*scores, strict=True):
            assert abs(mine.sum_logprob - other.sum_logprob) < 1e-5 * mine.num_scored


def test_as_many_tokens_come_from_prefix_caches_as_with_one(server: Server) -> None:
    """Targets of one context, and then the same contexts with other targets."""
    with Client(server.url) as client:
        for seed in (2, 2):
            first = [{**item, "targets": item["targets"][:2]} for item in make_items(seed)]
            hits = [client.logprob(first, model=m).usage.cached_tokens for m in ("one", "two")]
            assert hits[0] > CONTEXTS * 32
            assert hits[1] >= 0.99 * hits[0]


def test_seeded_generation_does_not_depend_on_the_replica(server: Server) -> None:
    prompts = [write(n, 9) for n in range(12)]
    with Client(server.url) as client:
        found = [
            client.generate(prompts, max_tokens=12, seed=7, model=model).results
            for model in ("one", "two")
        ]
    for one, two in zip(*found, strict=True):
        assert one.completions[0].token_ids == two.completions[0].token_ids


def test_a_vector_steers_on_both(server: Server, tmp_path: Path) -> None:
    """It travels with each job: every item of a call that both have is steered alike."""
    items = make_items(5)
    with Client(server.url) as client:
        data = {"2": [0.3] * int(client.model("one").hidden_size or 0)}
        steering = {"vectors": [{"data": data, "scale": 2.0}]}
        found = []
        for model in ("one", "two"):
            answer = client.logprob(items, model=model, steering=steering)
            assert answer.steering is not None
            found.append([target.logprob for result in answer.results for target in result.targets])
        plain = list_logprobs(client, "two", items)
    assert plain != found[1]
    assert max(abs((a or 0) - (b or 0)) for a, b in zip(*found, strict=True)) < 1e-4


def test_the_selftest_looks_at_each(server: Server) -> None:
    with Client(server.url) as client:
        found = {check.name: check for check in client.selftest("two").checks}
        assert found["replicas"].verdict == "passed"
        assert found["replicas"].reason.endswith("texts at once on 2 replicas")
        alone = {check.name: check for check in client.selftest("one").checks}
        assert alone["replicas"].verdict == "not_run"
