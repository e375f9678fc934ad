"""The clusters that the files of this directory share, and the same model on one machine.

Each ends with the last of these files, so they run one after another in one process.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.local import FAKE, ImpatientCluster, KeyedCluster, running
from tests.conftest import Server, uncached

HERE = Path(__file__).parent
SHARED = ["cluster", "impatient"]


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedCluster]:
    """The cluster of most files, which begins with FAKE alone."""
    with running(KeyedCluster(tmp_path_factory.mktemp("cluster"))) as found:
        yield found


@pytest.fixture(scope="package")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImpatientCluster]:
    """The cluster of faults, which begins with FAKE alone."""
    with running(ImpatientCluster(tmp_path_factory.mktemp("impatient"))) as found:
        yield found


@pytest.fixture(scope="package")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """FAKE on one machine, in one process."""
    config = uncached(FAKE | {"replicas": 1})
    server = Server.start(config, tmp_path_factory.mktemp("machine"))
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run first what needs no cluster of these, then what needs the one, then the other."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    own = [items[place] for place in places]
    needs = {
        item.path: found
        for found, name in enumerate(SHARED, 1)
        for item in own
        if name in getattr(item, "fixturenames", ())
    }
    own.sort(key=lambda item: needs.get(item.path, 0))
    for place, item in zip(places, own, strict=True):
        items[place] = item
