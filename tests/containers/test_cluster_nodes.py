"""A cluster of Ray with each node in a container: nodes killed or cut off, the head restarted.

While that goes on, two callers score 2,000 items each: one in a single request through a node that
stays, one in small requests by the name that all nodes have. The tests print what they saw.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from logsteer import Client
from tests.conftest import ROOT, ServerFactory, fake_model
from tests.containers.conftest import MARK, PORT, build
from tests.containers.docker import docker, inspect, search_layers

PROJECT = "logsteer-test-ray"
RAY_IMAGE = "logsteer:ray"
MOST_BYTES = 3.1e9
NETWORK = os.environ.get("CONTAINERS_NETWORK", "172.30.91")
COMPOSE = ROOT / "deploy/ray/compose.yml"
CALLER = ROOT / "tests/containers/caller.py"
ADDRESS = {"head": 10, "node-1": 11, "node-2": 12}
INGRESS = "ServeReplica:logsteer:ingress"
CONTROLLER = "ServeController"
START_S = 180.0
BEGUN_S = 3.0
"""After so long both callers' items are at work on both nodes."""
NUM_ITEMS = 2000
MODEL = fake_model(delay_s=0.2, ahead_tokens=60)
"""Two replicas take ten seconds for the items."""
SILENCE_S = 10.0


@dataclass(frozen=True)
class Told:
    """What a caller printed: log-probabilities, errors it was left with, what it tried again."""

    logprobs: list[float]
    failed: list[str]
    seen: list[tuple[float, str]]
    longest_s: float
    took_s: float


class Nodes:
    """The containers of deploy/ray/compose.yml, under a project name of their own."""

    def __init__(self, directory: Path) -> None:
        model = MODEL | {"path": "/srv/logsteer/demo/model", "replicas": 2}
        config = {"models": [model], "cache_bytes": 0, "heartbeat_timeout_s": SILENCE_S}
        self._models = directory / "models.yaml"
        self._models.write_text(yaml.safe_dump(config))
        self._models.chmod(0o644)
        directory.chmod(0o755)

    def compose(self, *arguments: str) -> str:
        """Run docker compose on the cluster's file; return what it prints."""
        env = {
            "LOGSTEER_MODELS": str(self._models),
            "LOGSTEER_NETWORK": NETWORK,
            "LOGSTEER_PORT_1": str(int(PORT) + 1),
            "LOGSTEER_PORT_2": str(int(PORT) + 2),
            "LOGSTEER_MEMORY": "1536m",
        }
        file = ("--file", str(COMPOSE), "--project-name", PROJECT)
        return docker("compose", *file, *arguments, env=env).stdout

    def url(self, node: str) -> str:
        """The address of a node's proxy on the cluster's network, which this machine reaches."""
        return f"http://{NETWORK}.{ADDRESS[node]}:8000"

    def container(self, node: str) -> str:
        """The name of a node's container."""
        return f"{PROJECT}-{node}-1"

    def read_replicas(self, node: str) -> list[dict[str, Any]]:
        """The model's replicas as one node's ingress sees them; none where it does not answer."""
        try:
            answer = httpx.get(f"{self.url(node)}/models/fake", timeout=5)
        except httpx.TransportError:
            return []
        return list(answer.json()["replicas"]) if answer.is_success else []

    def wait_until_whole(self) -> float:
        """Wait until each node has an ingress with two replicas that answer; return the seconds."""
        began = time.monotonic()
        while time.monotonic() - began < START_S:
            read = [self.read_replicas(node) for node in ("node-1", "node-2")]
            states = [[replica["state"] for replica in replicas] for replicas in read]
            ingresses = [self.runs(node, INGRESS) for node in ("node-1", "node-2")]
            if states == [["ready"] * 2] * 2 and all([*ingresses, self.runs("head", CONTROLLER)]):
                return time.monotonic() - began
            time.sleep(0.5)
        raise TimeoutError(self.compose("logs", "--tail", "50"))

    def runs(self, node: str, title: str) -> bool:
        """Whether a process of Ray with this title runs on a node."""
        shown = docker("top", self.container(node), "-eo", "pid,args", check=False).stdout
        return f" ray::{title}" in shown

    def call(self, host: str, batch: int) -> "subprocess.Popen[str]":
        """Start a caller on the cluster's network."""
        command = ["docker", "run", "--rm", "--interactive", "--network", f"{PROJECT}_default"]
        arguments = ["--entrypoint", "python", RAY_IMAGE, "-"]
        arguments += [f"http://{host}:8000", str(NUM_ITEMS), str(batch)]
        with CALLER.open() as script:
            pipe = subprocess.PIPE
            return subprocess.Popen([*command, *arguments], stdin=script, stdout=pipe, text=True)

    def cut(self, node: str) -> None:
        """Take a node off the network."""
        docker("network", "disconnect", f"{PROJECT}_default", self.container(node))

    def let_in(self, node: str) -> None:
        """Give a node the network back, with the address and names that it had."""
        names = ("--alias", node, "--alias", "logsteer", "--ip", f"{NETWORK}.{ADDRESS[node]}")
        docker("network", "connect", *names, f"{PROJECT}_default", self.container(node))


def read_told(caller: "subprocess.Popen[str]") -> Told:
    """What a caller has to tell, as soon as it is done."""
    out, _ = caller.communicate(timeout=240)
    assert caller.returncode == 0
    return Told(*json.loads(out))


@pytest.fixture(scope="module")
def ray_image(secrets: dict[str, Path]) -> str:
    """The image with Ray."""
    seconds = build("ray", "--tag", RAY_IMAGE, secrets=secrets)
    size = inspect(RAY_IMAGE)["Size"]
    print(f"\nbuilt {RAY_IMAGE} in {seconds:.0f} s: {size / 1e9:.2f} GB")
    assert size < MOST_BYTES
    return RAY_IMAGE


@pytest.fixture(scope="module")
def nodes(ray_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A head and two nodes, a replica of the model on each, which answer."""
    found = Nodes(tmp_path_factory.mktemp("nodes"))
    found.compose("down", "--volumes")
    try:
        began = time.monotonic()
        found.compose("up", "--no-build", "--detach")
        found.wait_until_whole()
        print(f"\nthe cluster answers after {time.monotonic() - began:.0f} s")
        yield found
    finally:
        found.compose("down", "--volumes")


@pytest.fixture(scope="module")
def expected(start_server: ServerFactory) -> list[float]:
    """The answers of one machine without Ray."""
    items = [{"context_ids": [5, 100 + n % 50, n // 50], "target_ids": [[6]]} for n in range(2000)]
    with Client(start_server({"models": [MODEL], "cache_bytes": 0}).url) as client:
        answer = client.logprob(items=items)  # type: ignore[arg-type]
    return [result.targets[0].logprob for result in answer.results]


def check_nothing_lost(nodes: Nodes, what: str, fault: Any, expected: list[float]) -> None:
    """Have both callers at work during a fault, and hold their answers to one machine's."""
    callers = [nodes.call("node-2", NUM_ITEMS), nodes.call("logsteer", 20)]
    time.sleep(BEGUN_S)
    assert all(caller.poll() is None for caller in callers), "they are at work"
    fault()
    for name, caller in zip(("one request", "100 requests"), callers, strict=True):
        told = read_told(caller)
        print(
            f"{what}, {name}: {told.took_s:.1f} s, the longest {told.longest_s:.1f} s, "
            f"tried again: {told.seen or 'nothing'}"
        )
        assert told.failed == []
        assert len(told.logprobs) == NUM_ITEMS
        np.testing.assert_allclose(told.logprobs, expected, atol=1e-5, rtol=0)
    print(f"{what}: whole again {nodes.wait_until_whole():.1f} s after the last answer")


def test_no_layer_of_the_image_has_a_secret_of_the_build(ray_image: str) -> None:
    assert MARK not in docker("history", "--no-trunc", ray_image).stdout
    # A file that the image does have shows that the search reads layers.
    known = (ROOT / "deploy/models.cpu.yaml").read_bytes()
    assert search_layers(ray_image, [MARK.encode(), known]) == {known}


def test_the_image_runs_a_cluster_of_its_own(ray_image: str) -> None:
    name = f"{PROJECT}-alone"
    docker("rm", "--force", "--volumes", name, check=False)
    options = ("--read-only", "--tmpfs", "/tmp:mode=1777,exec", "--cap-drop", "ALL")
    docker(
        "run", "--detach", "--name", name, *options, "--shm-size", "512m", "--memory", "4g",
        "--publish", f"127.0.0.1:{PORT}:8000", "--env", "LOGSTEER_INSECURE=true", ray_image,
    )  # fmt: skip
    try:
        url, deadline = f"http://127.0.0.1:{PORT}", time.monotonic() + START_S
        while "Try:" not in docker("logs", name).stdout:
            assert time.monotonic() < deadline, docker("logs", name).stderr
            time.sleep(0.5)
        body = {"items": [{"context": "The capital of France is", "targets": [" Paris"]}]}
        answer = httpx.post(f"{url}/logprob", json=body, timeout=60).raise_for_status()
        assert answer.json()["results"][0]["targets"][0]["prob"] > 0.5
        assert docker("exec", name, "id", "-u").stdout.strip() == "10001"
        docker("stop", "--timeout", "75", name)
        assert inspect(name)["State"]["ExitCode"] == 0
    finally:
        docker("rm", "--force", "--volumes", name)


def test_no_part_of_the_service_but_a_proxy_runs_on_the_head(nodes: Nodes) -> None:
    assert nodes.runs("head", CONTROLLER)
    assert not nodes.runs("head", "ServeReplica")


def test_a_stopped_node_costs_nothing(nodes: Nodes, expected: list[float]) -> None:
    def stop() -> None:
        docker("kill", nodes.container("node-1"))
        time.sleep(4)
        docker("start", nodes.container("node-1"))

    check_nothing_lost(nodes, "node killed", stop, expected)


@pytest.mark.parametrize("seconds", [0.5 * SILENCE_S, 2.5 * SILENCE_S])
def test_a_node_that_is_cut_off_costs_nothing(
    nodes: Nodes, expected: list[float], seconds: float
) -> None:
    def cut() -> None:
        nodes.cut("node-1")
        time.sleep(seconds)
        nodes.let_in("node-1")

    check_nothing_lost(nodes, f"node cut off for {seconds:g} s", cut, expected)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_the_head_may_be_restarted(nodes: Nodes, expected: list[float], how: str) -> None:
    def restart() -> None:
        docker(how, nodes.container("head"))
        time.sleep(4)
        docker("start", nodes.container("head"))

    check_nothing_lost(nodes, f"head restarted after docker {how}", restart, expected)
