"""Replicas whose ranks are on both logical nodes of the cluster, against the same on one machine.

They are of the fake engine; `test_vllm_cluster.py` has those of vLLM, and `test_rank_faults.py`
what becomes of actors that are killed or hang.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.local import (
    FAKE,
    SPREAD,
    KeyedCluster,
    LocalCluster,
    ask,
    find_engines_below,
    lose_amid,
    needs_ray,
)
from tests.conftest import Server
from tests.faults.processes import wait_for
from tests.faults.test_store_url import put_adapter

pytestmark = [pytest.mark.engine, needs_ray]
OTHER = "ray::Follower"
"""How the title of an actor begins that runs ranks of a replica after its first node."""
ITEMS = [{"context_ids": [5, 100 + n % 50, n // 50], "target_ids": [[6]]} for n in range(2000)]


def find_nodes(cluster: LocalCluster) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """The actors of SPREAD's replicas: of Serve's, and of their other nodes."""
    return cluster.find_actors("spread"), cluster.find(OTHER)


def score(cluster: LocalCluster, items: list[dict[str, Any]], **options: Any) -> Any:
    body = {"model": "spread", "items": items, "cache": False} | options
    return cluster.ask("logprob", body)["results"]


def list_fetched(actors: list[psutil.Process], sha256: str) -> list[Path]:
    """Where the nodes of actors have a content of the shared store, each for itself."""
    homes = sorted({own.environ()["XDG_DATA_HOME"] for own in actors})
    paths = [Path(home) / "logsteer" / "fetched" / f"{sha256}.safetensors" for home in homes]
    found = [path for path in paths if path.exists()]
    assert {hashlib.sha256(path.read_bytes()).hexdigest() for path in found} <= {sha256}
    return found


def check_job(
    cluster: LocalCluster,
    machine: Server,
    lose: Callable[[psutil.Process, psutil.Process], None],
) -> None:
    """Lose a node of a replica amid a job: it is answered, and the replica comes anew as a whole.

    `lose` is given actors of a first node and of another one.
    """
    expected = ask(machine.url, "logprob", {"items": ITEMS})["results"]
    before: set[int] = set()

    def lose_one() -> None:
        firsts, others = find_nodes(cluster)
        before.clear()
        before.update(own.pid for own in firsts + others)
        lose(firsts[0], others[0])

    def is_whole() -> bool:
        firsts, others = find_nodes(cluster)
        new = [sum(own.pid not in before for own in actors) for actors in (firsts, others)]
        return len(firsts) == len(others) == 2 and new == [1, 1]

    def settle() -> None:
        wait_for(is_whole, 90)
        cluster.wait_for_replicas("spread", 2)

    assert lose_amid(lambda: score(cluster, ITEMS), lose_one, settle) == expected
    assert score(cluster, ITEMS[:50]) == expected[:50]


@pytest.fixture(scope="module")
def service(cluster: KeyedCluster) -> KeyedCluster:
    cluster.serve(FAKE, SPREAD)
    return cluster


def test_each_replica_has_an_actor_on_either_node(service: LocalCluster) -> None:
    firsts, others = find_nodes(service)
    assert len(firsts) == len(others) == 2
    # Those of one node were started by its raylet.
    assert len({own.ppid() for own in firsts + others}) == 2
    found = [sum(own.ppid() == first.ppid() for own in firsts + others) for first in firsts]
    assert found == [2, 2]


def test_an_adapter_is_fetched_on_each_node_of_a_replica(service: KeyedCluster) -> None:
    with service.connect("ann") as client:
        card = put_adapter(client, "tiny", 1, model="spread")
    plain, adapted = (score(service, ITEMS[:1], adapter=name) for name in (None, "tiny"))
    assert plain != adapted, "the adapter does nothing"
    firsts, others = find_nodes(service)
    assert len(list_fetched(firsts + others, card["sha256"])) == 2


def test_a_job_of_2000_items_outlives_the_ranks_of_a_node(
    service: LocalCluster, machine: Server
) -> None:
    def lose(_: psutil.Process, other: psutil.Process) -> None:
        (engine,) = find_engines_below([other])
        engine.kill()

    check_job(service, machine, lose)
