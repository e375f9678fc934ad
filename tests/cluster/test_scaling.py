"""Replicas of a model that come with load and go without it, while requests are answered."""

import time
from collections.abc import Iterator

import pytest

from tests.cluster.local import FAKE, LocalCluster, ask, needs_all, needs_ray, running
from tests.conftest import Server
from tests.faults.callers import load
from tests.faults.processes import wait_for

pytestmark = [pytest.mark.engine, needs_ray, needs_all]

ITEMS = [{"context_ids": [5, n], "target_ids": [[6]]} for n in range(40)]
SCALING = ("--calls-per-replica", "3", "--scale-up-s", "2", "--scale-down-s", "2")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster of its own, whose model has another actor after two seconds of more calls."""
    model = FAKE | {"replicas": 1, "max_replicas": 2}
    directory = tmp_path_factory.mktemp("scaling")
    with running(LocalCluster(directory, model, arguments=SCALING)) as found:
        yield found


def test_from_one_to_two_and_back_under_load_loses_nothing(
    cluster: LocalCluster, machine: Server
) -> None:
    expected = ask(machine.url, "logprob", {"items": ITEMS})["results"]
    own = cluster.ask("logprob", {"items": ITEMS})["results"]
    for there, here in zip(own, expected, strict=True):
        found, wanted = there["targets"][0]["logprob"], here["targets"][0]["logprob"]
        assert found == pytest.approx(wanted, abs=TOLERANCE)
    assert len(cluster.find_actors()) == 1
    began = time.monotonic()
    with load(cluster, "fake", callers=24, items=ITEMS) as many:
        wait_for(lambda: len(cluster.find_actors()) == 2, 90)
        up_s = time.monotonic() - began
        wait_for(lambda: sum(card["state"] == "ready" for card in cluster.read_replicas()) == 2, 60)
        answered = len(many.statuses)
        wait_for(lambda: len(many.statuses) > answered + 50)
    began = time.monotonic()
    with load(cluster, "fake", callers=1, items=ITEMS) as few:
        wait_for(lambda: len(cluster.find_actors()) == 1, 120)
        down_s = time.monotonic() - began
        answered = len(few.statuses)
        wait_for(lambda: len(few.statuses) > answered + 10)
    for found_load in (many, few):
        assert set(found_load.statuses) == {200}, found_load.codes
        assert not found_load.wrong
    print(
        f"second actor after {up_s:.1f} s of load, gone {down_s:.1f} s after it; "
        f"{len(many.statuses) + len(few.statuses)} requests, none lost; longest "
        f"{max(many.waits + few.waits):.2f} s"
    )
