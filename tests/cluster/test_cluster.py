"""The service on a real Ray of two logical nodes, against the same on one machine."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from logsteer import Client
from logsteer_server.stores.layer_vectors import LayerVectors
from tests.cluster.local import FAKE, KeyedCluster, ask, lose_amid, needs_ray
from tests.conftest import Server
from tests.contract.lora import write_adapter
from tests.faults.processes import is_alive, wait_for

pytestmark = [pytest.mark.engine, needs_ray]
ASKED = 'logsteer_requests_total{path="/vectors/'
ITEMS = [{"context_ids": [5, 100 + n % 50, n // 50], "target_ids": [[6]]} for n in range(2000)]

ALL_ITEMS = {"items": ITEMS, "cache": False}


@pytest.fixture(scope="module", autouse=True)
def models(cluster: KeyedCluster) -> None:
    cluster.serve(FAKE)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("logprob", {"items": ITEMS[:100], "cache": False}),
        ("logprob", {"items": [{"context": "The sea", "targets": [" is", " was"]}], "top": 3}),
        ("perplexity", {"texts": ["The capital of France is Paris.", "It rains."]}),
        ("generate", {"prompts": ["The sea"], "max_tokens": 5, "seed": 7}),
    ],
)
def test_a_cluster_answers_as_one_machine_does(
    cluster: KeyedCluster, machine: Server, path: str, body: dict[str, Any]
) -> None:
    assert cluster.ask(path, body) == ask(machine.url, path, body)


def test_a_vector_uploaded_through_one_ingress_is_known_to_the_other(cluster: KeyedCluster) -> None:
    with cluster.client() as client:
        sha256 = client.vectors.put("north", LayerVectors({1: np.arange(1, 17)}).content).sha256
    answered = count_asked(cluster)
    for _ in range(10):
        before = answered
        cards = [cluster.request("GET", "/vectors/north") for _ in range(40)]
        assert {card.status_code for card in cards} == {200}
        assert {card.json()["sha256"] for card in cards} == {sha256}
        answered = count_asked(cluster)
        if len(before) == 2 and all(answered.get(own, 0) > count for own, count in before.items()):
            return
    raise AssertionError(f"one ingress never answers: {answered}")


def count_asked(cluster: KeyedCluster) -> dict[float, float]:
    """The requests for vectors that each ingress has had, by when its process started."""
    counts = {}
    for _ in range(40):
        page = cluster.read_page()
        own = sum(n for name, n in page.items() if name.startswith(ASKED))
        counts[page["process_start_time_seconds"]] = own
    return counts


def test_an_adapter_reaches_every_node_that_needs_it(
    cluster: KeyedCluster, machine: Server, tmp_path: Path
) -> None:
    places = [Path(own.environ()["XDG_DATA_HOME"]) for own in cluster.find_actors()]
    assert len(set(places)) == 2, "the replicas run on different nodes"
    seen = []
    for seed in range(2):
        directory = write_adapter(tmp_path / f"lora{seed}", seed=seed)
        for client in (cluster.client(), Client(machine.url, max_retries=0)):
            with client:
                sha256 = client.adapters.put("lora", directory).sha256
        body = {"items": ITEMS[:200], "adapter": "lora", "cache": False}
        seen.append(cluster.ask("logprob", body))
        assert seen[-1] == ask(machine.url, "logprob", body)
        assert seen[-1]["adapter"]["sha256"] == sha256
        for place in places:
            path = place / "logsteer" / "fetched" / f"{sha256}.safetensors"
            assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    assert seen[0]["results"] != seen[1]["results"]


def test_a_job_of_2000_items_outlives_the_actor_that_is_killed(
    cluster: KeyedCluster, machine: Server
) -> None:
    expected = ask(machine.url, "logprob", ALL_ITEMS)
    killed: list[psutil.Process] = []

    def lose() -> None:
        killed.append(cluster.find_actors()[0])
        killed[-1].kill()

    def settle() -> None:
        wait_for(lambda: not is_alive(killed[-1]), 60)
        wait_for(lambda: len(cluster.find_actors()) == 2, 60)
        cluster.wait_for_replicas("fake", 2)

    found = lose_amid(lambda: cluster.ask("logprob", ALL_ITEMS), lose, settle)
    assert found == expected
    # Counted by the ingress whose calls were lost with the actor, not by the other.
    wait_for(lambda: any(own["restarts"] for own in cluster.read_replicas()))
    body = {"items": ITEMS[:50], "cache": False}
    assert cluster.ask("logprob", body)["results"] == expected["results"][:50]
