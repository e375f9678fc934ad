"""Actors of a replica's nodes that are lost or hang, a model without room, and adapters on a disk
that all nodes have.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from logsteer import Client
from tests.cluster.local import SPREAD, TENSOR, WIDE, LocalCluster, needs_all, needs_ray
from tests.cluster.test_ranks import check_job
from tests.conftest import Server, ServerFactory, vllm_model
from tests.contract.lora import write_adapter
from tests.faults.processes import wait_for

pytestmark = [pytest.mark.engine, needs_ray, needs_all]


@pytest.fixture(scope="module", autouse=True)
def models(impatient: LocalCluster) -> None:
    impatient.serve(SPREAD, WIDE)


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(lambda first, _: first.kill(), id="first killed"),
        pytest.param(lambda _, other: other.kill(), id="other killed"),
        pytest.param(lambda _, other: other.suspend(), id="other hangs"),
    ],
)
def test_a_job_of_2000_items_outlives_an_actor_of_a_node(
    impatient: LocalCluster,
    machine: Server,
    lose: Callable[[psutil.Process, psutil.Process], None],
) -> None:
    check_job(impatient, machine, lose)


def test_a_model_without_room_says_how_to_make_some(impatient: LocalCluster) -> None:
    def read_explained() -> dict[str, Any] | None:
        card = impatient.read_card("wide")
        return card if "no 3 nodes with room" in card["detail"] else None

    card = wait_for(read_explained)
    assert card is not None
    assert card["state"] == "loading"
    assert "lower cpus or nodes_per_replica" in card["detail"]


def test_an_adapter_is_loaded_on_both_nodes(
    impatient: LocalCluster, start_server: ServerFactory, tmp_path: Path
) -> None:
    impatient.serve(TENSOR)
    slots = {"adapter_slots": 1, "adapter_rank": 8}
    one = start_server({"models": [vllm_model("tensor", **slots)], "cache_bytes": 0})
    directory = write_adapter(tmp_path / "small")
    item = {"context_ids": [5, 6, 7, 8], "target_ids": [[9, 10, 11]]}
    found = []
    for url in (one.url, impatient.url):
        with Client(url, timeout=300, model="tensor") as client:
            client.adapters.put("small", directory)
            answers = [client.logprob([item], adapter=name) for name in (None, "small")]
            found += [answer.results[0].targets[0].logprobs for answer in answers]
    assert np.abs(np.array(found[0]) - found[1]).max() > 0.01, "the adapter does nothing"
    assert found[2] == pytest.approx(found[0], abs=1e-5)
    assert found[3] == pytest.approx(found[1], abs=1e-5)
