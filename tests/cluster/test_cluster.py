"""The service on a real Ray of two logical nodes, against the same on one machine."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import yaml

from logsteer import Client
from logsteer_server.stores.layer_vectors import LayerVectors
from tests.conftest import ROOT, Server, ServerFactory, fake_model
from tests.faults.processes import wait_for

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="SKIPPED BECAUSE RAY IS ABSENT: install the extra `ray`",
    ),
]
START_S = 240.0
ACTOR = "ray::ServeReplica:logsteer:model-fake"
BEGUN_S = 1.0
"""After so long a job of several seconds is at work in both actors."""
PROCESS = "process_start_time_seconds"
MODEL = fake_model(delay_s=0.05, ahead_tokens=60)
ITEMS = [{"context_ids": [5, 100 + n % 50, n // 50], "target_ids": [[6]]} for n in range(2000)]


class LocalCluster:
    """`make cluster`'s process, and those below it."""

    def __init__(self, directory: Path) -> None:
        config = {
            "models": [MODEL | {"replicas": 2}],
            "cache_bytes": 0,
            "store_directory": str(directory / "store"),
        }
        (directory / "models.yaml").write_text(yaml.safe_dump(config))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = directory / "log"
        command = [sys.executable, "-m", "logsteer_server.cluster", "--ingresses", "2"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(port), "--config", str(directory / "models.yaml")],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while "Try:" not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def find_actors(self) -> list[psutil.Process]:
        """The processes of the model's replicas; a title goes on with what runs."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        # A title goes on with what the actor runs.
        return [own for own in found if " ".join(own.cmdline()).startswith(ACTOR)]

    def read_replicas(self) -> list[dict[str, Any]]:
        """The replicas as one of the ingresses sees them."""
        card = httpx.get(f"{self.url}/models/fake", timeout=30).json()
        return list(card["replicas"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    found = LocalCluster(tmp_path_factory.mktemp("cluster"))
    try:
        found.wait_until_ready()
        yield found
    finally:
        family = psutil.Process(found.process.pid).children(recursive=True)
        found.process.send_signal(signal.SIGINT)
        try:
            assert found.process.wait(60) == 0, found.output
            _, left = psutil.wait_procs(family, 10)
            assert not left
        finally:
            for own in family:
                if own.is_running():
                    own.kill()


@pytest.fixture(scope="module")
def machine(start_server: ServerFactory) -> Server:
    """The same model on one machine."""
    return start_server({"models": [MODEL], "cache_bytes": 0})


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer without what differs from call to call."""
    response = httpx.post(f"{url}/{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return {name: value for name, value in response.json().items() if name not in ("id", "timing")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("logprob", {"items": ITEMS[:100]}),
        ("logprob", {"items": [{"context": "The sea", "targets": [" is", " was"]}], "top": 3}),
        ("perplexity", {"texts": ["The capital of France is Paris.", "It rains."]}),
        ("generate", {"prompts": ["The sea"], "max_tokens": 5, "seed": 7}),
    ],
)
def test_a_cluster_answers_as_one_machine_does(
    cluster: LocalCluster, machine: Server, path: str, body: dict[str, Any]
) -> None:
    assert ask(cluster.url, path, body) == ask(machine.url, path, body)


def test_a_vector_uploaded_through_one_ingress_is_known_to_the_other(cluster: LocalCluster) -> None:
    with Client(cluster.url, max_retries=0) as client:
        sha256 = client.vectors.put("north", LayerVectors({1: np.arange(1, 17)}).content).sha256
    cards = [httpx.get(f"{cluster.url}/vectors/north", timeout=30) for _ in range(40)]
    assert {card.status_code for card in cards} == {200}
    assert {card.json()["sha256"] for card in cards} == {sha256}
    pages = (httpx.get(f"{cluster.url}/metrics", timeout=30).text for _ in range(40))
    started = {line for page in pages for line in page.splitlines() if line.startswith(PROCESS)}
    assert len(started) == 2, "both ingresses answer"


def test_a_job_of_2000_items_outlives_the_actor_that_is_killed(
    cluster: LocalCluster, machine: Server
) -> None:
    expected = ask(machine.url, "logprob", {"items": ITEMS})
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, cluster.url, "logprob", {"items": ITEMS})
        time.sleep(BEGUN_S)
        killed = cluster.find_actors()[0]
        os.kill(killed.pid, signal.SIGKILL)
        assert not answer.done()
        assert answer.result(120) == expected
    # Counted by the ingress whose calls were lost with the actor, not by the other.
    wait_for(lambda: any(own["restarts"] for own in cluster.read_replicas()))
    wait_for(lambda: len(cluster.find_actors()) == 2, 60)
    wait_for(lambda: all(own["state"] == "ready" for own in cluster.read_replicas()), 60)
    assert len(ask(cluster.url, "logprob", {"items": ITEMS[:50]})["results"]) == 50
