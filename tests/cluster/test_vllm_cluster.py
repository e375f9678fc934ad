"""The demo model on vLLM, as two actors and as ranks on two nodes: the numbers of one process."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from logsteer import Client
from logsteer_server.stores.layer_vectors import LayerVectors
from tests.cluster.local import (
    BEGUN_S,
    IN_FULL,
    PIPELINE,
    TENSOR,
    WITHOUT_ALL,
    KeyedCluster,
    ask,
    find_engines_below,
    needs_ray,
)
from tests.cluster.test_ranks import OTHER
from tests.conftest import Server, vllm_model
from tests.contract.test_exactness import compare_ranks
from tests.faults.processes import wait_for

pytestmark = [pytest.mark.engine, needs_ray]

if not IN_FULL:  # not even the server that it compares with is started then
    pytest.skip(WITHOUT_ALL, allow_module_level=True)

MODEL = vllm_model("demo") | {"replicas": 2}
TEXTS = ["The capital of France is Paris.", "It rains in the north.", "The sea is blue."]
PROMPT = "The capital of France is"
STEERING = {"vectors": [{"name": "north", "scale": 4.0}]}
FRESH = {"cache": False}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "logprob": (
        "logprob",
        {"items": [{"context": text, "targets": [" is", " was"]} for text in TEXTS], "top": 3}
        | FRESH,
    ),
    "perplexity": ("perplexity", {"texts": TEXTS} | FRESH),
    "generate": ("generate", {"prompts": [PROMPT], "max_tokens": 16, "temperature": 0, "seed": 5}),
    "steer": (
        "steer",
        {
            "prompts": [PROMPT],
            "max_tokens": 16,
            "temperature": 0,
            "seed": 5,
            "steering": STEERING,
        },
    ),
}
TOLERANCE = 1e-5
VARIES = {"usage", "timing", "cached_tokens", "queue_ms", "engine_ms"}


def ask_all(client: Client, call: Callable[[str, dict[str, Any]], Any]) -> dict[str, Any]:
    """The answers to all CALLS of a service that a client puts their vector into."""
    with client:
        hidden = client.model("demo").hidden_size
        vector = np.sin(np.arange(1, hidden + 1, dtype=np.float32))
        client.vectors.put("north", LayerVectors({1: vector}).content)
    return {name: call(path, {"model": "demo"} | body) for name, (path, body) in CALLS.items()}


def compare(own: Any, other: Any, where: str = "") -> int:
    """Make sure that answers are equal, numbers to the tolerance; return how many there are."""
    if isinstance(own, dict):
        assert own.keys() == other.keys(), where
        return sum(
            compare(own[name], other[name], f"{where}.{name}") for name in own if name not in VARIES
        )
    if isinstance(own, list):
        assert len(own) == len(other), where
        pairs = zip(own, other, strict=True)
        return sum(compare(a, b, f"{where}[{n}]") for n, (a, b) in enumerate(pairs))
    if isinstance(own, float):
        assert own == pytest.approx(other, rel=TOLERANCE, abs=TOLERANCE), where
        return 1
    assert own == other, where
    return 0


def test_two_actors_answer_as_one_process_does(cluster: KeyedCluster, vllm_server: Server) -> None:
    expected = ask_all(Client(vllm_server.url), partial(ask, vllm_server.url))
    cluster.serve(MODEL)
    assert len(cluster.read_card("demo")["replicas"]) == 2
    for _ in range(2):  # both actors, and both ingresses
        found = ask_all(cluster.client(), cluster.ask)
        numbers = {name: compare(found[name], expected[name], name) for name in CALLS}
        assert min(numbers.values()) > 3, numbers
    assert found["steer"]["results"] != found["generate"]["results"]


@pytest.fixture(scope="module", params=[TENSOR, PIPELINE], ids=lambda model: str(model["id"]))
def divided(cluster: KeyedCluster, request: pytest.FixtureRequest) -> str:
    """The id of a model with a rank on either node."""
    cluster.serve(request.param)
    wait_for(lambda: len(cluster.find(OTHER)) == 1, 60)  # what was there before is gone
    return str(request.param["id"])


def test_ranks_on_two_nodes_say_what_one_says(
    cluster: KeyedCluster, vllm_client: Client, divided: str
) -> None:
    with cluster.client(divided) as client:
        compare_ranks(vllm_client, client, f"{divided}_parallel", divided)
        text = "Once upon a time there was a little girl who liked to play."
        totals = [found.perplexity([text]).total.sum_logprob for found in (vllm_client, client)]
        print(f"{divided}: perplexity's sums differ by {abs(totals[0] - totals[1]):.2e} nats")
        assert totals[0] == pytest.approx(totals[1], rel=TOLERANCE)


def test_a_rank_that_is_killed_takes_its_replica_along(cluster: KeyedCluster, divided: str) -> None:
    texts = [f"Once upon a time there were {n} girls who liked to play." for n in range(2000)]
    with cluster.client(divided) as client:
        expected = client.perplexity(texts[:20]).total
        (engine,) = find_engines_below(cluster.find(OTHER))
        (rank,) = [own for own in engine.children() if "Worker" in " ".join(own.cmdline())]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.perplexity, texts)
            time.sleep(BEGUN_S)
            rank.kill()
            error = answer.exception(60)
        assert getattr(error, "code", None) == "engine_restarting", repr(error)
        wait_for(lambda: cluster.read_card(divided)["state"] != "ready", 30)
        cluster.wait_for_replicas(divided)
        again = client.perplexity(texts[:20], cache=False).total
    assert again.sum_logprob == pytest.approx(expected.sum_logprob, rel=TOLERANCE)
