"""The result cache through HTTP: the same numbers again without the engine, and no others.

The fake takes half a second a step, so an answer within less came from the cache.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from logsteer import Client
from tests.conftest import Server, ServerFactory, fake_model

ITEMS = [
    {"context_ids": [5, 6, 7], "target_ids": [[8, 9], [10]]},
    {"context_ids": [5, 6], "target_ids": [[8, 9, 11]]},
]
OPTIONS: dict[str, Any] = {"columns": ["logprob", "rank", "entropy"], "top": 3}


@pytest.fixture(scope="module")
def slow(start_server: ServerFactory) -> Server:
    return start_server({"models": [fake_model(delay_s=0.5)], "max_pending_tokens": 300})


@pytest.fixture
def client(slow: Server) -> Iterator[Client]:
    with Client(slow.url, max_retries=0) as client:
        yield client


def engine_tokens(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "logsteer_prompt_tokens_total"
    )


def test_a_second_answer_is_the_first_without_the_engine(client: Client, slow: Server) -> None:
    before = engine_tokens(slow)
    first = client.logprob(ITEMS, **OPTIONS)
    between = engine_tokens(slow)
    second = client.logprob(ITEMS, **OPTIONS)
    assert between > before
    assert engine_tokens(slow) == between
    assert (first.usage.cached_results, second.usage.cached_results) == (0, 3)
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    assert (second.timing.queue_ms, second.timing.engine_ms) == (0, 0)
    assert [r.model_dump() for r in first.results] == [r.model_dump() for r in second.results]
