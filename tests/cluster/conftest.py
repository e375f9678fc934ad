"""A cluster of the project's own: a real Ray of two logical nodes of this machine."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT, Configuration, fake_model
from tests.faults import callers
from tests.faults.callers import Load
from tests.faults.keys import add_key
from tests.held import may_hold
from tests.ports import find_port

START_S = 240.0
REPLICA = "ray::ServeReplica:logsteer:model-{}"
BODY_BYTES = 2**17
UPLOAD_BYTES = 5 * 2**20
SILENT_S = 6.0
"""A replica that hangs is killed after so long."""

needs_all = pytest.mark.skipif(
    os.environ.get("CLUSTER") != "all",
    reason="SKIPPED WITHOUT CLUSTER=all: `make test-cluster` runs what takes minutes",
)


class Cluster:
    """`make cluster` with two models, and nodes beside the head; and the processes below it.

    `fake` has two replicas whose steps a file holds; `other` has one, and other scores.
    """

    def __init__(self, directory: Path, *models: Configuration, nodes: int = 2) -> None:
        self.first = models[0]["id"] if models else "fake"
        self.num_replicas = 1 if models else 2
        self.hold_file = directory / "hold"
        self.fake = fake_model(**may_hold(self.hold_file)) | {"replicas": 2}
        self.other = fake_model("other", shift=1.0)
        self.settings: dict[str, Any] = {
            "reload_beside": True,
            "cache_bytes": 0,
            "store_directory": f"{directory}/store",
            "key_file": str(directory / "keys.json"),
            "max_body_bytes": BODY_BYTES,
            "max_upload_bytes": UPLOAD_BYTES,
            "heartbeat_timeout_s": SILENT_S,
        }
        self.key = add_key(directory / "keys.json", "ann", "score", "steer", "write", "admin")
        self.config_path = directory / "models.yaml"
        self.write(*models or (self.fake, self.other))
        port = find_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = directory / "log"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["deploy/ray/local.sh", str(self.config_path)],
                env=os.environ | {"PATH": path, "LOGSTEER_PORT": str(port), "NODES": str(nodes)},
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )
        self.client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=120
        )

    def write(self, *models: Configuration) -> None:
        """Write the configuration that the next reload reads."""
        self.config_path.write_text(yaml.safe_dump({"models": list(models)} | self.settings))

    @property
    def output(self) -> str:
        """What was printed so far."""
        return self._log.read_text()

    def wait_until_ready(self, *, replicas: int = 2) -> None:
        """Wait until the first model has so many replicas that answer, and all models one."""
        deadline = time.monotonic() + START_S
        while not self._is_ready(replicas):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def _is_ready(self, replicas: int) -> bool:
        try:
            if self.client.get("/readyz").status_code != 200:
                return False
            card = self.read_card(self.first)
            states = [own["state"] for own in card.get("replicas", ())]  # a problem has none
            alive = self.find_replicas(self.first)
        except httpx.TransportError:
            return False
        return states == ["ready"] * replicas and len(alive) == replicas

    def read_card(self, model: str = "fake") -> dict[str, Any]:
        """The card of a model."""
        card: dict[str, Any] = self.client.get(f"/models/{model}").json()
        return card

    def score(self, *ids: int, model: str = "fake") -> httpx.Response:
        """Score a token after these."""
        body = {"model": model, "items": [{"context_ids": [5, *ids], "target_ids": [[6]]}]}
        return self.client.post("/logprob", json=body)

    def find(self, title: str) -> list[psutil.Process]:
        """The processes whose titles begin so, the oldest first."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        found = [own for own in family if read_title(own).startswith(title)]
        return sorted(found, key=lambda own: (own.create_time(), own.pid))

    def find_replicas(self, model: str = "fake") -> list[psutil.Process]:
        """The processes of a model's replicas."""
        return self.find(REPLICA.format(model))

    def count(self, name: str) -> dict[int, float]:
        """A metric of each replica, by its process."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return {
            int(own.labels["process"].rpartition(":")[2]): own.value
            for family in families
            for own in family.samples
            if own.name == f"logsteer_{name}"
        }

    def find_busy(self) -> list[psutil.Process]:
        """The replicas of `fake` that have a job."""
        busy = self.count("pending_tokens")
        return [own for own in self.find_replicas() if busy.get(own.pid)]


def read_title(process: psutil.Process) -> str:
    """The command line of a process, which an actor overwrites; empty of one that is gone."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def load(cluster: Cluster, quiet: Any = None) -> AbstractContextManager[Load]:
    """Four callers of `fake`, one request after another.

    `quiet`: what they are answered; asked for beforehand where a replica is held, because Serve
    sends a request there too where the other replica is late with its count.
    """
    return callers.load(cluster, "fake", 4, headers=cluster.client.headers, quiet=quiet)


@contextmanager
def running(found: Cluster) -> Iterator[Cluster]:
    """A cluster once it is ready; nothing is left of it afterwards."""
    try:
        found.wait_until_ready(replicas=found.num_replicas)
        yield found
    finally:
        found.hold_file.unlink(missing_ok=True)
        alive = found.process.poll() is None
        family = psutil.Process(found.process.pid).children(recursive=True) if alive else []
        for own in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                own.send_signal(signal.SIGCONT)
        found.client.close()
        found.process.send_signal(signal.SIGINT)
        try:
            found.process.wait(90)
            _, left = psutil.wait_procs(family, 30)
        finally:
            for own in family:
                if own.is_running():
                    own.kill()
        assert not left, [read_title(own) for own in left]


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster of all files, with both models."""
    pytest.importorskip("ray", reason="SKIPPED BECAUSE RAY IS ABSENT: install the extra `ray`")
    with running(Cluster(tmp_path_factory.mktemp("cluster"))) as found:
        yield found
